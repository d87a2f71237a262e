"""Trainers of sentence-transformers: losses and saves are DDP's, evaluators end, and the plan knows activations."""

import contextlib
import io

import pytest
import torch
from cells import slow
from shared_ranks import run_on_ranks

st = pytest.importorskip(
    "sentence_transformers", reason="needs sentence-transformers: pip install sentence-transformers"
)

import encoders  # noqa: E402

pytestmark = pytest.mark.timeout(240)


def heard(rank: int, world_size: int, **arguments) -> tuple[encoders.Trained, str]:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        trained = encoders.train(rank, world_size, **arguments)
    return trained, " ".join(stderr.getvalue().replace("│", " ").split())


@pytest.mark.extra("planner")
def test_a_bi_encoder_is_trained_and_evaluated_at_stage_3_as_under_ddp(tmp_path):
    encoders.write_bert(tmp_path / "start")
    # Negatives of all ranks, in mini-batches. Its evaluator has an odd number of texts.
    name = "CachedMultipleNegativesRanking, gathered"
    job = {"name": name, "start": str(tmp_path / "start"), "evaluates": True, "is_quiet": False, "max_steps": 2}
    runs, models = [], []
    for door in ("ddp", f"stage=3,{encoders.CELLS[name].settings}"):
        folder = tmp_path / door
        folder.mkdir()
        runs.append(run_on_ranks(heard, door=door, folder=str(folder), **job))
        models.append(st.SentenceTransformer(str(folder / "model"), device="cpu"))
    for (mine, _), (expected, _) in zip(*reversed(runs)):
        assert mine.losses == expected.losses
        assert mine.metrics[0]["eval_spearman_cosine"] == expected.metrics[0]["eval_spearman_cosine"]
        assert len(mine.metrics) == len(expected.metrics)
    (_, said), (_, of_the_other) = runs[1]
    assert "activations (first rows, 4 x" in said and "unknown: " not in said
    assert "activations" not in of_the_other
    assert torch.equal(*(model.encode("w1 w2 w3", convert_to_tensor=True) for model in models))


@pytest.mark.parametrize(
    ("name", "settings", "is_told"),
    [
        ("CachedMultipleNegativesRanking", "stage=2", True),
        slow("CachedMultipleNegativesRanking", "stage=2,grad_accumulation=local", False),
        slow("CachedMultipleNegativesRanking", "stage=2,grad_accumulation=sharded", False),
        slow("MultipleNegativesRanking", "stage=3", False),
        # Whole gradients are the default below stage 2.
        slow("CachedMultipleNegativesRanking", "stage=1", False),
    ],
)
def test_a_cached_loss_that_reduces_each_mini_batch_is_told_once(name, settings, is_told, tmp_path):
    encoders.write_bert(tmp_path / "start")
    job = {"name": name, "start": str(tmp_path / "start"), "folder": str(tmp_path), "is_quiet": False, "max_steps": 2}
    (_, said), (_, of_the_other) = run_on_ranks(heard, door=settings, **job)
    # Three columns of four rows, two rows at a time.
    told = "runs a backward for each of its 6 mini-batches"
    assert said.count(told) == is_told and told not in of_the_other
    assert ("`--zero stage=2,grad_accumulation=local`" in said) == is_told


@pytest.mark.extra("planner")
@pytest.mark.parametrize("name", ["BinaryCrossEntropy", *(slow(name) for name in ("ListNet", "Triplet", "Splade"))])
def test_auto_knows_the_activations_of_texts_and_trains_as_ddp(name, tmp_path):
    encoders.write_bert(tmp_path / "start")
    job = {"name": name, "start": str(tmp_path / "start"), "is_quiet": False, "max_steps": 2}
    runs = []
    for door in ("ddp", "stage=auto"):
        folder = tmp_path / door
        folder.mkdir()
        runs.append(run_on_ranks(heard, door=door, folder=str(folder), **job))
    (expected, _), (mine, said) = runs[0][0], runs[1][0]
    assert mine.losses == expected.losses
    assert "micro-batch of 4 rows of texts (rows: the data loader; texts: the longest of the first 1,000)" in said
    assert "activations are not counted" not in said


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", encoders.CELLS)
def test_every_loss_is_ddps_at_every_stage(name, world_size, tmp_path):
    if encoders.CELLS[name].kind == "setfit":
        pytest.importorskip("setfit", reason="needs setfit: pip install setfit")
    rows = list(encoders.compare(name, world_size, [1, 2, 3], tmp_path))
    assert [row["outcome"] for row in rows] == ["passed"] * 3, "\n".join(map(str, rows))
