"""A rank that stops, ends, or calls something alone: the others end in time, and name it."""

import os
import re
from pathlib import Path

import pytest
from faulty_ranks import outcomes, why_no_namespaces
from launching import launch

SECONDS = 20.0
"""In which every survivor has ended, where ranks are waited for 8 s, on a machine that has nothing else to do."""

LONE = (
    "lone full_grad",
    "lone read of p.grad",
    "lone save_pretrained",
    "lone save_state",
    "lone clip",
    "lone barrier",
    "lone all_reduce",
)
FAULTS = ("stopped", "sleeping", "killed", "exception", "sys.exit", *LONE)


def slack() -> float:
    """How much longer things may take than on a machine that has nothing else to do, or has had till a moment ago."""
    return max(3.0, 2 * os.getloadavg()[0] / os.cpu_count())


def print_seconds(what: str, ranks: list[dict]) -> None:
    ends = ", ".join(f"rank {rank} {outcome['seconds']:.1f} s" for rank, outcome in enumerate(ranks))
    print(f"{what}: from the fault to the end of the process: {ends}")


def check(fault: str, ranks: list[dict]) -> None:
    """Every rank but the one that was at fault has ended in time with an error, and has named that one."""
    for rank, outcome in enumerate(ranks):
        said, limit = outcome["said"], SECONDS * slack()
        if rank == 1 and fault not in LONE:
            continue
        assert outcome["code"] not in (0, None), f"rank {rank}: {said[-2000:]}"
        assert outcome["seconds"] < limit, f"rank {rank} took {outcome['seconds']:.0f} s: {said[-2000:]}"
        assert "trained to the end" not in said
        assert "terminate called" not in said, said[-2000:]
        if rank != 1:
            assert "rank 1" in said.partition("hf_zero: ")[2], f"rank {rank}: {said[-2000:]}"


SHORT = {
    "stopped": {"stage": 2, "world_size": 3},
    "exception": {"stage": 1},
    "lone full_grad": {"stage": 3},
    "lone read of p.grad": {"stage": 2},
}
"""A few of the matrix, in a short time."""
MORE = {
    "stopped, with ddp_timeout": {"fault": "stopped", "stage": 2, "way": "trainer", "limits_group": True},
    "sys.exit": {"stage": 2},
    "lone barrier": {"stage": 1},
    "stopped, with InitProcessGroupKwargs": {"fault": "stopped", "stage": 3, "limits_group": True},
    "sleeping, with a timeout of init_process_group": {
        "fault": "sleeping",
        "stage": 1,
        "way": "engine",
        "limits_group": True,
    },
}


LEFT = {
    "end_training": {"fault": "end_training", "stage": 2, "own_store": True},
    "destroyed groups": {"fault": "destroyed groups", "stage": 2, "way": "engine", "own_store": True},
    "end": {"fault": "end", "stage": 3, "way": "engine", "own_store": True},
    "end_training, under torchrun": {"fault": "end_training", "stage": 3},
    "destroyed groups, under torchrun": {"fault": "destroyed groups", "stage": 1, "way": "engine"},
    "end, under torchrun": {"fault": "end", "stage": 1, "way": "engine", "world_size": 3},
}
"""Rank 0 has fewer batches, and ends well."""


def started(runs: dict[str, dict], folder: Path) -> dict[str, list[dict]]:
    asked = [{"fault": fault, "limit_s": 4.0, "patience_s": 150.0, **run} for fault, run in runs.items()]
    return dict(zip(runs, outcomes(asked, folder), strict=True))


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory) -> dict[str, list[dict]]:
    return started(SHORT, tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory) -> dict[str, list[dict]]:
    return started(MORE, tmp_path_factory.mktemp("more"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", SHORT)
def test_the_survivors_of_a_fault_end_in_time_and_name_the_rank(fault, short_runs):
    check(fault, short_runs[fault])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", MORE)
def test_the_survivors_of_more_faults_do_too(fault, more_runs):
    check(fault, more_runs[fault])


@pytest.mark.timeout(300)
def test_a_stopped_rank_is_named_as_stopped_by_all_others_and_told_once(short_runs):
    first, _, third = (outcome["said"] for outcome in short_runs["stopped"])
    assert "its process is stopped (SIGSTOP, or a debugger)" in first
    assert "hf_zero: rank 2 exits too: " in third and "Traceback" not in third


@pytest.mark.timeout(300)
def test_the_reason_of_a_rank_that_failed_is_told_by_the_others(short_runs):
    assert "has ended: LookupError: a bad batch" in short_runs["exception"][0]["said"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_leaves_early_is_told_that_ranks_have_different_numbers_of_steps(more_runs):
    said = more_runs["sys.exit"][0]["said"]
    assert "rank 1" in said and "has finished its script" in said
    assert "the ranks have different numbers of batches" in said and "even_batches=True" in said


@pytest.mark.timeout(300)
def test_a_lone_call_is_named_with_the_line_that_made_it(short_runs):
    first, second = (outcome["said"] for outcome in short_runs["lone full_grad"])
    assert "only some ranks reached full_grad" in second and "engine_of(model).full_grad" in second
    # Both give up after as long: the second to do so may say that the other has ended, with its words.
    assert "full_grad" in first
    first, second = (outcome["said"] for outcome in short_runs["lone read of p.grad"])
    assert (
        "only some ranks reached reads of p.grad" in second and ".grad.norm()" in second and "reads of p.grad" in first
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lone_barrier_of_the_script_is_named_with_its_line(more_runs):
    first, second = (outcome["said"] for outcome in more_runs["lone barrier"])
    assert "is in the script's own torch.distributed.barrier" in first and "dist.barrier()" in first
    # torch's own error names an address only. By then the ranks may have found out that they are in different collectives.
    failed = "(the script's own torch.distributed.barrier|a collective that the script called by itself) failed"
    assert re.search(rf"hf_zero: {failed}.*rank 0", second, flags=re.DOTALL), second


@pytest.mark.timeout(300)
def test_what_the_launcher_shows_is_the_paragraph_or_the_traceback_of_the_script(short_runs):
    told = short_runs["stopped"][0]["told"]
    assert told.startswith("hf_zero: ") and "failed while waiting for rank 1" in told and "Traceback" not in told
    told = short_runs["exception"][1]["told"]
    assert told.startswith("Traceback") and "LookupError: a bad batch" in told


def check_left(ranks: list[dict]) -> None:
    first, *others = ranks
    assert first["code"] == 0, first["said"][-3000:]
    for rank, outcome in enumerate(others, start=1):
        said = outcome["said"]
        assert outcome["code"] == 1 and outcome["seconds"] < SECONDS * slack(), said[-3000:]
        assert "rank 0 (" in said and "has finished its script" in said, said[-3000:]
        assert f"Rank 0 finished its script while rank {rank} is still running" in said and "its own error" not in said
        # What torch says of a store that has gone.
        assert "recvValue" not in said and "frame #" not in said, said


@pytest.mark.timeout(300)
def test_a_rank_that_has_ended_well_with_fewer_batches_has_left_and_not_failed(tmp_path):
    [ranks] = started({"end_training": LEFT["end_training"]}, tmp_path / "left").values()
    check_left(ranks)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nor_has_any_other_that_ends_well(tmp_path):
    for ranks in started(LEFT, tmp_path / "left").values():
        check_left(ranks)


SLEEPY = """
import time
import torch
from accelerate import Accelerator
from hf_zero import ZeroPlugin

accelerator = Accelerator(cpu=True, parallelism_config=ZeroPlugin(stage=2, comm={"timeout_s": 4}))
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(6):
    if step == 3 and accelerator.process_index == 1:
        time.sleep(100)
    accelerator.backward(model(torch.randn(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_launcher_shows_the_paragraph_as_the_root_cause(tmp_path):
    script = tmp_path / "sleepy.py"
    script.write_text(SLEEPY)
    said = launch(script, caches=tmp_path).stderr
    cause = said[said.index("Root Cause") :]
    assert "hf_zero: " in cause and "failed while waiting for rank 1" in cause
    assert "sleepy.py:12: time.sleep(100)" in cause
    assert said.count("is in no collective") == 2, "once by the main rank, and once by the launcher"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [2, 3])
def test_every_fault_is_survived_in_time(stage, tmp_path):
    for part in (FAULTS[:6], FAULTS[6:]):
        runs = [{"stage": stage, "fault": fault, "patience_s": 200.0} for fault in part]
        for fault, ranks in zip(part, outcomes(runs, tmp_path / part[0]), strict=True):
            print_seconds(f"stage {stage}, {fault}", ranks)
            check(fault, ranks)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_both_sides_of_a_cut_link_end_in_time_and_name_each_other(stage, tmp_path):
    if why_no_namespaces():
        pytest.skip(why_no_namespaces())
    [ranks] = outcomes([{"stage": stage, "fault": "link cut", "patience_s": 200.0}], tmp_path / "run")
    print_seconds(f"stage {stage}, link cut", ranks)
    for rank, outcome in enumerate(ranks):
        assert outcome["code"] not in (0, None) and outcome["seconds"] < SECONDS * slack(), outcome["said"][-2000:]
        assert f"rank {1 - rank}" in outcome["said"].partition("hf_zero: ")[2], outcome["said"][-2000:]
