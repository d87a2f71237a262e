"""From the ranks' visits to one row an engine: medians over rounds, and ratios to the baseline paired by round."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from memory import Peak
from peers import BASELINE, ENGINES


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """An engine's figure over the baseline's: the median of the rounds' ratios, and how far the rounds lie apart."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class EngineSummary:
    """One engine's row. CPU time is summed over ranks; bytes, wall time and waits are those of the ranks' maximum.

    Attributes:
        last_loss: rank 0's.
        loss_difference: largest distance from the baseline over steps and ranks; 0.0 means bitwise equal.
        first_step_s: the slower rank's, from having a model to the end of its first step, the median of the starts; None where
            engines shared processes.
        first_step_cpu_s: the same in CPU time.
    """

    name: str
    title: str
    settings: str
    is_ours: bool
    is_exact: bool
    cpu_ms: float
    cpu_ratio: Ratio
    wall_ms: float
    wall_ratio: Ratio
    sent_bytes: float
    sent_ratio: Ratio
    waited_ms: float | None
    last_loss: float
    loss_difference: float
    first_step_s: float | None
    first_step_cpu_s: float | None
    peak_bytes: int | None
    peak_ratio: float | None


ByRank = list[dict[str, Any]]


def summarise(
    by_engine: dict[str, ByRank], baselines: dict[str, ByRank], peaks: dict[str, Peak] | None = None
) -> list[EngineSummary]:
    """Summaries in the order of the engines.

    Args:
        by_engine: engine -> what each rank noted.
        baselines: engine -> what each rank of the baseline noted in the same rounds.
        peaks: of each engine; None where memory was not measured.
    """
    return [
        _summary(name, by_rank, baselines[name], (peaks or {}).get(name), (peaks or {}).get(BASELINE))
        for name, by_rank in by_engine.items()
    ]


def summarise_ranks(by_rank: list[dict[str, dict[str, Any]]]) -> list[EngineSummary]:
    """Summaries of engines that shared their processes, from what `measure_rounds` returned on each rank."""
    by_engine = {name: [rank[name] for rank in by_rank] for name in by_rank[0]}
    return summarise(by_engine, dict.fromkeys(by_engine, by_engine[BASELINE]))


def _summary(
    name: str, by_rank: ByRank, baseline: ByRank, peak: Peak | None, baseline_peak: Peak | None
) -> EngineSummary:
    own, reference, peer = _figures_by_round(by_rank), _figures_by_round(baseline), ENGINES[name]
    # By start, each with the figures of all ranks.
    first_steps = list(zip(*(rank.get("first_steps", ()) for rank in by_rank)))
    return EngineSummary(
        name=name,
        title=peer.title,
        settings=peer.settings,
        is_ours=peer.is_ours,
        is_exact=peer.is_exact,
        cpu_ms=median(own["cpu_ms"]),
        cpu_ratio=_paired_ratio(own["cpu_ms"], reference["cpu_ms"]),
        wall_ms=median(own["wall_ms"]),
        wall_ratio=_paired_ratio(own["wall_ms"], reference["wall_ms"]),
        sent_bytes=median(own["sent_bytes"]),
        sent_ratio=_paired_ratio(own["sent_bytes"], reference["sent_bytes"]),
        waited_ms=median(own["waited_ms"]) if "waited_ms" in own else None,
        last_loss=by_rank[0]["losses"][-1],
        loss_difference=_loss_difference(by_rank, baseline),
        first_step_s=_median_of_slowest(first_steps, "wall_s"),
        first_step_cpu_s=_median_of_slowest(first_steps, "cpu_s"),
        peak_bytes=peak.peak_bytes if peak else None,
        peak_ratio=peak.peak_bytes / baseline_peak.peak_bytes if peak and baseline_peak else None,
    )


def _median_of_slowest(starts: list[tuple[dict[str, float], ...]], figure: str) -> float | None:
    return median(max(rank[figure] for rank in ranks) for ranks in starts) if starts else None


def _figures_by_round(by_rank: ByRank) -> dict[str, list[float]]:
    rounds = list(zip(*(rank["visits"] for rank in by_rank)))
    figures = {"cpu_ms": [sum(visit["cpu_ms"] for visit in visits) for visits in rounds]}
    for figure in ("wall_ms", "sent_bytes", "waited_ms"):
        if rounds[0][0][figure] is not None:
            figures[figure] = [max(visit[figure] for visit in visits) for visits in rounds]
    return figures


def _paired_ratio(own: list[float], baseline: list[float]) -> Ratio:
    ratios = [one / other for one, other in zip(own, baseline)]
    return Ratio(median=median(ratios), lowest=min(ratios), highest=max(ratios))


def _loss_difference(by_rank: ByRank, baseline: ByRank) -> float:
    return max(
        abs(own - other)
        for rank, reference in zip(by_rank, baseline)
        for own, other in zip(rank["losses"], reference["losses"], strict=True)
    )
