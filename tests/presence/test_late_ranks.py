"""A rank that is late ends the run on all ranks in time, with an error that says where each rank is."""

import gc
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fault_matrix import FAULTS, FROM_OUTSIDE, ONLY_BELOW_3, WITHIN_S, print_table, run_cells
from faulty_ranks import outcomes
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from trainer_job import as_launched, make_trainer
from training import gpt2, gpt2_batch

import hf_zero
from hf_zero import ZeroEngine, engine_of
from hf_zero.arithmetic.checksums import checksum
from hf_zero.buckets.bucket import Row
from hf_zero.buckets.rows import PackedPart
from hf_zero.comm import choice
from hf_zero.comm.collective import CollectiveTransport
from hf_zero.comm.collective_log import CollectiveLog
from hf_zero.comm.groups import Groups
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.transport import Handle
from hf_zero.comm.waits import SAVE, Label, Wait, Watch
from hf_zero.comm.wire_sums import WireSums
from hf_zero.optimizer.replicas import ReplicasDivergedError
from hf_zero.presence.arrivals import CommunicationError, RankProcess
from hf_zero.presence.diagnosis import DeviceQueue, RankReport, StragglerReport, is_to_end, others_are_behind
from hf_zero.presence.rank_state import RankState, ScriptCollective, script_frame
from hf_zero.presence.watchdog import StragglerWatch
from hf_zero.step.parameter_gather import ParameterGather

pytestmark = pytest.mark.timeout(120)

GATHER = Label(kind="all-gather of parameters", subject="bucket 7", holds="bert.encoder.layer.7")
REDUCE = Label(kind="reduce-scatter of gradients", subject="bucket 4", holds="bert.encoder.layer.9")

RUNS = {
    "hang in evaluate": {"stage": 3, "fault": "hang in evaluate", "way": "engine"},
    "save on rank 0 alone": {"stage": 2, "fault": "save on rank 0 alone"},
}
SAVES = {
    "lone save of a callback": {"stage": 2, "fault": "lone save of a callback", "way": "trainer"},
    "saves of two steps": {"stage": 2, "fault": "saves of two steps", "way": "trainer"},
}
IN_A_GATHER_OF_THE_SCRIPT = {"stage": 2, "fault": "hang in evaluate"}
LIMITS = {"limit_s": 1800.0, "late_s": 3.0, "patience_s": 110.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("late")


@pytest.fixture(scope="module")
def runs(folder) -> dict[str, list[dict]]:
    """Runs whose backend would wait for half an hour."""
    return started(RUNS, folder)


@pytest.fixture(scope="module")
def saves(folder) -> dict[str, list[dict]]:
    return started(SAVES, folder / "saves")


def started(runs: dict[str, dict], folder: Path) -> dict[str, list[dict]]:
    return dict(zip(runs, outcomes([{**run, **LIMITS} for run in runs.values()], folder), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_all_ranks_end_with_an_error_in_time(name, runs):
    assert_all_end_in_time(runs[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVES)
def test_all_ranks_of_a_lone_save_end_in_time_too(name, saves):
    assert_all_end_in_time(saves[name])


def assert_all_end_in_time(run: list[dict]) -> None:
    slack = max(1.0, 2 * os.getloadavg()[0] / os.cpu_count())
    for outcome in run:
        assert outcome["code"] == 1, outcome["said"][-2000:]
        assert outcome["seconds"] < LIMITS["late_s"] + 30 * slack
        assert "trained to the end" not in outcome["said"]


def test_a_hang_in_evaluation_is_told_with_the_layer_the_stack_and_the_last_collectives(runs):
    waiting, late = (outcome["said"] for outcome in runs["hang in evaluate"])
    assert "failed while waiting for rank 1: rank 0 had waited" in waiting
    assert "(transformer; evaluate, step 3; faulty_ranks.py:" in waiting
    assert "is in no collective (evaluate, step 3; faulty_ranks.py:" in waiting
    stack = waiting[waiting.index("rank 1 is at:") :]
    assert "hangs_in_evaluate" in stack and "time.sleep(1000)" in stack
    assert "the last collectives of rank 1:" in stack and "bytes sent, evaluate, step 3" in stack
    assert "comm.late_s" in waiting
    assert "rank 1 was late and exits" in late and "time.sleep(1000)" in late


@pytest.mark.slow
def test_a_hang_in_what_the_script_gathers_by_itself_is_told_likewise(tmp_path):
    [run] = outcomes([{**IN_A_GATHER_OF_THE_SCRIPT, **LIMITS}], tmp_path / "late")
    assert_all_end_in_time(run)
    waiting, late = (outcome["said"] for outcome in run)
    assert "the script's own torch.distributed.all_gather failed while waiting for rank 1" in waiting
    assert "time.sleep(1000)" in waiting and "rank 1 was late and exits" in late


def test_ranks_in_different_collectives_are_told_who_waits_where(runs):
    # The second to end may say instead that the first has ended, with its words.
    told = "".join(outcome["said"] for outcome in runs["save on rank 0 alone"])
    told = told[told.index("the ranks are in different collectives: ") :].splitlines()[0]
    assert "rank 0 waits in the call of accelerator.save_state (save, step 3)" in told
    assert re.search(
        r"rank 1 waits in the (all-reduce|reduce-scatter) of gradients of bucket 0 \(.*backward, step 3\)", told
    )


@pytest.mark.slow
def test_a_save_that_one_rank_makes_alone_is_told_with_where_the_other_rank_waits(saves):
    told = "".join(outcome["said"] for outcome in saves["lone save of a callback"])
    assert "is in no collective" not in told
    assert "rank 1 waits in the first save of a Trainer (save, step 3)" in told
    # Both ranks reach their limit at once, and either may tell.
    assert "rank 0 waits in the script's own torch.distributed.all_gather (between steps, step 4)" in told


@pytest.mark.slow
def test_saves_of_two_steps_are_refused_with_both_steps(saves):
    told = "".join(outcome["said"] for outcome in saves["saves of two steps"])
    assert "the ranks called different collectives" in told
    assert "rank 0 the save of checkpoint-4" in told and "rank 1 the save of checkpoint-3" in told


@pytest.mark.slow
def test_saves_that_are_not_all_ranks_leave_nothing_under_a_checkpoints_name(saves, folder):
    assert len(list(folder.rglob("out"))) == 2 and not list(folder.rglob("out/checkpoint-*"))


def test_the_launcher_is_told_by_the_late_rank_too(runs):
    waiting, late = (outcome["told"] for outcome in runs["hang in evaluate"])
    assert late.startswith("hf_zero: rank 1 was late")
    assert (
        waiting.startswith("hf_zero: the agreement on the next layer") and "failed while waiting for rank 1" in waiting
    )


# ---- what a wait may be ended for ----


def where(
    waits_in: object = None, torch_call: str | None = None, seconds: float = 100.0, phase: str = "evaluate, step 812"
) -> RankState:
    return RankState(
        waits_in=None if waits_in is None else str(waits_in),
        kind=getattr(waits_in, "kind", None),
        seconds=seconds,
        failure=None,
        torch_call=torch_call,
        line="train.py:3: step()",
        begun={},
        holds=getattr(waits_in, "holds", ""),
        phase=phase,
    )


def report(what: object, others: dict[int, RankState | None], silence: str | None = None) -> StragglerReport:
    wait = Wait(what)
    wait.since_s -= 120
    rank_reports = {
        rank: RankReport(
            rank=rank,
            process=None,
            has_ended=False,
            has_left=False,
            is_stopped=False,
            words=None,
            culprits=(),
            where=each,
        )
        for rank, each in others.items()
    }
    return StragglerReport(
        rank=0,
        wait=wait,
        line="",
        rank_reports=rank_reports,
        silence=silence,
        phase="training step, step 812",
        recent=["a line"],
    )


@pytest.mark.parametrize(
    ("what", "others", "ends"),
    [
        # A collective of training: for a rank that is elsewhere, wherever that is.
        (GATHER, {1: where()}, True),
        (GATHER, {1: where(GATHER), 2: where()}, True),
        # All are there: the link is slow.
        (GATHER, {1: where(GATHER), 2: where(GATHER)}, False),
        (ScriptCollective("all_gather"), {1: where(torch_call="all_gather")}, False),
        # A rank that says nothing is stopped, or cannot be reached.
        ("accelerator.save_state", {1: None}, True),
        (GATHER, {1: None}, True),
        # One rank may work for long where others meet in words or in a barrier.
        ("accelerator.save_state", {1: where()}, False),
        (ScriptCollective("barrier"), {1: where()}, False),
        (ScriptCollective("all_gather_object"), {1: where()}, True),
        # Two that wait for each other never end; one that has waited for a moment may be let go by a third.
        ("accelerator.save_state", {1: where(REDUCE)}, True),
        ("accelerator.save_state", {1: where(REDUCE, seconds=2.0)}, False),
        (ScriptCollective("barrier"), {1: where(GATHER)}, True),
        (ScriptCollective("barrier"), {1: where(torch_call="all_reduce")}, True),
        (GATHER, {1: where(REDUCE)}, True),
    ],
)
def test_a_wait_is_ended_for_a_late_rank_and_not_for_a_slow_link(what, others, ends):
    assert is_to_end(report(what, others)) == ends


def test_a_wait_is_ended_where_the_store_is_silent():
    assert is_to_end(report(GATHER, {}, silence="the store has not answered"))


def test_the_error_of_a_wait_is_there_before_the_late_rank_hears_of_its_end(monkeypatch):
    """The late rank ends as soon as it hears of it, and the wait then fails for want of its connection."""
    monkeypatch.setattr("hf_zero.presence.watchdog.break_all_groups", lambda: None)
    errors = queue.Queue()

    class Watchdog:
        script_wait, ended, log, begun = None, None, CollectiveLog(), Counter()
        longest = Wait(GATHER)
        kind_of = Watch().kind_of

        def diagnose(self, wait: Wait) -> StragglerReport:
            return report(GATHER, {1: where()})

        def end_stragglers(self, told: StragglerReport) -> None:
            errors.put((self.longest.end, self.ended))

    watchdog = Watchdog()
    watch = StragglerWatch(watchdog, limit_s=0.1)
    error, ended = errors.get(timeout=30)
    watch.close(within_s=10)
    assert "failed while waiting for rank 1" in str(error) and ended is error


def test_one_line_says_which_ranks_wait_where():
    told = str(
        report(
            REDUCE,
            {
                1: where(REDUCE, phase="training step, step 812"),
                2: where(REDUCE, phase="training step, step 812"),
                3: where(GATHER),
            },
        )
    )
    assert (
        "ranks 0-2 wait in the reduce-scatter of gradients of bucket 4 (bert.encoder.layer.9; training step, step 812), "
        "rank 3 waits in the all-gather of parameters of bucket 7 (bert.encoder.layer.7; evaluate, step 812)"
    ) in told


def gave_up(what: Label, *, is_alive: bool) -> RankReport:
    """Rank 1, which gave up `what` for want of rank 0."""
    where_it_was = replace(where(what), failure="rank 0 did not arrive within 8 s", begun={what.kind: 7})
    return RankReport(
        rank=1,
        process=None,
        has_ended=not is_alive,
        has_left=False,
        is_stopped=False,
        words=f"the {what} failed while waiting for rank 0: rank 1 had waited 8 s",
        culprits=(0,),
        where=where_it_was if is_alive else None,
    )


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize("gave_up_in", [REDUCE, GATHER])
def test_a_rank_that_came_too_late_names_itself_and_not_the_rank_that_gave_up(gave_up_in, is_alive):
    found = replace(
        report(GATHER, {}),
        late=1,
        begun={GATHER.kind: 8, REDUCE.kind: 8},
        rank_reports={1: gave_up(gave_up_in, is_alive=is_alive)},
    )
    assert found.culprits == [0] and not found.ranks_in_other_calls
    assert f"the {GATHER} failed: the other ranks had given up waiting for rank 0 (" in str(found)
    assert "waiting for rank 1" not in str(found) and "Look at rank 0. A rank that is only slow" in str(found)


def test_a_rank_that_is_in_a_call_of_its_own_is_told_of_the_calls_and_not_that_it_came_late():
    found = replace(
        report(GATHER, {}), late=1, begun={GATHER.kind: 8}, rank_reports={1: gave_up(REDUCE, is_alive=True)}
    )
    assert found.ranks_in_other_calls == [1] and "the ranks are in different collectives" in str(found)


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        (GATHER, "the ranks have different numbers of batches or steps"),
        (ScriptCollective("all_gather"), "without the call that rank 0 waits in: train.py:9: accelerator.gather(loss)"),
        (
            "call of accelerator.load_state",
            "without the call that rank 0 waits in: train.py:9: accelerator.gather(loss)",
        ),
    ],
)
def test_a_call_that_one_rank_makes_alone_is_named_when_another_rank_has_come_to_its_end(what, advice):
    left = RankReport(
        rank=1, process=None, has_ended=False, has_left=True, is_stopped=False, words=None, culprits=(), where=None
    )
    said = str(replace(report(what, {}), line="train.py:9: accelerator.gather(loss)", rank_reports={1: left}))
    assert f"Rank 1 finished its script {'while rank 0 is still running: ' if what is GATHER else ''}{advice}" in said


@pytest.mark.parametrize("call", ["Trainer.evaluate", "Accelerator.gather"])
def test_an_error_of_torchs_own_collective_names_the_rank_that_ended_without_an_exception_hook(call, tmp_path):
    said = run_on_ranks(waits_for_a_rank_that_ends, call=call, output_dir=str(tmp_path))[0]
    assert re.match(r"hf_zero: the script's own torch\.distributed\.\w+ failed while waiting for rank 1: ", said), said
    assert "rank 1 (process " in said and "ended" in said


def waits_for_a_rank_that_ends(rank: int, world_size: int, call: str, output_dir: str) -> str:
    as_launched(rank, world_size)
    trainer = make_trainer("flag 1", "bert", output_dir, max_steps=1)
    trainer.train()
    process = [None] * world_size
    dist.all_gather_object(process, RankProcess())
    if rank == 1:
        return ""
    while not process[1].has_ended():
        time.sleep(0.05)
    with pytest.raises(CommunicationError) as caught:
        if call == "Trainer.evaluate":
            trainer.evaluate()
        else:
            trainer.accelerator.gather(torch.zeros(1))
    return str(caught.value)


@pytest.mark.parametrize("others", [[0, 1, 2], [1, 2]], ids=["of all ranks", "of the others"])
@on_ranks(3)
def test_a_rank_in_a_barrier_of_all_ranks_waits_for_the_one_in_a_collective_call(rank, world_size, others):
    group = dist.group.WORLD if len(others) == world_size else dist.new_group(others)
    model = torch.nn.Linear(4, 4)
    ZeroEngine(model, [torch.optim.SGD(model.parameters(), 0.1)], 3)
    if rank == 1:
        dist.barrier(group)
    if rank == 2:
        # Until rank 0 has looked several times.
        time.sleep(4)
        dist.barrier(group)
    with mock.patch("hf_zero.presence.watched_barrier._LOOK_S", 1.0):
        if len(others) < world_size:
            assert model.state_dict()["weight"].shape == (4, 4)
        elif rank == 0:
            began_s = time.monotonic()
            with pytest.raises(
                CommunicationError, match=r"reached state_dict\(\) of Linear; ranks \[1\] wait for this"
            ):
                model.state_dict()
            assert time.monotonic() - began_s < 4
            dist.barrier()


@pytest.mark.parametrize(("theirs", "is_in_barrier", "in_vain"), [(0, True, True), (1, True, False), (0, False, False)])
def test_a_rank_in_a_barrier_of_all_ranks_never_joins_a_gather_that_it_has_not_started(theirs, is_in_barrier, in_vain):
    other = replace(where(), torch_call="barrier", is_in_barrier=is_in_barrier, starts={str(GATHER): theirs})
    assert replace(report(GATHER, {1: other}), starts={str(GATHER): 1}).in_vain == in_vain


# ---- collectives in the queue of an accelerator ----


def test_the_last_collective_of_a_queue_is_a_wait_once_it_was_started_long_ago():
    log, queue = CollectiveLog(), DeviceQueue(limit_s=100.0)
    assert queue.look(log) is None
    log.entries.append([GATHER, "evaluate", 812, 0, time.monotonic() - 10, None])
    assert queue.look(log) is None
    log.entries.append([GATHER, "evaluate", 812, 0, time.monotonic() - 120, None])
    wait = queue.look(log)
    assert wait is not None and (wait.name, wait.kind, round(wait.seconds)) == (str(GATHER), GATHER.kind, 120)
    assert queue.look(log) is wait
    log.entries.append([REDUCE, "backward", 812, 0, time.monotonic() - 110, None])
    assert queue.look(log) is not wait


@pytest.mark.parametrize(("theirs", "is_behind"), [(40, True), (41, False), (42, False)])
def test_of_a_queue_a_rank_is_late_that_has_not_started_as_many(theirs, is_behind):
    other = replace(where(), begun={GATHER.kind: theirs})
    assert others_are_behind(report(GATHER, {1: other}), {GATHER.kind: 41}, GATHER.kind) == is_behind
    # One that says nothing may have come to its end.
    assert not others_are_behind(report(GATHER, {1: None}), {GATHER.kind: 41}, GATHER.kind)


@pytest.mark.parametrize(("theirs", "ends"), [(0, True), (1, False)])
def test_in_a_save_a_rank_is_late_that_has_not_begun_it_and_not_one_that_writes_for_long(theirs, ends, monkeypatch):
    broken = threading.Event()
    monkeypatch.setattr("hf_zero.presence.watchdog.break_all_groups", broken.set)
    asked = queue.Queue()

    class Watchdog(Watch):
        script_wait = None

        def diagnose(self, wait: Wait) -> StragglerReport:
            asked.put(wait)
            return report(wait.what, {1: replace(where(), begun={SAVE: theirs})})

        def end_stragglers(self, told: StragglerReport) -> None:
            assert told.culprits == [1]

    watchdog = Watchdog()
    with watchdog.saving(), watchdog.saving(), watchdog.inside("exchange of a few values") as wait:
        watch = StragglerWatch(watchdog, limit_s=0.1)
        assert asked.get(timeout=30) is wait and watchdog.begun[SAVE] == 1
        assert broken.wait(30 if ends else 2) == ends and (wait.end is not None) == ends
        watch.close(within_s=10)


def test_the_main_threads_frames_are_read_without_pythons_collector(monkeypatch):
    seen, real = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or real())
    frame, call = script_frame()
    assert frame is not None and call is None and seen == [False] and gc.isenabled()
    gc.disable()
    try:
        script_frame()
        assert not gc.isenabled()
    finally:
        gc.enable()


OF_A_LIBRARY = """
from hf_zero.presence.rank_state import script_line
def run_backward():
    return script_line()[0]
"""
TRAINS = """
from {package}.graph import run_backward
print(run_backward())
"""


@pytest.mark.parametrize(
    ("package", "is_installed"),
    [("torch", False), ("transformers", False), ("accelerate", False), ("lightning", True), ("google.cloud", True)],
)
def test_a_rank_is_where_its_script_is_wherever_the_libraries_lie(package, is_installed, tmp_path):
    """As in a checkout of torch's source, or in a folder of `pip install --target`."""
    elsewhere = tmp_path / "elsewhere"
    folder = elsewhere.joinpath(*package.split("."))
    folder.mkdir(parents=True)
    if "." not in package:
        (folder / "__init__.py").touch()
    (folder / "graph.py").write_text(OF_A_LIBRARY)
    if is_installed:
        (elsewhere / "anything-1.0.dist-info").mkdir()
    # In a module of the script's, in a folder whose name begins as a library's does.
    script = tmp_path / "elsewhere" / "torch_jobs"
    script.mkdir()
    (script / "job.py").write_text(TRAINS.format(package=package))
    if is_installed:
        script = script.rename(tmp_path / "torch_jobs")
    (script / "main.py").write_text("import job")
    paths = os.pathsep.join([str(elsewhere), str(Path(hf_zero.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": paths}
    ran = subprocess.run(
        [sys.executable, script / "main.py"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.strip() == "job.py:3: print(run_backward())", ran.stderr


def test_a_wait_that_a_watchdog_has_seen_is_the_one_that_fails():
    """A watchdog marks the wait with its error, before it makes the wait fail."""
    watch, seen = Watch(), []

    def fail() -> None:
        seen.extend([watch.longest, watch.longest])
        raise RuntimeError("connection closed by peer")

    with pytest.raises(CommunicationError, match=r"all-gather of parameters .* failed: connection"):
        watch.during(GATHER, watch.during, REDUCE, watch.during, GATHER, fail)
    assert watch.longest is None
    assert seen[0] is seen[1] is not None and seen[0].what is GATHER
    assert seen[0].failure == "connection closed by peer"


# ---- the log ----


def test_the_log_holds_the_last_collectives_with_their_place_and_says_which_have_not_ended():
    ledger = Ledger()
    log = ledger.watch.log
    for step in range(300):
        log.step, log.site = step, "forward"
        ledger.count(GATHER, 100, 0)
        Handle(GATHER, ledger, lambda: None).finish()
    log.site = "backward"
    ledger.count(REDUCE, 2000, 0)
    Handle(REDUCE, ledger, lambda: None)
    lines = log.last_lines()
    assert len(log.entries) == 256 and len(lines) == 6
    assert lines[0].startswith(
        "all-gather of parameters of bucket 7 (bert.encoder.layer.7), 100 bytes sent, forward, step 295: ended"
    )
    assert "2,000 bytes sent, backward, step 299: still running after" in lines[-1]


@given(st.lists(st.sampled_from([GATHER, REDUCE]), min_size=1, max_size=20), st.randoms())
def test_collectives_that_end_in_any_order_are_marked_as_ended_each_by_itself(labels, random):
    ledger = Ledger()
    handles = []
    for label in labels:
        ledger.count(label, 1, 0)
        handles.append(Handle(label, ledger, lambda: None))
    left = handles.copy()
    random.shuffle(left)
    for number, handle in enumerate(left, start=1):
        handle.finish()
        assert sum(entry[-1] is not None for entry in ledger.watch.log.entries) == number


def test_the_log_can_be_read_while_another_thread_writes_it():
    ledger, is_over = Ledger(), threading.Event()

    def write() -> None:
        while not is_over.is_set():
            ledger.count(GATHER, 1, 0)
            Handle(GATHER, ledger, lambda: None).finish()

    thread = threading.Thread(target=write)
    thread.start()
    deadline_s = time.monotonic() + 0.5
    while time.monotonic() < deadline_s:
        assert len(ledger.watch.log.last_lines()) <= 6
    is_over.set()
    thread.join()


def test_a_place_of_its_own_is_left_again_when_it_ends_with_an_error():
    log = CollectiveLog()
    log.site = "forward"
    with pytest.raises(LookupError), log.at("save"):
        assert log.phase == "save, step 0"
        raise LookupError
    assert log.phase == "forward, step 0"


# ---- copies of parameters ----


def diverges(rank: int, world_size: int, stage: int, frozen: bool, group: int | None) -> str:
    """Trains with a flipped bit on rank 1, in a frozen parameter or in one that is stepped; returns the error."""
    torch.manual_seed(0)
    model = gpt2()
    model.transformer.wpe.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    comm = {} if group is None else {"comm": {"shard_group_size": group}}
    engine = ZeroEngine(model, [optimizer], {"stage": stage, "check_replicas_every": 2, **comm})
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        if step == 2 and rank == 1:
            flip(engine, model, frozen)
        model(**gpt2_batch(generator, 2)).loss.backward()
        try:
            optimizer.step()
        except ReplicasDivergedError as error:
            return f"{step}: {error}"
        optimizer.zero_grad()
    return "trained to the end"


def flip(engine: ZeroEngine, model: nn.Module, frozen: bool) -> None:
    whole = model.transformer.wpe.weight.data if frozen else engine.buckets[0].own.detach()
    whole.view(torch.int32).view(-1)[5] ^= 1 << 20


@pytest.mark.parametrize(
    ("stage", "frozen", "group", "named"),
    [
        (0, False, None, "between the updates of steps 2 and 3. The copy of rank 1 has changed by itself. Ranks with"),
        (
            2,
            True,
            None,
            "'transformer.wpe.weight', between the updates of steps 1 and 4. The copy of rank 1 has changed by",
        ),
    ],
)
def test_copies_that_have_diverged_are_named_on_all_ranks(stage, frozen, group, named):
    arguments = {"stage": stage, "frozen": frozen, "group": group}
    for said in run_ranks(diverges, world_size=2, time_limit_s=60, keyword_arguments=arguments):
        assert (
            said.startswith("3: hf_zero: the ranks' copies of the parameters have diverged by step 4") and named in said
        )


@pytest.mark.slow
def test_shards_of_replicate_groups_that_have_diverged_are_named_with_the_bucket_and_the_ranks():
    arguments = {"stage": 3, "frozen": False, "group": 2}
    for said in run_ranks(diverges, world_size=4, time_limit_s=100, keyword_arguments=arguments):
        assert "The copy of rank 1 has changed by itself. Ranks with the same values: rank 1; rank 3." in said


COPIES: dict[str, dict] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "param_dtype": "bfloat16"},
    "stage 0, 8-bit moments": {"stage": 0, "moments": "8bit"},
    "stage 2, shard groups": {"stage": 2, "comm": {"shard_group_size": 2}, "param_dtype": "bfloat16"},
    "stage 3, shard groups": {"stage": 3, "comm": {"shard_group_size": 2}},
}
EVERY = 2


def training(settings: dict) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, ZeroEngine(model, [optimizer], {"check_replicas_every": EVERY, **settings})


def copies_of(model: nn.Module, optimizer: torch.optim.Optimizer, engine: ZeroEngine) -> list[tuple[str, torch.Tensor]]:
    """What other ranks have, too, with its name in an error."""
    has_shards = engine.groups.replicate.size > 1
    found = [(repr(name), p.data) for name, p in model.named_parameters() if engine.config.stage < 3]
    for row in (row for bucket in engine.buckets for row in bucket.rows if has_shards):
        name = repr(row.slot.name)
        if engine.config.stage == 3 or row.slot.bucket.precision.rounds:
            found.append((name if engine.config.stage == 3 else f"master of {name}", row.tensor.data))
        state = optimizer.state.get(row.tensor, {}) if engine.config.moments == "32bit" else {}
        found += [(f"{kind} of {name}", value) for kind, value in state.items() if torch.is_tensor(value)]
    return found


def own_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, engine: ZeroEngine
) -> list[tuple[str, torch.Tensor]]:
    """What no other rank has, with its name in an error. By `data`: a broken memory does not count its writes."""
    found = []
    for row in (row for bucket in engine.buckets for row in bucket.rows):
        bucket, name = row.slot.bucket, repr(row.slot.name)
        if engine.config.stage == 3:
            part = row.layout.in_shard
            found.append((name, bucket.memory.read_own().data[part.start : part.stop]))
        if bucket.keeps_master and not bucket.memory.is_master:
            found.append((f"master of {name}", row.tensor.data))
        for kind, value in optimizer.state.get(row.tensor, {}).items():
            place = engine.optimizers[0]._storage.view(row, kind, value)
            packed = [place.state.cut(place.interval).codes.data] if isinstance(place, PackedPart) else [value.data]
            found += [(f"{kind} of {name}", each) for each in packed]
    return found


def flip_a_bit(
    random: Random, model: nn.Module, optimizer: torch.optim.Optimizer, engine: ZeroEngine, *, really: bool, own: bool
) -> str:
    """Returns what it is in."""
    engine.finish_parameters()
    name, values = random.choice((own_values if own else copies_of)(model, optimizer, engine))
    place, byte, bit = random.randrange(values.numel()), random.randrange(values.element_size()), random.randrange(8)
    if name.startswith("step of "):
        # A negative number of steps ends Adam's own step with an error of its own, on that rank, at once.
        bit %= 7
    if really:
        values.view(-1)[place : place + 1].view(torch.uint8)[byte] ^= 1 << bit
    return name


def flips(rank: int, world_size: int, settings: dict, seeds: list[int], own: bool) -> list[str]:
    """Trains anew for each seed, and flips a bit somewhere; returns what is wrong with what is said of it.

    Args:
        own: flip in what one rank alone has, and not in what several have.
    """
    faults = []
    for seed in seeds:
        random = Random(seed)
        model, optimizer, engine = training(settings)
        # Before the first step there is no state.
        at = random.randrange(1 if own else 0, 2 * EVERY)
        victim, is_late = random.randrange(world_size), random.random() < 0.5
        generator, said = torch.Generator().manual_seed(rank), ""
        for step in range(3 * EVERY):
            if step == at and not is_late:
                name = flip_a_bit(random, model, optimizer, engine, really=rank == victim, own=own)
            model(**gpt2_batch(generator, 2)).loss.backward()
            if step == at and is_late:
                name = flip_a_bit(random, model, optimizer, engine, really=rank == victim, own=own)
            try:
                engine.clip_grad_norm_(1.0)
                optimizer.step()
            except ReplicasDivergedError as error:
                said = str(error)
                break
            optimizer.zero_grad()
        engine.close()
        # Ranks may have chosen among other shards.
        names = [name]
        dist.broadcast_object_list(names, src=victim)
        who = f"The copy of rank {victim} has changed by itself."
        when = f"the first that differs is {names[0]}, between the updates of steps {at} and {at + 1}."
        if own:
            who = f"hf_zero: {names[0]} has changed by itself on rank {victim}, "
            when = f"between the updates of steps {at} and {at + 1}:"
        if who not in said or when not in said:
            faults.append(f"seed {seed}: rank {victim}, {when} And: {said[:400] or 'nothing is said'}")
    return faults


def flipped(settings: dict, seeds: range, *, own: bool = False) -> list[str]:
    world_size = 4 if "comm" in settings else 2
    arguments = {"settings": settings, "seeds": list(seeds), "own": own}
    return run_ranks(flips, world_size=world_size, time_limit_s=800, keyword_arguments=arguments)[0]


@pytest.mark.parametrize("settings", ["stage 0", "stage 2"])
def test_a_bit_that_flips_on_any_rank_is_found_with_the_rank_the_parameter_and_the_step(settings):
    assert flipped(COPIES[settings], range(4)) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", COPIES)
def test_160_bits_that_flip_are_found_with_the_rank_the_parameter_and_the_step(settings):
    """60 at stage 2, and 20 in each of the other settings."""
    assert flipped(COPIES[settings], range(100, 160 if settings == "stage 2" else 120)) == []


OWNED = {
    "stage 2": {"stage": 2},
    "stage 2, masters": {"stage": 2, "param_dtype": "bfloat16"},
    "stage 3": {"stage": 3},
    "stage 3, host memory": {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    "stage 2, state in host memory": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "stage 1, 8-bit moments": {"stage": 1, "moments": "8bit"},
    "stage 3, masters, quantized": {"stage": 3, "param_dtype": "bfloat16", "comm": {"weights": "int8"}},
}


@pytest.mark.short_cells("stage 2, masters", "stage 3, host memory", "stage 1, 8-bit moments")
@pytest.mark.parametrize("settings", OWNED)
def test_a_bit_that_flips_in_what_one_rank_alone_has_is_found_with_the_rank_the_parameter_and_the_step(settings):
    assert flipped(OWNED[settings], range(3), own=True) == []


def flips_before_a_gather(rank: int, world_size: int, settings: dict) -> str:
    """A bit of rank 1's part of the parameters flips between its update and the gather, which sends it to all."""
    model, optimizer, _ = training(settings)
    generator = torch.Generator().manual_seed(rank)
    start = ParameterGather.start

    def flips_first(gather: ParameterGather, buckets: list) -> None:
        if rank == 1:
            buckets[0].memory.own.data.view(torch.uint8)[11] ^= 1 << 3
        start(gather, buckets)

    for step in range(2 * EVERY):
        model(**gpt2_batch(generator, 2)).loss.backward()
        with mock.patch.object(ParameterGather, "start", flips_first if step == 1 else start):
            try:
                optimizer.step()
            except ReplicasDivergedError as error:
                return str(error)
        optimizer.zero_grad()
    return "trained to the end"


@pytest.mark.parametrize("settings", ["stage 2", "stage 2, masters"])
def test_a_bit_that_flips_between_an_update_and_its_gather_is_found(settings):
    for said in run_on_ranks(flips_before_a_gather, settings=OWNED[settings]):
        assert "has changed by itself on rank 1, between the updates of steps 2 and 3:" in said


QUANTIZED = {"param_dtype": "bfloat16", "comm": {"weights": "int8", "gradients": "int8"}}
REDUCED, GATHERED = "reduce-scatter of gradients", "all-gather of parameters"
# Settings, whether the backend's own collectives are used, and the kinds of messages that are noted.
WIRES: dict[str, tuple[dict, bool, list[str]]] = {
    "stage 2": ({"stage": 2}, False, [REDUCED]),
    "stage 3": ({"stage": 3}, False, [REDUCED, GATHERED]),
    "stage 2, quantized": ({"stage": 2, **QUANTIZED}, False, [REDUCED, GATHERED]),
    "stage 3, backend": ({"stage": 3}, True, [GATHERED]),
    "stage 3, backend, quantized": ({"stage": 3, **QUANTIZED}, True, [REDUCED, GATHERED]),
}


class Striking:
    """Flips a bit on rank 1 in a value that lives for less than a step, once, in the second step.

    Attributes:
        struck: what the bit is in.
    """

    def __init__(self, rank: int, kind: str):
        self.rank, self.kind, self.struck = rank, kind, ""
        self.step = 0

    def strike(self, name: str, values: torch.Tensor) -> None:
        if self.step == 1 and not self.struck and values.numel() > 0:
            self.struck = name
            if self.rank == 1:
                values.data.view(-1)[1:2].view(torch.uint8)[0] ^= 1 << 2

    def message(self, sums: WireSums, label: Label, sent: Sequence, received: Sequence, **more: int) -> Callable:
        """Stands in for `WireSums.over`: the bit flips after the message has come, and before its checksum is taken."""
        noted = over(sums, label, sent, received, **more)

        def flipping(wait: Callable[[], object]) -> Callable[[], object]:
            def wait_and_flip() -> None:
                wait()
                if self.kind in label.words:
                    self.strike(label.words, received[0])

            return noted(wait_and_flip)

        return flipping


over = WireSums.over


def struck(striking: Striking, settings: dict, *, at: str = "") -> str:
    """Trains until a comparison; returns its error. `at`: where a value of the engine's is struck."""
    model, optimizer, engine = training({**settings, "check_replicas_every": 2})
    generator = torch.Generator().manual_seed(striking.rank)

    def in_layer(_module: nn.Module, _args: tuple) -> None:
        # At its beginning is what rank 0 has sent.
        bucket = next(bucket for bucket in engine.buckets if ".h.1." in bucket.slots[0].name)
        striking.strike(bucket.slots[0].name, bucket.flat)

    if at == "gathered":
        model.transformer.h[1].register_forward_pre_hook(in_layer)
    try:
        for striking.step in range(2):
            model(**gpt2_batch(generator, 2)).loss.backward()
            rows = [row for row in rows_of(engine) if row.tensor.grad is not None]
            if at == "before a clip":
                striking.strike(name_of(rows[0]), rows[0].tensor.grad)
            engine.clip_grad_norm_(1e-3)
            if at == "after a clip":
                striking.strike(name_of(rows[0]), rows[0].tensor.grad)
            optimizer.step()
            optimizer.zero_grad()
    except ReplicasDivergedError as error:
        return str(error)
    finally:
        engine.close()
    return "trained to the end"


def struck_on_the_wire(rank: int, world_size: int, name: str) -> None:
    settings, is_backend, kinds = WIRES[name]
    stand_in = mock.patch.object(choice, "PointToPointTransport", of_backend) if is_backend else nullcontext()
    for kind in kinds:
        striking = Striking(rank, kind)
        with (
            stand_in,
            mock.patch.object(WireSums, "over", lambda *args, to=striking, **more: to.message(*args, **more)),
        ):
            said = struck(striking, settings)
        if settings["stage"] == 2 and kind == GATHERED:
            assert "the ranks' copies of the parameters have diverged by step 2" in said, said
        else:
            assert (
                f"by step 2, ranks received different values than other ranks sent: {striking.struck}. The network"
                in said
            ), said


def of_backend(groups: Groups, _timeout_s: float, ledger: Ledger) -> CollectiveTransport:
    return CollectiveTransport(groups, ledger)


@pytest.mark.extra("wire")
@pytest.mark.short_cells("stage 2", "stage 3", "stage 3, backend, quantized")
@pytest.mark.parametrize("name", WIRES)
def test_a_bit_that_flips_on_the_wire_is_found_with_the_bucket(name):
    run_on_ranks(struck_on_the_wire, name=name)


def struck_between(rank: int, world_size: int, settings: dict, at: str) -> str:
    return struck(Striking(rank, ""), settings, at=at)


@pytest.mark.short_cells("stage 2, masters-before a clip", "stage 3, host memory-after a clip")
@pytest.mark.parametrize("at", ["before a clip", "after a clip"])
@pytest.mark.parametrize("settings", ["stage 2, masters", "stage 3, host memory"])
def test_a_bit_that_flips_in_a_reduced_gradient_before_the_step_is_found(settings, at):
    for said in run_on_ranks(struck_between, settings=OWNED[settings], at=at):
        assert (
            "reduced gradient of" in said and "has changed by itself on rank 1, between the updates of steps 1" in said
        )


@pytest.mark.short_cells("stage 3")
@pytest.mark.parametrize("settings", ["stage 3", "stage 3, masters, quantized"])
def test_a_bit_that_flips_in_a_gathered_layer_is_found(settings):
    for said in run_on_ranks(struck_between, settings=OWNED[settings], at="gathered"):
        assert "gathered copy of 'transformer.h.1." in said and "has changed by itself on rank 1, between" in said, said


def edits_and_loads(rank: int, world_size: int, settings: dict) -> None:
    """What a script may write between updates: parameters with and without a trace, state, and what it loads."""
    model, optimizer, engine = training(settings)
    generator = torch.Generator().manual_seed(rank)
    for step in range(2 * EVERY):
        model(**gpt2_batch(generator, 2)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), engine.gathered(writeback=True):
            next(model.parameters()).mul_(0.5)
        if settings["stage"] < 3 and not engine.buckets[0].keeps_master:
            list(model.parameters())[-1].data.clamp_(-0.5, 0.5)
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
        # What a parameter's only owner edits, and what all ranks edit by the parameter.
        alone = engine.buckets[0].rows[-1:] if rank == 1 else []
        for row in (row for row in alone if row.layout.in_parameter.numel == row.slot.interval.numel):
            optimizer.state[row.tensor]["exp_avg_sq"].mul_(0.5)
        optimizer.state[next(model.parameters())]["exp_avg_sq"].mul_(0.5)
        if step == 2:
            model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] *= 0.9


@pytest.mark.short_cells("stage 2", "stage 3, host memory")
@pytest.mark.parametrize("settings", [name for name in OWNED if "8-bit" not in name])
def test_what_a_script_edits_and_loads_raises_no_alarm(settings):
    run_on_ranks(edits_and_loads, settings=OWNED[settings])


def writes_alone(rank: int, world_size: int, settings: dict) -> None:
    """Rank 1 alone flips a bit of a moment, by a write that torch counts, or edits a moment of which rank 0 has a part."""
    for is_flip in (True, False):
        model, optimizer, engine = training(settings)
        generator = torch.Generator().manual_seed(rank)
        owners = Counter(name for names in engine.world.exchange([*map(name_of, rows_of(engine))]) for name in names)
        victim = next((row for row in rows_of(engine) if (owners[name_of(row)] == 1) == is_flip), None)
        named = engine.world.exchange(victim and name_of(victim))[1]
        said = ""
        for step in range(2 * EVERY):
            model(**gpt2_batch(generator, 2)).loss.backward()
            try:
                optimizer.step()
            except ReplicasDivergedError as error:
                said = str(error)
                break
            optimizer.zero_grad()
            if step == 1 and rank == 1:
                moment = optimizer.state[victim.tensor]["exp_avg"].view(-1)
                moment.view(torch.int32)[moment.numel() // 2] ^= 1 << 21
                moment.mul_(1.0 if is_flip else 0.5)
        engine.close()
        what = f"one bit of exp_avg of {named!r} has changed on rank 1"
        if not is_flip:
            what = f"exp_avg of {named!r} was written to on rank 1 and not on rank 0"
        assert what in said and "between the updates of steps 2 and 3" in said, (what, said)


def rows_of(engine: ZeroEngine) -> list[Row]:
    return [row for bucket in engine.buckets for row in bucket.rows]


def name_of(row: Row) -> str:
    return row.slot.name


@pytest.mark.parametrize("settings", ["stage 2, masters", "stage 3"])
def test_a_write_to_optimizer_state_on_one_rank_alone_is_found(settings):
    run_on_ranks(writes_alone, settings=OWNED[settings])


def trains_clean(rank: int, world_size: int, settings: dict, steps: int) -> None:
    model, optimizer, _ = training(settings)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        model(**gpt2_batch(generator, 2)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 20:
            # On all ranks: no bit has flipped.
            with torch.no_grad(), engine_of(model).gathered(writeback=True):
                next(model.parameters()).mul_(0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", COPIES)
def test_clean_steps_raise_no_alarm(settings):
    arguments = {"settings": COPIES[settings], "steps": 200 if settings == "stage 2" else 50}
    world_size = 4 if "comm" in COPIES[settings] else 2
    run_ranks(trains_clean, world_size=world_size, time_limit_s=800, keyword_arguments=arguments)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=40), st.data())
def test_a_flipped_bit_and_two_values_that_changed_places_change_the_checksum(values, data):
    before = torch.tensor(values, dtype=torch.int32)
    place, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 30))
    after = before.clone()
    after[place] ^= 1 << bit
    assert checksum(after.view(torch.float32)) != checksum(before.view(torch.float32))
    for dtype in (torch.uint8, torch.int16, torch.int64):
        narrow = before.to(dtype)
        flipped = narrow.clone()
        byte = data.draw(st.integers(0, dtype.itemsize - 1))
        flipped[place : place + 1].view(torch.uint8)[byte] ^= 1 << data.draw(st.integers(0, 7))
        assert checksum(flipped) != checksum(narrow)
    parts = torch.tensor([*values, *values] * 4, dtype=torch.int32)
    assert checksum(parts) == checksum(parts[:8]) + checksum(parts[8:])
    swapped = before.clone()
    swapped[:2] = before[:2].flip(0)
    assert (checksum(swapped) != checksum(before)) == (values[0] != values[1])


# ---- the matrix ----


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["engine", "accelerate", "trainer"])
def test_every_fault_ends_on_all_ranks_in_time_and_names_rank_and_place(way):
    """The engine at stages 2 and 3; the other doors at stage 3, and at stage 2 what cannot happen at stage 3.

    A Trainer is an Accelerator's user: what strikes a rank from outside finds the same code in both.
    """
    at_stage_3 = [fault for fault in FAULTS if way != "trainer" or fault not in FROM_OUTSIDE]
    cells = run_cells(at_stage_3, [3], [way], within_s=2 * WITHIN_S)
    at_stage_2 = FAULTS if way == "engine" else ONLY_BELOW_3
    cells += run_cells(list(at_stage_2), [2], [way], within_s=2 * WITHIN_S)
    print_table(cells)
    assert not [(cell.fault, cell.stage, cell.fault_found) for cell in cells if cell.fault_found]
