"""From the ranks' visits to one row an engine: medians over rounds, and ratios to the baseline paired by round."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from peers import BASELINE


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """An engine's figure over the baseline's: the median of the rounds' ratios, and how far the rounds lie apart."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class EngineSummary:
    """One engine's row. CPU time is summed over ranks; bytes, wall time and waits are those of the ranks' maximum."""

    name: str
    cpu_ms: float
    cpu_ratio: Ratio
    wall_ms: float
    wall_ratio: Ratio
    sent_bytes: float
    sent_ratio: Ratio
    waited_ms: float | None
    last_loss: float  # rank 0's
    loss_difference: float  # largest distance from the baseline over steps and ranks; 0.0 means bitwise equal
    peak_bytes: int | None
    peak_ratio: float | None


def summarise(
    by_rank: list[dict[str, dict[str, Any]]], peaks_bytes: dict[str, int] | None = None
) -> list[EngineSummary]:
    """Summaries in the order the engines ran, from what `measure_rounds` returned on each rank."""
    figures = {name: _figures_by_round(name, by_rank) for name in by_rank[0]}
    return [
        EngineSummary(
            name=name,
            cpu_ms=median(own["cpu_ms"]),
            cpu_ratio=_paired_ratio(own["cpu_ms"], figures[BASELINE]["cpu_ms"]),
            wall_ms=median(own["wall_ms"]),
            wall_ratio=_paired_ratio(own["wall_ms"], figures[BASELINE]["wall_ms"]),
            sent_bytes=median(own["sent_bytes"]),
            sent_ratio=_paired_ratio(own["sent_bytes"], figures[BASELINE]["sent_bytes"]),
            waited_ms=median(own["waited_ms"]) if "waited_ms" in own else None,
            last_loss=by_rank[0][name]["losses"][-1],
            loss_difference=_loss_difference(name, by_rank),
            peak_bytes=peaks_bytes[name] if peaks_bytes else None,
            peak_ratio=peaks_bytes[name] / peaks_bytes[BASELINE] if peaks_bytes else None,
        )
        for name, own in figures.items()
    ]


def _figures_by_round(name: str, by_rank: list[dict[str, dict[str, Any]]]) -> dict[str, list[float]]:
    rounds = list(zip(*(rank[name]["visits"] for rank in by_rank)))
    figures = {"cpu_ms": [sum(visit["cpu_ms"] for visit in visits) for visits in rounds]}
    for figure in ("wall_ms", "sent_bytes", "waited_ms"):
        if rounds[0][0][figure] is not None:
            figures[figure] = [max(visit[figure] for visit in visits) for visits in rounds]
    return figures


def _paired_ratio(own: list[float], baseline: list[float]) -> Ratio:
    ratios = [one / other for one, other in zip(own, baseline)]
    return Ratio(median=median(ratios), lowest=min(ratios), highest=max(ratios))


def _loss_difference(name: str, by_rank: list[dict[str, dict[str, Any]]]) -> float:
    return max(
        abs(own - baseline)
        for rank in by_rank
        for own, baseline in zip(rank[name]["losses"], rank[BASELINE]["losses"], strict=True)
    )
