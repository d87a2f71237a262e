"""Starting ranks fast: forkserver processes with torch already imported, joined by gloo over loopback or alone.

    results = run_ranks(measure, world_size=2, time_limit_s=60, keyword_arguments={"rounds": 5})

`measure(rank, world_size, **keyword_arguments)` runs in every rank inside a process group and returns something
picklable. The first rank that fails takes the others down, and its traceback is the caller's error message.

    with live_ranks(Station, world_size=2, time_limit_s=60, keyword_arguments={"workload": workload}) as station:
        by_rank = station.call("visit", 3)

Each rank makes a `Station(rank, world_size, **keyword_arguments)` and calls its methods when it is asked to.
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

# Imported once, by the process that forks the ranks: each rank would else spend its first seconds on them.
PRELOADED_MODULES = ["torch", "torch.distributed.fsdp", "transformers.models.gpt2.modeling_gpt2"]

# Seconds after a first failure for an earlier one to be told. A rank that is killed tells nothing, and another rank, whose
# connection it has cut, may be heard before the end of the killed one's pipe is seen.
HEARING_S = 1.5

# Where that process finds modules that no package has.
PRELOAD_FOLDERS = [Path(__file__).resolve().parent]


class RankFailedError(RuntimeError):
    """A rank raised, or ended without a result; the message carries its traceback or its exit code."""


class RanksTimedOutError(TimeoutError):
    """Not every rank brought a result within the time limit."""


class _Failure(NamedTuple):
    """What a rank sends instead of its result."""

    told_s: float | None  # by one clock for all processes: tells the first failure from those it caused; None: not told
    traceback_text: str


class _Task(NamedTuple):
    """What a rank is started with: it returns what `target` does, or answers calls of it until there are no more."""

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
    """Run target in a fresh process that is in no process group, and return its result."""
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
    """Fresh ranks that each hold what `make(rank, world_size, **keyword_arguments)` returns, until the block ends.

    Args:
        time_limit_s: for all that happens in the block.
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
    """Ranks that wait to be asked.

    Attributes:
        has_failed: a call has, which is then the end of them.
    """

    def __init__(self, ranks: _Ranks, call_limit_s: float) -> None:
        self._ranks = ranks
        self._call_limit_s = call_limit_s
        self.has_failed = False

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of what each rank holds, on all ranks at once; returns what it returned, in rank order."""
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
                # The rank holds the only other end now, so its death closes the pipe.
                rank_end.close()
                ranks.processes.append(process)
                ranks.pipe_ends.append(own_end)
            yield ranks
        finally:
            ranks.kill()


def start_forking() -> None:
    """Starts the process that ranks are forked from, unless it runs."""
    forkserver.set_forkserver_preload(["preloaded"])
    before = dict(os.environ)
    # It is told this process's `sys.path`, and in Python before 3.13 does not look there.
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
    """A gloo process group that meets in a file, so that only the engines' own bytes travel by network.

    A rank that raises does not destroy its group: the others would fail of that, before the reason has been told.

    Args:
        store_folder: the folder of the file; unused beside `store`.
        store: the ranks meet here instead. A run whose ranks are killed needs a `TCPStore` of a process that lives on:
            torch's FileStore reads half a record, which a killed writer leaves, again and again without end.
    """
    store = store or dist.FileStore(str(Path(store_folder) / "store"), world_size)
    limit = timedelta(seconds=time_limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    # A rank that has little to do and leaves would fail those that are still joining.
    dist.barrier()
    yield
    dist.destroy_process_group()


def _main(task: _Task, rank: int, store_folder: str, pipe_end: Connection) -> None:
    """A rank's process: sends the outcome of its task, or how it failed."""
    # Where every thread was, on stderr: the end of a rank that is out of time tells nothing.
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
        # Before the group is destroyed.
        del made
    return None


class _Ranks:
    """The processes of one run and the pipes their results come through."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.processes: list[BaseProcess] = []
        self.pipe_ends: list[Connection] = []

    def send(self, message: Any) -> None:
        """Tell every rank the same."""
        for pipe_end in self.pipe_ends:
            # A rank that has failed hears nothing: its failure is what `collect` finds.
            with suppress(BrokenPipeError, ConnectionResetError):
                pipe_end.send(message)

    def collect(self, deadline_s: float = float("inf")) -> list[Any]:
        """The next message of every rank; raises the earliest failure, or at the deadline."""
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
        """The messages of ranks that have no result yet, as soon as there are any; none where there are none in time."""
        awaited = {end: rank for rank, end in enumerate(self.pipe_ends) if rank not in results}
        ready = wait(awaited, timeout=max(0.0, until_s - time.monotonic())) if awaited else []
        return {awaited[end]: self._receive(awaited[end]) for end in ready}

    def _raise_earliest_failure(self, results: dict[int, Any]) -> NoReturn:
        """Hears those who have not spoken yet, each at most once, for `HEARING_S`."""
        until_s = time.monotonic() + HEARING_S
        while arrived := self._hear(results, until_s):
            results.update(arrived)
        failures = [(rank, outcome) for rank, outcome in results.items() if isinstance(outcome, _Failure)]
        vanished = [each for each in failures if each[1].told_s is None]
        told = sorted((each for each in failures if each[1].told_s is not None), key=lambda each: each[1].told_s)
        # One that vanished may be the cause of what the others tell, or its consequence, in a library that aborts.
        texts = [f"rank {rank} failed:\n{failure.traceback_text}" for rank, failure in (*vanished, *told[:1])]
        raise RankFailedError("\n".join(texts))

    def join(self) -> None:
        """Wait for clean exits: work still in flight shows only here, as an abort."""
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
