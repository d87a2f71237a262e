"""Models that tensor and expert parallelism split over ranks, with ZeRO over the others."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from shared_ranks import four_ranks
from split_runs import SplitJob, batches, load, save_models, train_each

from hf_zero.config import ConfigError
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.split_model import DifferentBatchesError
from hf_zero.integrations.model_parallel import parallel_config
from hf_zero.optimizer.replicas import ReplicasDivergedError

STAGES = [{"stage": stage} for stage in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return str(folder)


def both(job: SplitJob, variants: list[dict]) -> tuple[list, list]:
    """What each of four ranks has, and one process with a whole model."""
    split = four_ranks.run(train_each, job=job, variants=variants)
    [alone] = run_ranks(
        train_each,
        world_size=1,
        time_limit_s=200,
        keyword_arguments={"job": job, "variants": [{"tp": 1, "ep": 1, "settings": {"stage": 0}}]},
    )
    return split, alone


def assert_close(outcome, other, tolerance=1e-5):
    assert outcome.losses == pytest.approx(other.losses, rel=tolerance)
    assert outcome.norms == pytest.approx(other.norms, rel=10 * tolerance)


@pytest.mark.parametrize(
    "kind, changes, stages",
    [
        ("llama", {"max_norm": 0.5, "accumulation": 2}, STAGES[2:3]),
        pytest.param("llama", {"max_norm": 0.5, "accumulation": 2}, STAGES, marks=pytest.mark.slow),
        # Experts over more ranks than compute a batch together: each rank a batch of its own, two ranks or one with the same
        # experts; and two ranks a batch.
        ("mixtral", {"tp": 1, "ep": 2, "max_norm": 0.5, "steps": 2, "accumulation": 2}, [STAGES[0], STAGES[3]]),
        ("mixtral", {"tp": 2, "ep": 4, "max_norm": 0.5, "steps": 2}, STAGES[2:3]),
        *(
            pytest.param(
                "mixtral",
                {"tp": tp, "ep": ep, "max_norm": 0.5, "steps": 20, "learning_rate": 2e-3},
                STAGES,
                marks=pytest.mark.slow,
            )
            for tp, ep in ((1, 2), (1, 4), (2, 4))
        ),
        # Norms within a head: their gradients are summed over the ranks of a copy.
        ("qwen3", {"steps": 2}, STAGES[1:2]),
        pytest.param(
            "mixtral", {"ep": 2, "max_norm": 0.5, "steps": 20, "learning_rate": 2e-3}, STAGES, marks=pytest.mark.slow
        ),
        pytest.param("tied", {}, STAGES, marks=pytest.mark.slow),
        pytest.param("qwen3", {"steps": 20}, STAGES, marks=pytest.mark.slow),
        pytest.param("mixtral", {"max_norm": 0.5, "steps": 8, "learning_rate": 2e-3}, STAGES, marks=pytest.mark.slow),
    ],
)
def test_losses_are_transformers_own_and_one_process_s_at_each_stage(folder, kind, changes, stages):
    job = SplitJob(folder=folder, kind=kind, **changes)
    everyone, [alone] = both(job, [{"settings": None}, *({"settings": s} for s in stages)])
    for stock, *stages in everyone:
        assert_close(stock, alone)
        for outcome in stages:
            assert_close(outcome, stock)
            assert_close(outcome, alone)
            for name, value in outcome.whole.items():
                assert np.allclose(value, alone.whole[name], rtol=1e-2, atol=5e-4), name
    for variant in range(1, len(stages) + 1):
        by_rank = [outcomes[variant] for outcomes in everyone]
        for name in by_rank[0].own:
            size = max(job.tp, job.ep) if ".experts." in name else job.tp
            for rank in range(size, len(by_rank)):
                assert np.array_equal(by_rank[rank].own[name], by_rank[rank - size].own[name]), name
        assert len({tuple(outcome.norms) for outcome in by_rank}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"kind": "mixtral", "tp": 1, "ep": 2}])
def test_bf16_parameters_with_masters_follow_one_process(folder, changes):
    job = SplitJob(folder=folder, dtype=torch.bfloat16, max_norm=0.5, **changes)
    everyone, [alone] = both(job, [{"settings": s} for s in STAGES])
    for outcomes in everyone:
        for outcome in outcomes:
            assert_close(outcome, alone, tolerance=1e-2)


def test_values_that_all_ranks_of_a_copy_have_stay_alike_through_a_quantised_wire(folder):
    # They would not, if blocks had elements of theirs and of parameters that are split.
    job = SplitJob(folder=folder, steps=2)
    comm = {"gradients": "int8", "weights": "int8"}
    everyone, [alone] = both(job, [{"settings": {"stage": 2, "comm": comm}}])
    for [outcome] in everyone:
        assert_close(outcome, alone, tolerance=1e-2)


@pytest.mark.slow
def test_state_and_traffic_are_those_of_zero_over_the_local_part(folder):
    job = SplitJob(folder=folder, steps=1)
    split = four_ranks.run(train_each, job=job, variants=[{"settings": {"stage": 0}}, {"settings": {"stage": 2}}])
    for whole, sharded in split:
        local_numel = sum(values.size for values in whole.own.values())
        assert whole.state_bytes == 2 * 4 * local_numel
        # Slots and shards begin at multiples: at most so much is padding.
        assert sharded.state_bytes == pytest.approx(whole.state_bytes / 2, rel=0.02)
        # Two ranks send each other half of the gradients and half of the parameters a step.
        assert sharded.sent_bytes == pytest.approx(job.steps * 4 * local_numel, rel=0.05)


def different_batches(rank: int, world_size: int, folder: str) -> str:
    job = SplitJob(folder=folder)
    model = load(job)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], {"stage": 2})
    [first], *_ = batches(job, rank, world_size)
    with pytest.raises(DifferentBatchesError) as error:
        model(**first)
    engine.close()
    return str(error.value)


def test_ranks_of_a_copy_that_have_different_batches_are_told_so(folder):
    said = four_ranks.run(different_batches, folder=folder)
    assert len(set(said)) == 1
    assert "ranks 0 and 1 hold one copy of the model together" in said[0]


def unequal_gradients(rank: int, world_size: int, folder: str) -> str:
    job = SplitJob(folder=folder)
    model = load(job)
    model.model.norm.weight.register_hook(lambda gradient: gradient * (1 + rank % 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": 2})
    [first], *_ = batches(job, engine.groups.rank, engine.groups.world_size)
    model(**first).loss.backward()
    with pytest.raises(ReplicasDivergedError) as error:
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            model(**first).loss.backward()
    return str(error.value)


def test_a_parameter_that_is_not_split_and_goes_apart_is_named(folder):
    said = four_ranks.run(unequal_gradients, folder=folder)
    assert "'model.norm.weight' is not split over ranks [0, 1]" in said[0]


def refusals(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    for settings, make in (
        ({"stage": 2, "comm": {"sync_every": 4}}, torch.optim.AdamW),
        ({"stage": 2}, torch.optim.Muon if hasattr(torch.optim, "Muon") else torch.optim.Adafactor),
    ):
        model = load(SplitJob(folder=folder))
        matrices = [p for p in model.parameters() if p.dim() == 2]
        before = {name: type(p) for name, p in model.named_parameters()}
        with pytest.raises(ConfigError) as error:
            ZeroEngine(model, [make(matrices, lr=1e-3)], settings)
        said.append(str(error.value))
        assert {name: type(p) for name, p in model.named_parameters()} == before
    for sizes in (
        {"tp_size": 3},
        {"tp_size": 2, "pp_size": 2},
        {"tp_size": 2, "ep_size": 3},
        {"tp_size": 2, "fsdp_size": 2},
    ):
        with pytest.raises(ConfigError) as error:
            parallel_config(**sizes)
        said.append(str(error.value))
    return said


def test_what_cannot_be_combined_is_refused_and_the_model_is_as_before(folder):
    [said, *_] = four_ranks.run(refusals, folder=folder)
    for text, words in zip(
        said,
        (
            "`comm.sync_every` is 4",
            "updates an element by",
            "does not divide the 4 ranks",
            "for generating",
            "ep_size is 3; allowed with tp_size 2 on 4 ranks: 1, 2, 4.",
            "fsdp_size=2",
        ),
        strict=True,
    ):
        assert words in text
