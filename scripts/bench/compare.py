"""Compares engines that train the same model on the same data, each in processes of its own, visited in turn, round after round.

Two runs one after the other differ by more than the engines do. Visits a second apart do not, so every figure is
compared with the baseline's figure of the same round. Peak memory is measured apart from that, one engine at a time.

[Note: starts]
What a process pays for its memory differs from one start to the next by more than engines differ: in which holes of the heap
tensors come to lie decides how much of it the C library gives back and takes again in every step. So engines may be started
several times, and a ratio is the median over the rounds of all starts.
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
        """Train for some steps and note what they cost: CPU time of all threads and of the one that runs them, and the rest."""
        waited_before_ms = self.engine.waited_ms()
        spent = spent_in(lambda: self.train(steps))
        waited_ms = None if waited_before_ms is None else (self.engine.waited_ms() - waited_before_ms) / steps
        times = {f"{kind}_ms": 1e3 * getattr(spent, f"{kind}_s") / steps for kind in ("cpu", "thread", "wall")}
        self.visits.append(times | {"sent_bytes": spent.sent_bytes / steps, "waited_ms": waited_ms})

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
    """This rank's visits and losses by engine, with all engines alive in this process."""
    stations = {}
    for name in engines:
        engine = ENGINES[name](workload.make_model, adamw_arguments(fused=True))
        engine.max_norm = max_norm
        stations[name] = Station(engine, workload, rank)
        stations[name].train(warmup_steps)
    # What an engine leaves to Python's collector is to be its own cost, and not a walk through all models here.
    gc.collect()
    gc.freeze()
    for name in turns(engines, rounds):
        stations[name].visit(steps)
    for station in stations.values():
        station.close()
    return {name: station.figures() for name, station in stations.items()}


def turns(names: list[str], rounds: int) -> list[str]:
    """Who is visited when: each round begins with another, so that none always follows the same neighbour's leavings."""
    firsts = [number % len(names) for number in range(rounds)]
    return [name for first in firsts for name in names[first:] + names[:first]]


def _visit_each_start(names: list[str], comparison: Comparison) -> tuple[dict[str, ByRank], dict[str, str]]:
    """What the ranks of each engine noted in all starts, one behind the other, and why engines failed."""
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
    """What the ranks of each engine noted, and why engines failed.

    One that fails is left out from then on; a baseline that fails is an error.
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
    """Of each engine peak and sent bytes of the rank that has more, or the last line of what went wrong."""
    return [_peak(name, comparison) for name in names]


def _peak(name: str, comparison: Comparison) -> dict[str, int] | str:
    limit_s = min(START_LIMIT_S, comparison.time_limit_s)
    try:
        by_rank = on_ranks(peak_of_rank, comparison.world_size, limit_s=limit_s, name=name, comparison=comparison)
    except (RankFailedError, RanksTimedOutError) as error:
        return _last_line(error)
    return {what: max(peak[what] for peak in by_rank) for what in by_rank[0]}


def peak_of_rank(rank: int, world_size: int, *, name: str, comparison: Comparison) -> dict[str, int]:
    """One engine on this rank: the most that the process has held above what it held without a model, and a step's bytes."""
    peer, workload = ENGINES[name], comparison.workload
    peer.import_modules()
    before_bytes = held_before()
    station = Station(
        peer(workload.make_model, adamw_arguments(comparison.fused), **comparison.sizes),
        *(workload, rank, comparison.accumulation),
    )
    for _ in range(PEAK_STEPS - 1):
        # By itself: what the step before has left in flight is that step's.
        station.train(1)
    sent_bytes = spent_in(lambda: station.train(1)).sent_bytes
    peak_bytes = most_held() - before_bytes
    station.close()
    return {"peak_bytes": peak_bytes, "sent_bytes": sent_bytes}
