"""One comparison: engines that train the same model on the same data, each in processes of its own, visited in turn.

[Note: starts]
What a process pays for its memory differs from one start to the next by more than engines differ: in which holes of the heap
tensors come to lie decides how much of it the C library gives back and takes again in every step. So engines may be started
several times, and a ratio is the median over the rounds of all starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import psutil
import torch
from memory import Job, last_line, measure_peaks
from peers import BASELINE, ENGINES
from ranks import LiveRanks, RankFailedError, RanksTimedOutError, live_ranks
from rounds import StationAlone, turns
from summary import summarise
from workload import Workload

BYTES_A_PARAMETER = 20
"""That an engine may hold between its steps: DDP's parameters, gradients, moments and buckets."""
BYTES_A_RANK = 400 * 2**20
"""Of a process and its activations."""
MEMORY_SHARE = 0.7
"""Of what is free, for engines that are alive together."""
START_LIMIT_S = 300
"""For an engine to be made and to train its first steps: a peer that hangs is left out of the table, and not the table."""


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
    by_engine: dict[str, list[dict]] = {}
    references: dict[str, list[dict]] = {}
    rounds = comparison.rounds if _fitting(comparison) > 1 else 0
    for batch in _batches(names, comparison) if rounds else ():
        found, failed = _visit_each_start(batch, comparison)
        left_out |= failed
        for name, by_rank in found.items():
            references.setdefault(name, found[BASELINE])
            by_engine.setdefault(name, by_rank)
    measured = [name for name in names if name not in left_out]
    peaks = {}
    if comparison.memory:
        for name, peak in zip(measured, measure_peaks([_job(name, comparison) for name in measured])):
            if isinstance(peak, str):
                left_out[name] = peak
            else:
                peaks[name] = peak
    measured = [name for name in names if name not in left_out]
    rows = summarise({name: by_engine[name] for name in measured if name in by_engine}, references, peaks)
    return {
        "workload": asdict(comparison.workload),
        "parameters": parameters_of(comparison.workload),
        "world_size": comparison.world_size,
        "accumulation": comparison.accumulation,
        "starts": comparison.starts,
        "rounds": rounds,
        "steps": comparison.steps,
        "engines": [asdict(row) for row in rows] if rounds else _bytes_only(measured, peaks),
        "left_out": {name: {"title": ENGINES[name].title, "why": why} for name, why in left_out.items()},
    }


def parameters_of(workload: Workload) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in workload.make_model().parameters())


def _batches(names: list[str], comparison: Comparison) -> Iterable[list[str]]:
    """Engines that fit in memory together, the baseline among them each time."""
    together = _fitting(comparison)
    others = [name for name in names if name != BASELINE]
    if not others:
        yield [BASELINE]
    for first in range(0, len(others), together - 1):
        yield [BASELINE, *others[first : first + together - 1]]


def _fitting(comparison: Comparison) -> int:
    """How many engines fit in memory at a time."""
    an_engine = BYTES_A_PARAMETER * parameters_of(comparison.workload) + BYTES_A_RANK
    return int(MEMORY_SHARE * psutil.virtual_memory().available / (an_engine * comparison.world_size))


def _visit_each_start(names: list[str], comparison: Comparison) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """What the ranks of each engine noted in all starts, and why engines failed."""
    noted: dict[str, list[list[dict]]] = {name: [] for name in names}
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


def _visit(names: list[str], comparison: Comparison) -> tuple[dict[str, list[dict]], dict[str, str]]:
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
            self._alive[name] = self._stack.enter_context(_station(name, comparison))

    def call(self, name: str, method: str, *arguments: Any) -> list[Any]:
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
            self.failed[name] = last_line(error)


def _station(name: str, comparison: Comparison) -> Any:
    return live_ranks(
        StationAlone,
        world_size=comparison.world_size,
        time_limit_s=comparison.time_limit_s,
        start_limit_s=START_LIMIT_S,
        keyword_arguments={
            "engine_name": name,
            "workload": comparison.workload,
            "accumulation": comparison.accumulation,
            "warmup_steps": comparison.warmup_steps,
            "fused": comparison.fused,
            "sizes": comparison.sizes,
        },
    )


def _job(name: str, comparison: Comparison) -> Job:
    return Job(
        engine_name=name,
        workload=comparison.workload,
        world_size=comparison.world_size,
        accumulation=comparison.accumulation,
        fused=comparison.fused,
        sizes=comparison.sizes,
        time_limit_s=min(START_LIMIT_S, comparison.time_limit_s),
    )


def _bytes_only(names: list[str], peaks: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "title": ENGINES[name].title, "is_ours": ENGINES[name].is_ours, **asdict(peaks[name])}
        for name in names
    ]
