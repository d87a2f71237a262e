"""Starts ranks fast: forkserver processes with torch already imported, connected by gloo over loopback, or a single one.

    results = run_ranks(measure, world_size=2, time_limit_s=60, keyword_arguments={"rounds": 5})

`measure(rank, world_size, **keyword_arguments)` runs in every rank inside a process group and returns something
picklable. If a rank fails, the others are ended, and the caller's error message contains the first failure's traceback.

    with live_ranks(Station, world_size=2, time_limit_s=60, keyword_arguments={"workload": workload}) as station:
        by_rank = station.call("visit", 3)

Each rank makes a `Station(rank, world_size, **keyword_arguments)` and runs its methods on request.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

# Imported once by the forking process. Otherwise each rank would spend its first seconds on these imports.
PRELOADED_MODULES = ["torch", "torch.distributed.fsdp", "transformers.models.gpt2.modeling_gpt2"]

# Seconds to wait after a first report of failure for an earlier failure. A killed rank sends no report, and another rank, whose
# connection was cut by this, may report before the end of the killed rank's pipe is noticed.
HEARING_S = 1.5

# Folders of modules outside of packages, for the forking process.
PRELOAD_FOLDERS = [Path(__file__).resolve().parent]


class RankFailedError(RuntimeError):
    """A rank raised an error, or ended without a result. The message contains its traceback or exit code."""


class RanksTimedOutError(TimeoutError):
    """A rank returned no result within the time limit."""


class _Failure(NamedTuple):
    """Sent by a rank instead of a result."""

    told_s: float | None  # by a clock common to all processes, to find the first failure; None: no report was sent
    traceback_text: str


class _Task(NamedTuple):
    """The work of a rank: returns the result of `target`, or answers method calls until the last one."""

    target: Callable[..., Any]
    keyword_arguments: dict[str, Any]
    world_size: int
    time_limit_s: float
    is_live: bool = False
    is_alone: bool = False


def run_ranks(
    target: Callable[..., Any], *, world_size: int, time_limit_s: float, keyword_arguments: dict[str, Any] | None = None
) -> list[Any]:
    """Run target in world_size fresh processes and return their results in rank order."""
    return _run(_Task(target, keyword_arguments or {}, world_size, time_limit_s))


def run_alone(target: Callable[..., Any], *, time_limit_s: float, keyword_arguments: dict[str, Any]) -> Any:
    """Run target in a fresh process without a process group, and return its result."""
    return _run(_Task(target, keyword_arguments, 1, time_limit_s, is_alone=True))[0]


def _run(task: _Task) -> list[Any]:
    with _started(task) as ranks:
        results = ranks.collect()
        ranks.join()
    return results


@contextmanager
def live_ranks(
    make: Callable[..., Any],
    *,
    world_size: int,
    time_limit_s: float,
    start_limit_s: float | None = None,
    call_limit_s: float = float("inf"),
    keyword_arguments: dict[str, Any] | None = None,
) -> Iterator[LiveRanks]:
    """Fresh ranks, each with an object made by `make(rank, world_size, **keyword_arguments)`, until the block ends.

    Args:
        time_limit_s: for the whole block.
        start_limit_s: for `make`.
        call_limit_s: for each call.
    """
    with _started(_Task(make, keyword_arguments or {}, world_size, time_limit_s, is_live=True)) as ranks:
        ranks.collect(time.monotonic() + (time_limit_s if start_limit_s is None else start_limit_s))
        live = LiveRanks(ranks, call_limit_s)
        yield live
        if not live.has_failed:
            ranks.send(None)
            ranks.collect()
            ranks.join()


class LiveRanks:
    """Ranks waiting for method calls.

    Attributes:
        has_failed: whether a call has failed. The ranks have ended then.
    """

    def __init__(self, ranks: _Ranks, call_limit_s: float) -> None:
        self._ranks = ranks
        self._call_limit_s = call_limit_s
        self.has_failed = False

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each rank's object, on all ranks at the same time; returns the results in rank order."""
        self._ranks.send((method, arguments))
        try:
            return self._ranks.collect(time.monotonic() + self._call_limit_s)
        except (RankFailedError, RanksTimedOutError):
            self.has_failed = True
            raise


@contextmanager
def _started(task: _Task) -> Iterator[_Ranks]:
    context = multiprocessing.get_context("forkserver")
    start_forking()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = _Ranks(time.monotonic() + task.time_limit_s)
        try:
            for rank in range(task.world_size):
                own_end, rank_end = context.Pipe()
                arguments = (task, rank, folder, rank_end)
                process = context.Process(target=_main, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                # The rank has the only other end now, so its death closes the pipe.
                rank_end.close()
                ranks.processes.append(process)
                ranks.pipe_ends.append(own_end)
            yield ranks
        finally:
            ranks.kill()


def start_forking() -> None:
    """Starts the process from which ranks are forked, unless this process exists."""
    forkserver.set_forkserver_preload(["preloaded"])
    before = dict(os.environ)
    # The forkserver receives this process's `sys.path`, but before Python 3.13 does not search it.
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, PRELOAD_FOLDERS), *filter(None, [before.get("PYTHONPATH")])])
    os.environ["PRELOADED_MODULES"] = ",".join(PRELOADED_MODULES)
    try:
        forkserver.ensure_running()
    finally:
        for name in ("PYTHONPATH", "PRELOADED_MODULES"):
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]


@contextmanager
def joined_process_group(
    rank: int, world_size: int, store_folder: str | Path, time_limit_s: float, store: dist.Store | None = None
) -> Iterator[None]:
    """A gloo process group with a store in a file, to send only the engines' own bytes by network.

    A rank that raises does not destroy its group: otherwise the others would fail because of that, before the reason is known.

    Args:
        store_folder: the folder of the file; unused with `store`.
        store: used instead of the file. If a run kills ranks, this must be a `TCPStore` of a surviving process: torch's FileStore
            reads half a record, left behind by a killed writer, again and again without end.
    """
    store = store or dist.FileStore(str(Path(store_folder) / "store"), world_size)
    limit = timedelta(seconds=time_limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    # If a fast rank left now, ranks which are still connecting would fail.
    dist.barrier()
    yield
    dist.destroy_process_group()


def _main(task: _Task, rank: int, store_folder: str, pipe_end: Connection) -> None:
    """The main function of a rank's process: sends the outcome of its task, or its failure."""
    # Print the stack of every thread to stderr shortly before the time limit: a rank ended by the limit prints nothing.
    faulthandler.dump_traceback_later(0.95 * task.time_limit_s)
    try:
        outcome = _outcome(task, rank, store_folder, pipe_end)
    except Exception:
        outcome = _Failure(time.monotonic(), traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    pipe_end.send(outcome)
    if isinstance(outcome, _Failure):
        raise SystemExit(1)


def _outcome(task: _Task, rank: int, store_folder: str, pipe_end: Connection) -> Any:
    if task.is_alone:
        return task.target(**task.keyword_arguments)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with joined_process_group(rank, task.world_size, store_folder, task.time_limit_s):
        made = task.target(rank, task.world_size, **task.keyword_arguments)
        if not task.is_live:
            return made
        pipe_end.send(None)
        while (asked := pipe_end.recv()) is not None:
            method, arguments = asked
            pipe_end.send(getattr(made, method)(*arguments))
        # Free the object before the group is destroyed.
        del made
    return None


class _Ranks:
    """The processes of one run, and the pipes for their results."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.processes: list[BaseProcess] = []
        self.pipe_ends: list[Connection] = []

    def send(self, message: Any) -> None:
        """Send the same message to every rank."""
        for pipe_end in self.pipe_ends:
            # Ignore a failed rank: `collect` finds the failure.
            with suppress(BrokenPipeError, ConnectionResetError):
                pipe_end.send(message)

    def collect(self, deadline_s: float = float("inf")) -> list[Any]:
        """Returns the next message of every rank. Raises the earliest failure, or an error at the deadline."""
        deadline_s = min(deadline_s, self.deadline_s)
        results: dict[int, Any] = {}
        while len(results) < len(self.processes):
            arrived = self._hear(results, deadline_s)
            if not arrived:
                awaited = [rank for rank in range(len(self.processes)) if rank not in results]
                raise RanksTimedOutError(f"no result from ranks {awaited} within the time limit")
            results.update(arrived)
            if any(isinstance(outcome, _Failure) for outcome in arrived.values()):
                self._raise_earliest_failure(results)
        return [results[rank] for rank in range(len(self.processes))]

    def _hear(self, results: dict[int, Any], until_s: float) -> dict[int, Any]:
        """Returns new messages of ranks without a result, as soon as there are any; none if there are none in time."""
        awaited = {end: rank for rank, end in enumerate(self.pipe_ends) if rank not in results}
        ready = wait(awaited, timeout=max(0.0, until_s - time.monotonic())) if awaited else []
        return {awaited[end]: self._receive(awaited[end]) for end in ready}

    def _raise_earliest_failure(self, results: dict[int, Any]) -> NoReturn:
        """Waits up to `HEARING_S` for the remaining ranks' messages, then raises the earliest failure."""
        until_s = time.monotonic() + HEARING_S
        while arrived := self._hear(results, until_s):
            results.update(arrived)
        failures = [(rank, outcome) for rank, outcome in results.items() if isinstance(outcome, _Failure)]
        vanished = [each for each in failures if each[1].told_s is None]
        told = sorted((each for each in failures if each[1].told_s is not None), key=lambda each: each[1].told_s)
        # A rank without a report may be the cause of the others' failures, or their consequence (a library may abort).
        texts = [f"rank {rank} failed:\n{failure.traceback_text}" for rank, failure in (*vanished, *told[:1])]
        raise RankFailedError("\n".join(texts))

    def join(self) -> None:
        """Wait for clean exits: unfinished work only fails here, by an abort."""
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, self.deadline_s - time.monotonic()))
            if process.exitcode is None:
                raise RanksTimedOutError(f"rank {rank} brought its result but did not exit within the time limit")
            if process.exitcode != 0:
                raise RankFailedError(f"rank {rank} brought its result but ended with exit code {process.exitcode}")

    def kill(self) -> None:
        for process, pipe_end in zip(self.processes, self.pipe_ends):
            process.kill()
            process.join()
            pipe_end.close()

    def _receive(self, rank: int) -> Any:
        try:
            return self.pipe_ends[rank].recv()
        except EOFError:
            process = self.processes[rank]
            process.join()
            return _Failure(None, f"ended without a result, exit code {process.exitcode}")
