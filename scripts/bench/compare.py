"""Compares engines on the same model and data, each in its own processes, in alternating visits, round after round.

Two runs one after the other differ by more than the engines do. Visits a second apart do not, so every figure is
compared with the baseline's figure of the same round. Peak memory is measured separately, one engine at a time.

[Note: starts]
The cost of a process's memory differs from one start to the next by more than engines differ: the positions of tensors between
holes of the heap decide how much memory the C library returns to the system and requests again in every step. So engines may be
started several times, and a ratio is the median over the rounds of all starts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from engines import BASELINE, ENGINES, Engine, Workload, adamw_arguments
from harness import MIB, Clocks, held_before, most_held, on_ranks, spent_in
from ranks import LiveRanks, RankFailedError, RanksTimedOutError, live_ranks

BYTES_A_PARAMETER = 20
"""Assumed memory of an engine between its steps: DDP's parameters, gradients, moments and buckets."""
BYTES_A_RANK = 400 * MIB
"""Assumed memory of a process and its activations."""
MEMORY_SHARE = 0.7
"""Share of the free memory for engines running at the same time."""
START_LIMIT_S = 300
"""Time limit for making an engine and training its first steps. A hanging peer is left out, and the table is still made."""
PEAK_STEPS = 3
"""The first step makes the optimizer's state, and DDP rebuilds its buckets afterwards, so two steps show too low a peak."""

ByRank = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The settings of a comparison.

    Attributes:
        starts: number of starts of each engine's processes, see [Note: starts].
        rounds: number of rounds per start; 0 to measure no times: bytes are then measured in the run for the peak. This is also
            the case if two engines do not fit in memory together.
        sizes: bucket sizes, if they are not the engines' defaults.
        time_limit_s: limit for each set of ranks.
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
    """Returns figures for a file: a row per engine, and the reasons for missing engines."""
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
        rows = summarize({name: by_engine[name] for name in measured if name in by_engine}, references, peaks)
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
    """Yields groups of engines that fit in memory together, each with the baseline."""
    others, count = [name for name in names if name != BASELINE], _fitting(comparison) - 1
    if not others:
        yield [BASELINE]
    for first in range(0, len(others), count):
        yield [BASELINE, *others[first : first + count]]


def _fitting(comparison: Comparison) -> int:
    """Returns the number of engines that fit in memory at the same time."""
    an_engine = BYTES_A_PARAMETER * parameters_of(comparison.workload) + BYTES_A_RANK
    return int(MEMORY_SHARE * psutil.virtual_memory().available / (an_engine * comparison.world_size))


# ---- visits ----


class Station:
    """One engine on one rank, and its position in the sequence of batches."""

    def __init__(self, engine: Engine, workload: Workload, rank: int, accumulation: int = 1) -> None:
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
            self.losses.append(self.engine.step(*(self.workload.make_batch(self.rank, number) for number in numbers)))
        self.engine.finish()

    def visit(self, steps: int) -> None:
        """Trains for some steps and notes their CPU time (all threads, and the training thread), wall time, bytes and waits."""
        waited_before_ms = self.engine.waited_ms()
        spent = spent_in(lambda: self.train(steps))
        waited_ms = None if waited_before_ms is None else (self.engine.waited_ms() - waited_before_ms) / steps
        times = {f"{kind}_ms": 1e3 * getattr(spent, f"{kind}_s") / steps for kind in ("cpu", "thread", "wall")}
        self.visits.append(times | {"sent_bytes": spent.sent_bytes / steps, "waited_ms": waited_ms})

    def figures(self) -> dict[str, Any]:
        """Returns all noted figures, for the comparing process."""
        return {"losses": self.losses, "visits": self.visits}

    def close(self) -> None:
        self.engine.close()


class StationAlone(Station):
    """A station in its own process. It times its first step from an existing model on; its modules are imported before."""

    def __init__(self, rank: int, world_size: int, *, name: str, comparison: Comparison) -> None:
        ENGINES[name].import_modules()
        model = comparison.workload.make_model()
        dist.barrier()
        clocks = Clocks()
        engine = ENGINES[name](lambda: model, adamw_arguments(comparison.fused), **comparison.sizes)
        super().__init__(engine, comparison.workload, rank, comparison.accumulation)
        self.train(1)
        self.first = clocks.spent()._asdict()
        self.train(comparison.warmup_steps - 1)

    def figures(self) -> dict[str, Any]:
        return super().figures() | {"first_steps": [self.first]}


def measure_rounds(
    rank: int,
    world_size: int,
    *,
    engines: list[str],
    workload: Workload,
    rounds: int,
    steps: int,
    warmup_steps: int = 2,
    max_norm: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns this rank's visits and losses by engine, with all engines in this process."""
    stations = {}
    for name in engines:
        engine = ENGINES[name](workload.make_model, adamw_arguments(fused=True))
        engine.max_norm = max_norm
        stations[name] = Station(engine, workload, rank)
        stations[name].train(warmup_steps)
    # Freeze existing objects: a collection during an engine's step is then its own cost, not a walk through all models.
    gc.collect()
    gc.freeze()
    for name in turns(engines, rounds):
        stations[name].visit(steps)
    for station in stations.values():
        station.close()
    # Otherwise nanobind would report frozen objects as leaks at the exit.
    gc.unfreeze()
    return {name: station.figures() for name, station in stations.items()}


def turns(names: list[str], rounds: int) -> list[str]:
    """Returns the order of visits. Each round begins with a different engine, so none always follows the same engine."""
    firsts = [number % len(names) for number in range(rounds)]
    return [name for first in firsts for name in names[first:] + names[:first]]


def _visit_each_start(names: list[str], comparison: Comparison) -> tuple[dict[str, ByRank], dict[str, str]]:
    """Returns the notes of each engine's ranks over all starts, concatenated, and the reasons for failures."""
    noted: dict[str, list[ByRank]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for _ in range(comparison.starts):
        found, failures = _visit([name for name in names if name not in failed], comparison)
        failed |= failures
        for name, by_rank in found.items():
            noted[name].append(by_rank)

    def joined(starts: tuple[dict[str, list], ...]) -> dict[str, list]:
        return {what: list(chain.from_iterable(start[what] for start in starts)) for what in starts[0]}

    whole = {name: starts for name, starts in noted.items() if name not in failed}
    return {name: [joined(starts) for starts in zip(*by_start)] for name, by_start in whole.items()}, failed


def _visit(names: list[str], comparison: Comparison) -> tuple[dict[str, ByRank], dict[str, str]]:
    """Returns the notes of each engine's ranks, and the reasons for failures.

    A failed engine is left out from then on; a failed baseline is an error.
    """
    alive: dict[str, LiveRanks] = {}
    failed: dict[str, str] = {}

    def tried(name: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (RankFailedError, RanksTimedOutError) as error:
            if name == BASELINE:
                raise
            failed[name] = _last_line(error)

    def call(name: str, method: str, *arguments: Any) -> ByRank:
        return [] if name in failed else tried(name, lambda: alive[name].call(method, *arguments))

    limits = {"time_limit_s": comparison.time_limit_s, "start_limit_s": START_LIMIT_S}
    with ExitStack() as stack:
        for name in names:
            job = {"name": name, "comparison": comparison}
            ranks = live_ranks(StationAlone, world_size=comparison.world_size, keyword_arguments=job, **limits)
            alive[name] = tried(name, lambda ranks=ranks: stack.enter_context(ranks))
        for name in turns(names, comparison.rounds):
            call(name, "visit", comparison.steps)
        found = {name: call(name, "figures") for name in names}
        for name in names:
            call(name, "close")
    return {name: by_rank for name, by_rank in found.items() if name not in failed}, failed


def _last_line(error: Exception) -> str:
    """Shortens an error to a line for a table."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


# ---- from visits to one row per engine ----


def summarize(
    by_engine: dict[str, ByRank], baselines: dict[str, ByRank], peaks: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Returns a row per engine: medians over rounds, and ratios to the baseline of the same round.

    CPU time is summed over ranks; bytes, wall time and waits are the ranks' maximum. `loss_difference` is the largest
    difference to the baseline over steps and ranks; 0.0 means bitwise equal. First steps are the slower rank's, the median of
    the starts; None if engines shared processes.

    Args:
        by_engine: engine → the notes of each rank.
        baselines: engine → the notes of each rank of the baseline in the same rounds.
        peaks: of each engine, if memory was measured.
    """
    peaks = peaks or {}
    return [
        _row(name, by_rank, baselines[name], peaks.get(name), peaks.get(BASELINE))
        for name, by_rank in by_engine.items()
    ]


def summarize_ranks(by_rank: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns rows of engines that shared their processes, from the ranks' results of `measure_rounds`."""
    by_engine = {name: [rank[name] for rank in by_rank] for name in by_rank[0]}
    return summarize(by_engine, dict.fromkeys(by_engine, by_engine[BASELINE]))


def _row(name: str, by_rank: ByRank, baseline: ByRank, peak: Any, baseline_peak: Any) -> dict[str, Any]:
    own, reference, peer = _figures_by_round(by_rank), _figures_by_round(baseline), ENGINES[name]
    # Group by start, with the figures of all ranks together.
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
    """Returns each engine's peak and sent bytes on the rank with the higher figures, or the last line of the error."""
    return [_peak(name, comparison) for name in names]


def _peak(name: str, comparison: Comparison) -> dict[str, int] | str:
    limit_s = min(START_LIMIT_S, comparison.time_limit_s)
    try:
        by_rank = on_ranks(peak_of_rank, comparison.world_size, limit_s=limit_s, name=name, comparison=comparison)
    except (RankFailedError, RanksTimedOutError) as error:
        return _last_line(error)
    return {what: max(peak[what] for peak in by_rank) for what in by_rank[0]}


def peak_of_rank(rank: int, world_size: int, *, name: str, comparison: Comparison) -> dict[str, int]:
    """Measures one engine on this rank: the peak memory above the memory without a model, and the bytes sent per step."""
    peer, workload = ENGINES[name], comparison.workload
    peer.import_modules()
    before_bytes = held_before()
    station = Station(
        peer(workload.make_model, adamw_arguments(comparison.fused), **comparison.sizes),
        *(workload, rank, comparison.accumulation),
    )
    for _ in range(PEAK_STEPS - 1):
        # Train each step separately, so the bytes of its unfinished work do not count for the next step.
        station.train(1)
    sent_bytes = spent_in(lambda: station.train(1)).sent_bytes
    peak_bytes = most_held() - before_bytes
    station.close()
    return {"peak_bytes": peak_bytes, "sent_bytes": sent_bytes}
