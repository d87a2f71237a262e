"""Experts that are split over more ranks than compute a batch together, beside what else there is to an engine."""

import numpy as np
import pytest
import torch
from cells import slow
from ranks import run_ranks
from shared_ranks import four_ranks
from split_runs import SplitJob, batches, load, save_models, train_each, whole_of

import hf_zero
from hf_zero.config import ConfigError
from hf_zero.engine.engine import ZeroEngine
from hf_zero.optimizer.replicas import ReplicasDivergedError

EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return str(folder)


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
        {"stage": 3, "persist_below_numel": 2000},
    ]
    near = [{"stage": stage, "comm": {"gradients": "int8", "weights": "int8"}} for stage in (2, 3)]
    near.append({"stage": 2, "moments": "8bit"})
    everyone = four_ranks.run(train_each, job=job, variants=[{"settings": settings} for settings in [*same, *near]])
    [alone] = run_ranks(
        train_each,
        world_size=1,
        time_limit_s=100,
        keyword_arguments={"job": job, "variants": [{"tp": 1, "ep": 1, "settings": {"stage": 0}}]},
    )
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
        "place": engine.transport.ledger.watch.log.place,
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
    assert "of state and gradients. What ranks [0, 1] send each other" in everyone[0]["table"]
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


def refusals(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    for comm in ({"shard_group_size": 2}, {"secondary_shard": "node", "node_size": 2}):
        model = load(SplitJob(folder=folder, kind="mixtral", tp=1, ep=2))
        with pytest.raises(ConfigError) as error:
            ZeroEngine(model, [torch.optim.AdamW(model.parameters())], {"stage": 3, "comm": comm})
        said.append(str(error.value))
    return said


def test_groups_of_a_size_are_refused_beside_experts_with_groups_of_their_own(folder):
    [said, *_] = four_ranks.run(refusals, folder=folder)
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
