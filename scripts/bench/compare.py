"""Compares engines that train the same model on the same data, each in processes of its own, visited in turn, round after round.

Two runs one after the other differ by more than the engines do. Visits a second apart do not, so every figure is
compared with the baseline's figure of the same round. Peak memory is measured apart from that, one engine at a time.

[Note: starts]
What a process pays for its memory differs from one start to the next by more than engines differ: in which holes of the heap
tensors come to lie decides how much of it the C library gives back and takes again in every step. So engines may be started
several times, and a ratio is the median over the rounds of all starts.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from engines import BASELINE, ENGINES, WORKLOADS, Engine, Workload, adamw_arguments
from harness import MALLOC_MMAP_THRESHOLD_BYTES, MALLOC_VARIABLE, MIB, status_bytes, tcp_bytes
from ranks import LiveRanks, RankFailedError, RanksTimedOutError, live_ranks, run_ranks

BYTES_A_PARAMETER = 20
"""That an engine may hold between its steps: DDP's parameters, gradients, moments and buckets."""
BYTES_A_RANK = 400 * MIB
"""Of a process and its activations."""
MEMORY_SHARE = 0.7
"""Of what is free, for engines that are alive together."""
START_LIMIT_S = 300
"""For an engine to be made and to train its first steps: a peer that hangs is left out of the table, and not the table."""
PEAK_STEPS = 3
"""The first step makes the optimizer's state, and DDP rebuilds its buckets after it: of two steps its peak is too low."""

ByRank = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Who trains what, and how often.

    Attributes:
        starts: of each engine's processes, see [Note: starts].
        rounds: in each start; 0 where no times are to be measured: bytes are then those of the peak's run. So it is where no two
            engines fit in memory together.
        sizes: of buckets, where they are not the engines' own.
        time_limit_s: of each set of ranks.
    """

    engines: tuple[str, ...]
    workload: Workload
    world_size: int = 2
    accumulation: int = 1
    starts: int = 1
    rounds: int = 5
    steps: int = 3
    warmup_steps: int = 2
    fused: bool = True
    memory: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    time_limit_s: float = 1800


def compare(comparison: Comparison) -> dict[str, Any]:
    """Figures for a file: a row an engine, and why others have none."""
    left_out = {name: ENGINES[name].hindrance for name in comparison.engines if ENGINES[name].hindrance}
    names = [name for name in comparison.engines if name not in left_out]
    by_engine: dict[str, ByRank] = {}
    references: dict[str, ByRank] = {}
    rounds = comparison.rounds if _fitting(comparison) > 1 else 0
    for batch in _batches(names, comparison) if rounds else ():
        found, failed = _visit_each_start(batch, comparison)
        left_out |= failed
        for name, by_rank in found.items():
            references.setdefault(name, found[BASELINE])
            by_engine.setdefault(name, by_rank)
    measured = [name for name in names if name not in left_out]
    peaks = dict(zip(measured, measure_peaks(measured, comparison))) if comparison.memory else {}
    left_out |= {name: why for name, why in peaks.items() if isinstance(why, str)}
    measured = [name for name in measured if name not in left_out]
    if rounds:
        rows = summarise({name: by_engine[name] for name in measured if name in by_engine}, references, peaks)
    else:
        rows = [{"title": ENGINES[n].title, "is_ours": ENGINES[n].is_ours} | {"name": n} | peaks[n] for n in measured]
    return {
        "workload": asdict(comparison.workload),
        "parameters": parameters_of(comparison.workload),
        **{name: getattr(comparison, name) for name in ("world_size", "accumulation", "starts", "steps")},
        "rounds": rounds,
        "engines": rows,
        "left_out": {name: {"title": ENGINES[name].title, "why": why} for name, why in left_out.items()},
    }


def parameters_of(workload: Workload) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in workload.make_model().parameters())


def _batches(names: list[str], comparison: Comparison) -> Iterable[list[str]]:
    """Engines that fit in memory together, the baseline among them each time."""
    others, count = [name for name in names if name != BASELINE], _fitting(comparison) - 1
    if not others:
        yield [BASELINE]
    for first in range(0, len(others), count):
        yield [BASELINE, *others[first : first + count]]


def _fitting(comparison: Comparison) -> int:
    """How many engines fit in memory at a time."""
    an_engine = BYTES_A_PARAMETER * parameters_of(comparison.workload) + BYTES_A_RANK
    return int(MEMORY_SHARE * psutil.virtual_memory().available / (an_engine * comparison.world_size))


# ---- visits ----


class Station:
    """One engine on one rank, and how far it has come through the batches."""

    def __init__(self, engine: Engine, workload: Any, rank: int, accumulation: int = 1) -> None:
        self.engine = engine
        self.workload = workload
        self.rank = rank
        self.accumulation = accumulation
        self.losses: list[float] = []
        self.visits: list[dict[str, float | None]] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            first = len(self.losses) * self.accumulation
            numbers = range(first, first + self.accumulation)
            micro_batches = [self.workload.make_batch(self.rank, step=number) for number in numbers]
            self.losses.append(self.engine.step(*micro_batches))
        self.engine.finish()

    def visit(self, steps: int) -> None:
        """Train for some steps and note what they cost: CPU time of all threads and of the one that runs them, and the rest."""
        dist.barrier()
        bytes_before = tcp_bytes()
        waited_before_ms = self.engine.waited_ms()
        wall_before_s, cpu_before_s, thread_before_s = time.perf_counter(), time.process_time(), time.thread_time()
        self.train(steps)
        thread_s = time.thread_time() - thread_before_s
        cpu_s, wall_s = time.process_time() - cpu_before_s, time.perf_counter() - wall_before_s
        waited_ms = None if waited_before_ms is None else (self.engine.waited_ms() - waited_before_ms) / steps
        dist.barrier()
        bytes_after = tcp_bytes()
        # A rank that leaves closes its sockets, and what they have counted is gone on both sides.
        dist.barrier()
        noted = {
            "cpu_ms": 1e3 * cpu_s / steps,
            "thread_ms": 1e3 * thread_s / steps,
            "wall_ms": 1e3 * wall_s / steps,
            "sent_bytes": (bytes_after.sent - bytes_before.sent) / steps,
            "waited_ms": waited_ms,
        }
        self.visits.append(noted)

    def figures(self) -> dict[str, Any]:
        """Everything that was noted so far, for the process that compares."""
        return {"losses": self.losses, "visits": self.visits}

    def close(self) -> None:
        self.engine.close()


class StationAlone(Station):
    """A station in a process of its own, which times its first step from having a model; its modules are imported before."""

    def __init__(self, rank: int, world_size: int, *, name: str, comparison: Comparison) -> None:
        ENGINES[name].import_modules()
        model = comparison.workload.make_model()
        dist.barrier()
        wall_before_s, cpu_before_s = time.perf_counter(), time.process_time()
        engine = ENGINES[name](lambda: model, adamw_arguments(comparison.fused), **comparison.sizes)
        super().__init__(engine, comparison.workload, rank, comparison.accumulation)
        self.train(1)
        self.first = {"wall_s": time.perf_counter() - wall_before_s, "cpu_s": time.process_time() - cpu_before_s}
        self.train(comparison.warmup_steps - 1)

    def figures(self) -> dict[str, Any]:
        return super().figures() | {"first_steps": [self.first]}


def measure_rounds(
    rank: int, world_size: int, *, engine_names: list[str], workload_name: str, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """This rank's visits and losses by engine, with all engines alive in this process."""
    workload, stations = WORKLOADS[workload_name], {}
    for name in engine_names:
        engine = ENGINES[name](workload.make_model, adamw_arguments(fused=True))
        stations[name] = Station(engine, workload, rank)
        stations[name].train(2)
    return visit_in_turn(stations, rounds, steps)


def visit_in_turn(stations: dict[str, Station], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Visits all stations of this process in each round, closes them, and returns visits and losses by engine."""
    for name in turns(list(stations), rounds):
        stations[name].visit(steps)
    for station in stations.values():
        station.close()
    return {name: station.figures() for name, station in stations.items()}


def turns(names: list[str], rounds: int) -> list[str]:
    """Who is visited when: each round begins with another, so that none always follows the same neighbour's leavings."""
    firsts = [number % len(names) for number in range(rounds)]
    return [name for first in firsts for name in names[first:] + names[:first]]


def _visit_each_start(names: list[str], comparison: Comparison) -> tuple[dict[str, ByRank], dict[str, str]]:
    """What the ranks of each engine noted in all starts, and why engines failed."""
    noted: dict[str, list[ByRank]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for _ in range(comparison.starts):
        found, failures = _visit([name for name in names if name not in failed], comparison)
        failed |= failures
        for name, by_rank in found.items():
            noted[name].append(by_rank)
    whole = {name: starts for name, starts in noted.items() if name not in failed}
    return {name: [_joined(starts) for starts in zip(*by_start)] for name, by_start in whole.items()}, failed


def _joined(starts: Sequence[dict[str, list]]) -> dict[str, list]:
    """What one rank noted, of one start behind the other."""
    return {what: list(chain.from_iterable(start[what] for start in starts)) for what in starts[0]}


def _visit(names: list[str], comparison: Comparison) -> tuple[dict[str, ByRank], dict[str, str]]:
    """What the ranks of each engine noted, and why engines failed."""
    with ExitStack() as stack:
        stations = _Stations(stack)
        for name in names:
            stations.start(name, comparison)
        for name in turns(names, comparison.rounds):
            stations.call(name, "visit", comparison.steps)
        found = {name: stations.call(name, "figures") for name in names}
        for name in names:
            stations.call(name, "close")
    return {name: by_rank for name, by_rank in found.items() if name not in stations.failed}, stations.failed


class _Stations:
    """Ranks of several engines. One that fails is left out from then on; a baseline that fails is an error.

    Attributes:
        failed: engine -> why.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.failed: dict[str, str] = {}
        self._stack = stack
        self._alive: dict[str, LiveRanks] = {}

    def start(self, name: str, comparison: Comparison) -> None:
        with self._noted(name):
            station = live_ranks(
                StationAlone,
                world_size=comparison.world_size,
                time_limit_s=comparison.time_limit_s,
                start_limit_s=START_LIMIT_S,
                keyword_arguments={"name": name, "comparison": comparison},
            )
            self._alive[name] = self._stack.enter_context(station)

    def call(self, name: str, method: str, *arguments: Any) -> ByRank:
        """Every rank's answer; none of an engine that has failed."""
        with self._noted(name):
            return [] if name in self.failed else self._alive[name].call(method, *arguments)
        return []

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        try:
            yield
        except (RankFailedError, RanksTimedOutError) as error:
            if name == BASELINE:
                raise
            self.failed[name] = _last_line(error)


def _last_line(error: Exception) -> str:
    """What a table has room for of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


# ---- from visits to one row an engine ----


def summarise(
    by_engine: dict[str, ByRank], baselines: dict[str, ByRank], peaks: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """A row an engine: medians over rounds, and ratios to the baseline paired by round.

    CPU time is summed over ranks; bytes, wall time and waits are those of the ranks' maximum. `loss_difference` is the largest
    distance from the baseline over steps and ranks; 0.0 means bitwise equal. First steps are the slower rank's, the median of
    the starts; None where engines shared processes.

    Args:
        by_engine: engine -> what each rank noted.
        baselines: engine -> what each rank of the baseline noted in the same rounds.
        peaks: of each engine, where memory was measured.
    """
    peaks = peaks or {}
    return [
        _row(name, by_rank, baselines[name], peaks.get(name), peaks.get(BASELINE))
        for name, by_rank in by_engine.items()
    ]


def summarise_ranks(by_rank: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of engines that shared their processes, from what `measure_rounds` returned on each rank."""
    by_engine = {name: [rank[name] for rank in by_rank] for name in by_rank[0]}
    return summarise(by_engine, dict.fromkeys(by_engine, by_engine[BASELINE]))


def _row(name: str, by_rank: ByRank, baseline: ByRank, peak: Any, baseline_peak: Any) -> dict[str, Any]:
    own, reference, peer = _figures_by_round(by_rank), _figures_by_round(baseline), ENGINES[name]
    # By start, each with the figures of all ranks.
    first_steps = list(zip(*(rank.get("first_steps", ()) for rank in by_rank)))
    figures = ("cpu_ms", "wall_ms", "sent_bytes")
    return {
        "name": name,
        **{what: getattr(peer, what) for what in ("title", "settings", "is_ours", "is_exact")},
        **{what: median(own[what]) for what in figures},
        **{f"{what.partition('_')[0]}_ratio": _paired_ratio(own[what], reference[what]) for what in figures},
        "waited_ms": median(own["waited_ms"]) if "waited_ms" in own else None,
        "last_loss": by_rank[0]["losses"][-1],
        "loss_difference": loss_difference(by_rank, baseline),
        "first_step_s": _median_of_slowest(first_steps, "wall_s"),
        "first_step_cpu_s": _median_of_slowest(first_steps, "cpu_s"),
        "peak_bytes": peak["peak_bytes"] if peak else None,
        "peak_ratio": peak["peak_bytes"] / baseline_peak["peak_bytes"] if peak and baseline_peak else None,
    }


def _median_of_slowest(starts: list[tuple[dict[str, float], ...]], figure: str) -> float | None:
    return median(max(rank[figure] for rank in ranks) for ranks in starts) if starts else None


def _figures_by_round(by_rank: ByRank) -> dict[str, list[float]]:
    rounds = list(zip(*(rank["visits"] for rank in by_rank)))
    figures = {"cpu_ms": [sum(visit["cpu_ms"] for visit in visits) for visits in rounds]}
    for figure in ("wall_ms", "sent_bytes", "waited_ms"):
        if rounds[0][0][figure] is not None:
            figures[figure] = [max(visit[figure] for visit in visits) for visits in rounds]
    return figures


def _paired_ratio(own: list[float], baseline: list[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(own, baseline)]
    return {"median": median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def loss_difference(by_rank: ByRank, baseline: ByRank) -> float:
    return max(
        abs(own - other)
        for rank, reference in zip(by_rank, baseline)
        for own, other in zip(rank["losses"], reference["losses"], strict=True)
    )


# ---- peaks ----


def measure_peaks(names: list[str], comparison: Comparison) -> list[dict[str, int] | str]:
    """Of each engine peak and sent bytes, or why there are none, by a child process with its own settings of malloc.

    The child runs this file: glibc reads its threshold before there is a Python.
    """
    with tempfile.TemporaryDirectory(prefix="peaks-") as folder:
        job_path, peaks_path = Path(folder) / "job.pickle", Path(folder) / "peaks.json"
        job_path.write_bytes(pickle.dumps((names, comparison)))
        command = [sys.executable, __file__, str(job_path), str(peaks_path)]
        subprocess.run(command, env=os.environ | {MALLOC_VARIABLE: str(MALLOC_MMAP_THRESHOLD_BYTES)}, check=True)
        return json.loads(peaks_path.read_text())


def peak_of_rank(rank: int, world_size: int, *, name: str, comparison: Comparison) -> dict[str, int]:
    """One engine on this rank: the most that the process has held above what it held without a model, and a step's bytes."""
    peer, workload = ENGINES[name], comparison.workload
    peer.import_modules()
    before_bytes = status_bytes("VmRSS")
    engine = peer(workload.make_model, adamw_arguments(comparison.fused), **comparison.sizes)
    sent_before_bytes = 0
    for step in range(PEAK_STEPS):
        # What the step before has left in flight is that step's.
        engine.finish()
        dist.barrier()
        sent_before_bytes = tcp_bytes().sent
        first = step * comparison.accumulation
        numbers = range(first, first + comparison.accumulation)
        engine.step(*(workload.make_batch(rank, number) for number in numbers))
    engine.finish()
    dist.barrier()
    sent_bytes = tcp_bytes().sent - sent_before_bytes
    # A rank that leaves closes its sockets, and what they have counted is gone on both sides.
    dist.barrier()
    peak_bytes = status_bytes("VmHWM") - before_bytes
    engine.close()
    return {"peak_bytes": peak_bytes, "sent_bytes": sent_bytes}


def _peak(name: str, comparison: Comparison) -> dict[str, int] | str:
    """The larger rank's figures, or the last line of what went wrong."""
    limits = {
        "world_size": comparison.world_size,
        "time_limit_s": min(START_LIMIT_S, comparison.time_limit_s),
    }
    try:
        by_rank = run_ranks(peak_of_rank, **limits, keyword_arguments={"name": name, "comparison": comparison})
    except (RankFailedError, RanksTimedOutError) as error:
        return _last_line(error)
    return {what: max(peak[what] for peak in by_rank) for what in by_rank[0]}


def main() -> None:
    job_path, peaks_path = map(Path, sys.argv[1:])
    names, comparison = pickle.loads(job_path.read_bytes())
    peaks_path.write_text(json.dumps([_peak(name, comparison) for name in names]))


if __name__ == "__main__":
    main()
