"""Models that tensor and expert parallelism split over ranks, with ZeRO over the others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cells import slow
from safetensors.torch import save_file
from shared_ranks import four_ranks, run_on_ranks
from split_runs import KINDS, SplitJob, batches, load, save_models, train_each, whole_of
from transformers import MixtralForCausalLM, core_model_loading

import hf_zero
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.mapped_tensors import mapped_tensors
from hf_zero.config import ConfigError
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.split_model import DifferentBatchesError
from hf_zero.integrations import file_blocks
from hf_zero.integrations.init import load_weights_into
from hf_zero.integrations.model_parallel import parallel_config
from hf_zero.optimizer.replicas import ReplicasDivergedError

pytestmark = pytest.mark.usefixtures("splits_models")

STAGES = [{"stage": stage} for stage in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return str(folder)


def both(job: SplitJob, variants: list[dict]) -> tuple[list, list]:
    """What each of four ranks has, and one process with a whole model."""
    split = four_ranks.run(train_each, job=job, variants=variants)
    [alone] = run_on_ranks(
        train_each, world_size=1, time_limit_s=200, job=job, variants=[{"tp": 1, "ep": 1, "settings": {"stage": 0}}]
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
                {"tp": tp, "ep": ep, "max_norm": 0.5, "steps": 6, "learning_rate": 2e-3},
                STAGES,
                marks=pytest.mark.slow,
            )
            for tp, ep in ((1, 2), (1, 4), (2, 4))
        ),
        # Norms within a head: their gradients are summed over the ranks of a copy.
        ("qwen3", {"steps": 2}, STAGES[1:2]),
        pytest.param(
            "mixtral", {"ep": 2, "max_norm": 0.5, "steps": 6, "learning_rate": 2e-3}, STAGES, marks=pytest.mark.slow
        ),
        pytest.param("tied", {}, STAGES, marks=pytest.mark.slow),
        pytest.param("qwen3", {"steps": 6}, STAGES, marks=pytest.mark.slow),
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


@pytest.mark.extra("wire")
def test_values_that_all_ranks_of_a_copy_have_stay_alike_through_a_quantized_wire(folder):
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
            "needs whole parameters for its update",
            "does not divide the 4 ranks",
            "for generation",
            "ep_size is 3; allowed with tp_size 2 on 4 ranks: 1, 2, 4.",
            "fsdp_size=2",
        ),
        strict=True,
    ):
        assert words in text


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory) -> Path:
    """Models to load, and a checkpoint with other weights."""
    experts_folder = tmp_path_factory.mktemp("experts")
    save_models(experts_folder)
    torch.manual_seed(5)
    model = KINDS["mixtral"][0](KINDS["mixtral"][1])
    model.save_pretrained(experts_folder / "checkpoint")
    # As `hf-zero consolidate` writes it of a split run.
    save_file(model.state_dict(), experts_folder / "mixtral" / "model.safetensors", metadata={"format": "pt"})
    return experts_folder


# ---- files with a tensor for each expert ----


def resumes(rank: int, world_size: int, folder: Path, ep: int) -> dict[str, np.ndarray]:
    model = load(SplitJob(folder=str(folder), kind="mixtral", tp=2, ep=ep))
    engine = ZeroEngine(model, [torch.optim.AdamW(model.parameters())], {"stage": 2})
    load_weights_into(engine, folder / "checkpoint")
    engine.close()
    return whole_of(model)


# A model that was loaded from files with a tensor for all experts.
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_files_with_a_tensor_an_expert_are_read_into_a_split_model(experts_folder, ep):
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in mapped_tensors(
        experts_folder / "checkpoint/model.safetensors"
    )
    expected = dict(MixtralForCausalLM.from_pretrained(experts_folder / "checkpoint").named_parameters())
    for whole in run_on_ranks(resumes, world_size=4, folder=experts_folder, ep=ep):
        assert whole.keys() == expected.keys()
        assert all(np.array_equal(value, expected[name].detach().numpy()) for name, value in whole.items())


def test_tensors_that_are_computed_and_not_cut_are_refused_by_name(experts_folder, monkeypatch):
    model = MixtralForCausalLM.from_pretrained(experts_folder / "checkpoint")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    blocks = file_blocks.blocks_in_files(model, shapes, then="")
    w3 = blocks["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    assert (w3.name, w3.offsets, w3.sizes) == ("model.layers.0.mlp.experts.gate_up_proj", (2, 48, 0), (1, 48, 32))
    monkeypatch.setattr(
        core_model_loading, "revert_weight_conversion", lambda _, state: {"sum": state["lm_head.weight"] + 1}
    )
    with pytest.raises(CheckpointError, match="'sum' of a weights file is not a block of one of the model's tensors"):
        file_blocks.blocks_in_files(model, shapes, then="")
    # Every second row, and a transposed matrix.
    for view in (lambda value: value[::2], lambda value: value.t()):
        monkeypatch.setattr(
            core_model_loading,
            "revert_weight_conversion",
            lambda _, state, view=view: {"view": view(state["lm_head.weight"])},
        )
        with pytest.raises(CheckpointError, match="'view' of a weights file"):
            file_blocks.blocks_in_files(model, shapes, then="")


# ---- experts over more ranks than compute a batch together ----

EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("sizes", [slow((1, 2)), slow((1, 4)), slow((2, 4))])
def test_tiers_accumulation_and_checks_leave_the_run_as_it_is(folder, tmp_path, sizes):
    tp, ep = sizes
    job = SplitJob(folder=folder, kind="mixtral", tp=tp, ep=ep, steps=4, accumulation=2, max_norm=0.5)
    files = {"optimizer": "nvme", "params": "nvme", "nvme_path": str(tmp_path)}
    same = [
        {"stage": 0, "check_replicas_every": 1},
        {"stage": 1, "check_replicas_every": 1},
        {"stage": 3, "check_replicas_every": 1, "grad_accumulation": "sharded"},
        {"stage": 2, "offload": {"optimizer": "cpu"}},
        {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
        {"stage": 3, "offload": files},
    ]
    near = [{"stage": stage, "comm": {"gradients": "int8", "weights": "int8"}} for stage in (2, 3)]
    near.append({"stage": 2, "moments": "8bit"})
    everyone = four_ranks.run(train_each, job=job, variants=[{"settings": settings} for settings in [*same, *near]])
    [alone] = run_on_ranks(train_each, world_size=1, job=job, variants=[{"tp": 1, "ep": 1, "settings": {"stage": 0}}])
    for outcomes in everyone:
        for settings, outcome in zip([*same, *near], outcomes):
            tolerance = 1e-5 if settings in same else 2e-2
            assert outcome.losses == pytest.approx(alone[0].losses, rel=tolerance), settings
            assert outcome.norms == pytest.approx(alone[0].norms, rel=10 * tolerance), settings


def looks(rank: int, world_size: int, folder: str, stage: int) -> dict:
    """Edits and looks, with frozen experts in the first layer."""
    job = SplitJob(folder=folder, kind="mixtral", tp=1, ep=2, steps=1)
    model = load(job)
    frozen = model.model.layers[0].mlp.experts
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": stage, "check_replicas_every": 1})
    [[batch]] = batches(job, engine.groups.rank, engine.groups.world_size)
    weight = model.get_parameter(EXPERTS)
    with engine.gathered(weight):
        before = weight.detach().clone()
    with engine.gathered(weight, writeback=True), torch.no_grad():
        # What the first rank with this part writes is kept: ranks 0 and 1.
        weight.mul_(2.0 if rank < 2 else 3.0)
    with engine.gathered(weight):
        edited = torch.equal(weight, before * 2)
    model(**batch).loss.backward()
    gradient = engine.full_grad(weight).clone()
    optimizer.step()
    moment = engine.full_state(weight)["exp_avg"]
    found = {
        "edited": edited,
        "gradient": gradient.numpy(),
        # AdamW's first moment of a first step.
        "moment": torch.allclose(moment, 0.1 * gradient, rtol=1e-5),
        "table": engine.comm_report().table(),
        "place": engine.transport.ledger.watch.log.phase,
    }
    whole = engine.whole_state_dict(wanted=rank == 3)
    engine.close()
    by_layer = whole_of(model)
    found["whole"] = all(np.array_equal(whole[name].numpy(), by_layer[name]) for name in by_layer) if whole else None
    return found


@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_edits_and_looks_are_of_the_ranks_with_the_same_experts(folder, stage):
    everyone = four_ranks.run(looks, folder=folder, stage=stage)
    assert all(found["edited"] and found["moment"] for found in everyone)
    assert [found["whole"] for found in everyone] == [None, None, None, True]
    gradients = [found["gradient"] for found in everyone]
    assert np.array_equal(gradients[0], gradients[2]) and np.array_equal(gradients[1], gradients[3])
    assert not np.array_equal(gradients[0], gradients[1])
    assert "Messages of the model itself (tensor or expert parallel), between ranks [0, 1]" in everyone[0]["table"]
    assert [found["place"].partition(", ")[2] for found in everyone] == [
        f"step 1, dp {rank}, tp 0" for rank in range(4)
    ]


def goes_apart(rank: int, world_size: int, folder: str, stage: int) -> str:
    job = SplitJob(folder=folder, kind="mixtral", tp=1, ep=2, steps=1)
    model = load(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": stage, "check_replicas_every": 1})
    [[batch]] = batches(job, engine.groups.rank, engine.groups.world_size)
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.finish_parameters()
    if rank == 3:
        model.get_parameter(EXPERTS).data[0, 0, 0] += 1
    model(**batch).loss.backward()
    with pytest.raises(ReplicasDivergedError) as error:
        optimizer.step()
    return str(error.value)


def test_experts_that_go_apart_on_one_rank_are_named(folder):
    for said in four_ranks.run(goes_apart, folder=folder, stage=0):
        assert "experts" in said and "Ranks with the same values: rank 1; rank 3." in said


def refusals_of_groups(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    for comm in ({"shard_group_size": 2}, {"secondary_shard": "node", "node_size": 2}):
        model = load(SplitJob(folder=folder, kind="mixtral", tp=1, ep=2))
        with pytest.raises(ConfigError) as error:
            ZeroEngine(model, [torch.optim.AdamW(model.parameters())], {"stage": 3, "comm": comm})
        said.append(str(error.value))
    return said


def test_groups_of_a_size_are_refused_beside_experts_with_groups_of_their_own(folder):
    [said, *_] = four_ranks.run(refusals_of_groups, folder=folder)
    assert "`comm.shard_group_size` is 2, and experts are split over more ranks" in said[0]
    assert "`comm.secondary_shard` is node, and experts" in said[1]


def compares(rank: int, world_size: int, folder: str, sizes: tuple[int, int]):
    tp, ep = sizes
    job = SplitJob(folder=folder, kind="mixtral", tp=tp, ep=ep, steps=3)
    rows = [batch for [batch] in batches(job, rank // tp, world_size // tp)]
    return hf_zero.parity(load(job), rows, {"stage": 3}, max_norm=0.5, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2), (2, 4)])
def test_parity_is_with_plain_all_reduces_over_both_kinds_of_ranks(folder, sizes):
    for report in four_ranks.run(compares, folder=folder, sizes=sizes):
        assert report.passed and report.world_size == 4 and len(report.gradients) == 21, str(report)
