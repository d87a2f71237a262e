"""Starting ranks fast: forkserver processes with torch already imported, joined by gloo over loopback or alone.

    results = run_ranks(measure, world_size=2, time_limit_s=60, keyword_arguments={"rounds": 5})

`measure(rank, world_size, **keyword_arguments)` runs in every rank inside a process group and returns something
picklable. The first rank that fails takes the others down, and its traceback is the caller's error message.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Imported once, by the process that forks the ranks: each rank would else spend its first seconds on them.
PRELOADED_MODULES = ["torch", "torch.distributed.fsdp", "transformers.models.gpt2.modeling_gpt2"]

# Where that process finds modules that no package has.
PRELOAD_FOLDERS = [Path(__file__).resolve().parent]


class RankFailedError(RuntimeError):
    """A rank raised, or ended without a result; the message carries its traceback or its exit code."""


class RanksTimedOutError(TimeoutError):
    """Not every rank brought a result within the time limit."""


class _Failure(NamedTuple):
    """What a rank sends instead of its result."""

    monotonic_s: float  # one clock for all processes: tells the first failure from those it caused
    traceback_text: str


def run_ranks(
    target: Callable[..., Any],
    *,
    world_size: int,
    time_limit_s: float,
    keyword_arguments: dict[str, Any] | None = None,
) -> list[Any]:
    """Run target in world_size fresh processes and return their results in rank order."""
    return _run(_rank_main, target, world_size, time_limit_s, keyword_arguments or {})


def run_alone(target: Callable[..., Any], *, time_limit_s: float, keyword_arguments: dict[str, Any]) -> Any:
    """Run target in a fresh process that is in no process group, and return its result."""
    [result] = _run(_lone_main, target, 1, time_limit_s, keyword_arguments)
    return result


def _run(
    main: Callable[..., None],
    target: Callable[..., Any],
    world_size: int,
    time_limit_s: float,
    keyword_arguments: dict[str, Any],
) -> list[Any]:
    deadline_s = time.monotonic() + time_limit_s
    context = multiprocessing.get_context("forkserver")
    start_forking()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = _Ranks()
        try:
            for rank in range(world_size):
                reading_end, writing_end = context.Pipe(duplex=False)
                arguments = (target, rank, world_size, folder, time_limit_s, keyword_arguments, writing_end)
                process = context.Process(target=main, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                # The rank holds the only writing end now, so its death closes the pipe.
                writing_end.close()
                ranks.add(process, reading_end)
            results = ranks.collect(deadline_s)
            ranks.join(deadline_s)
        finally:
            ranks.kill()
    return results


def start_forking() -> None:
    """Starts the process that ranks are forked from, unless it runs."""
    forkserver.set_forkserver_preload([*PRELOADED_MODULES, "frozen_heap"])
    before = os.environ.get("PYTHONPATH")
    # It is told this process's `sys.path`, and in Python before 3.13 does not look there.
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, PRELOAD_FOLDERS), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def joined_process_group(rank: int, world_size: int, store_folder: str | Path, time_limit_s: float) -> Iterator[None]:
    """A gloo process group that meets in a file, so that only the engines' own bytes travel by network.

    A rank that raises does not destroy its group: the others would fail of that, before the reason has been told.
    """
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(store_folder) / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=time_limit_s),
    )
    # A rank that has little to do and leaves would fail those that are still joining.
    dist.barrier()
    yield
    dist.destroy_process_group()


def _rank_main(
    target: Callable[..., Any],
    rank: int,
    world_size: int,
    store_folder: str,
    time_limit_s: float,
    keyword_arguments: dict[str, Any],
    writing_end: Connection,
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def joined() -> Any:
        with joined_process_group(rank, world_size, store_folder, time_limit_s):
            return target(rank, world_size, **keyword_arguments)

    _tell(joined, time_limit_s, writing_end)


def _lone_main(
    target: Callable[..., Any],
    rank: int,
    world_size: int,
    store_folder: str,
    time_limit_s: float,
    keyword_arguments: dict[str, Any],
    writing_end: Connection,
) -> None:
    _tell(lambda: target(**keyword_arguments), time_limit_s, writing_end)


def _tell(call: Callable[[], Any], time_limit_s: float, writing_end: Connection) -> None:
    """Sends what the call returns, or how it failed."""
    # Where every thread was, on stderr: the end of a rank that is out of time tells nothing.
    faulthandler.dump_traceback_later(0.95 * time_limit_s)
    try:
        outcome = call()
    except Exception:
        outcome = _Failure(time.monotonic(), traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    writing_end.send(outcome)
    if isinstance(outcome, _Failure):
        raise SystemExit(1)


class _Ranks:
    """The processes of one run and the pipes their results come through."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.reading_ends: list[Connection] = []

    def add(self, process: BaseProcess, reading_end: Connection) -> None:
        self.processes.append(process)
        self.reading_ends.append(reading_end)

    def collect(self, deadline_s: float) -> list[Any]:
        """Every rank's result; raises on the first failure or at the deadline."""
        results: dict[int, Any] = {}
        while len(results) < len(self.processes):
            awaited = {end: rank for rank, end in enumerate(self.reading_ends) if rank not in results}
            ready = wait(awaited, timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RanksTimedOutError(f"no result from ranks {sorted(awaited.values())} within the time limit")
            arrived = {awaited[end]: self._receive(awaited[end]) for end in ready}
            failures = {rank: outcome for rank, outcome in arrived.items() if isinstance(outcome, _Failure)}
            if failures:
                first = min(failures, key=lambda rank: failures[rank].monotonic_s)
                raise RankFailedError(f"rank {first} failed:\n{failures[first].traceback_text}")
            results.update(arrived)
        return [results[rank] for rank in range(len(self.processes))]

    def join(self, deadline_s: float) -> None:
        """Wait for clean exits: work still in flight shows only here, as an abort."""
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.exitcode is None:
                raise RanksTimedOutError(f"rank {rank} brought its result but did not exit within the time limit")
            if process.exitcode != 0:
                raise RankFailedError(f"rank {rank} brought its result but ended with exit code {process.exitcode}")

    def kill(self) -> None:
        for process, reading_end in zip(self.processes, self.reading_ends):
            process.kill()
            process.join()
            reading_end.close()

    def _receive(self, rank: int) -> Any:
        try:
            return self.reading_ends[rank].recv()
        except EOFError:
            process = self.processes[rank]
            process.join()
            # A rank that cannot even speak is a cause, not a consequence: it comes before any traceback.
            return _Failure(0.0, f"ended without a result, exit code {process.exitcode}")
