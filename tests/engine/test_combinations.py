"""Settings of different axes together: where parameters live, how they travel, who shares them, which optimizer, which digits.

Where state lives changes no digit, so each combination is compared bit for bit with the same run in device memory.
"""

from dataclasses import dataclass, field, replace

import pytest
from cells import slow
from offloaded_params import moved
from ranks import run_ranks
from scaled_runs import OVERFLOWS, muon_and_adamw
from scaled_runs import train as train_scaled
from shared_ranks import on_ranks
from training import Job, train

pytestmark = pytest.mark.timeout(180)

STAGE_3 = {"stage": 3, "bucket_bytes": "20KiB"}
IN_BLOCKS = {"gradients": "int8", "weights": "int8"}
GROUPS = {"shard_group_size": 2, "node_size": 2}
NEAR = {"secondary_shard": "node", "node_size": 2}
HOST, FILES = ("cpu", "cpu"), ("nvme", "nvme")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run in device memory and in each of some places for (parameters, optimizer state)."""

    settings: dict
    places: tuple[tuple[str, str], ...] = (HOST, FILES)
    job: Job = field(default=Job(steps=3, accumulation=2, max_norm=0.5))


MUON = Job(steps=3, make_optimizer=muon_and_adamw, max_norm=0.5)

ON_TWO_RANKS = {
    "blocks": Case(settings={"comm": IN_BLOCKS}),
    "blocks in two places": Case(settings={"comm": IN_BLOCKS}, places=(("cpu", "none"), ("nvme", "cpu"))),
    "4 bits and kept small ones": Case(settings={"comm": {"gradients": "int4"}, "persist_below_numel": 100}),
    "blocks and bf16": Case(settings={"comm": IN_BLOCKS, "param_dtype": "bfloat16"}),
    "blocks and local accumulation": Case(settings={"comm": IN_BLOCKS, "grad_accumulation": "local"}, places=(HOST,)),
    "whole parameters": Case(settings={}, job=MUON),
    "whole parameters and blocks": Case(settings={"comm": IN_BLOCKS}, job=MUON),
}

ON_FOUR_RANKS = {
    "groups": Case(settings={"comm": GROUPS}),
    "groups and blocks": Case(settings={"comm": GROUPS | IN_BLOCKS}),
    "groups and whole parameters": Case(settings={"comm": GROUPS}, job=MUON, places=(HOST,)),
    "secondary shards": Case(settings={"comm": NEAR}),
    "secondary shards and blocks": Case(settings={"comm": NEAR | IN_BLOCKS}, places=(HOST,)),
}


def on(world_size: int, name: str, case: Case, *, slow: bool):
    return pytest.param(world_size, case, id=f"{name}-{world_size}", marks=pytest.mark.slow if slow else ())


@pytest.mark.short_cells("whole parameters-2")
@pytest.mark.parametrize(
    ("world_size", "case"),
    [on(2, name, case, slow=name not in ("blocks", "whole parameters")) for name, case in ON_TWO_RANKS.items()]
    + [on(4, name, case, slow=name != "groups and blocks") for name, case in ON_FOUR_RANKS.items()],
)
@on_ranks(time_limit_s=170)
def test_parameters_elsewhere_train_the_same_bit_for_bit(rank, world_size, case, tmp_path):
    path = str(tmp_path)
    here = train(rank, world_size, replace(case.job, settings={**STAGE_3, **case.settings}))
    for place in case.places:
        there = train(rank, world_size, replace(case.job, settings=moved(*place, path, **case.settings)))
        assert there.equals(here) and there.norms == here.norms, f"{place}: {there.losses} for {here.losses}"


FLOAT16 = {"param_dtype": "float16"}


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks(time_limit_s=170)
def test_parameters_elsewhere_are_scaled_and_skipped_the_same(rank, world_size, tmp_path):
    path = str(tmp_path)
    for settings, autocast in (({}, True), (FLOAT16, False), ({**FLOAT16, "comm": IN_BLOCKS}, False)):
        how = {"autocast": autocast, "max_norm": 1e3, "steps": 7}
        here = train_scaled(rank, {**STAGE_3, **settings}, **how)
        assert here.skipped == [OVERFLOWS.get(step, world_size) < world_size for step in range(7)]
        for place in (HOST, FILES):
            assert train_scaled(rank, moved(*place, path, **settings), **how).equals(here), (settings, place)


def scaled_in_groups(rank: int, world_size: int, cells: list[tuple]) -> tuple[list[bytes], list[float]]:
    """The weights at the end of each run, and its scales."""
    found, scales = [], []
    for stage, settings, autocast in cells:
        runs = []
        for comm in ({}, GROUPS, GROUPS | {"gradients": "int8"}):
            config = {**STAGE_3, "stage": stage, **settings, "comm": comm}
            runs.append(train_scaled(rank, config, autocast=autocast, max_norm=1e3, steps=7))
            values = [values.numpy().tobytes() for _, values in sorted(runs[-1].tensors.items())]
            found.append(b"".join(values))
            scales += runs[-1].scales
        one, *several = runs
        assert one.skipped == [step in OVERFLOWS for step in range(7)]
        for run in several:
            assert (run.skipped, run.scales) == (one.skipped, one.scales)
            assert run.losses == pytest.approx(one.losses, rel=5e-3), (stage, run.losses, one.losses)
    return found, scales


@pytest.mark.slow
@pytest.mark.parametrize("cells", [[(3, FLOAT16, False)], slow([(2, {}, True)], id="stage 2")], ids=["stage 3", None])
def test_shard_groups_skip_together_and_stay_alike(cells):
    first, *others = run_ranks(scaled_in_groups, world_size=4, time_limit_s=170, keyword_arguments={"cells": cells})
    assert all(other == first for other in others)
