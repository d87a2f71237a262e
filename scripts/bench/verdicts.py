"""Where an engine of this package is not ahead of every peer, in words for a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

LEVEL = 0.005
"""Figures this close are level."""

Row = dict[str, Any]

FIGURES: dict[str, Callable[[Row], float | None]] = {
    "CPU": lambda row: row["cpu_ratio"]["median"] if "cpu_ratio" in row else None,
    "wire": lambda row: row["sent_bytes"],
    "peak": lambda row: row["peak_bytes"],
    "first step": lambda row: row.get("first_step_cpu_s"),
}
"""What is compared; less is better in each."""


def behind(own: float | None, peers: Iterable[tuple[str, float | None]], what: str = "") -> str:
    """`behind: FSDP2, 3 %` for the peer that is furthest ahead; empty where there is none."""
    ahead = [(value, title) for title, value in peers if value is not None and own is not None]
    if not ahead:
        return ""
    best, title = min(ahead)
    if own <= best * (1 + LEVEL):
        return ""
    share = own / best - 1
    far = f"{share:.0%}".replace("%", " %") if share < 2 else f"{own / best:.0f} times"
    return f"behind{' in ' if what else ''}{what}: {title}, {far}"


def verdict(row: Row, rows: list[Row]) -> str:
    """Each figure in which some peer is ahead of this row's engine, and the peer that is furthest; of peers nothing is said.

    An engine that rounds nothing is compared with peers that round nothing, and one that does with all.
    """
    if not row["is_ours"]:
        return ""
    rounds = not row.get("is_exact", True)
    peers = [each for each in rows if not each["is_ours"] and (rounds or each.get("is_exact", True))]
    found = []
    for what, figure in FIGURES.items():
        said = behind(figure(row), ((peer["title"], figure(peer)) for peer in peers), what)
        if said and what == "CPU" and _overlap(row, min(peers, key=lambda peer: peer["cpu_ratio"]["median"])):
            said += " (rounds overlap)"
        found.append(said)
    return "; ".join(filter(None, found)) or "ahead or level in all"


def _overlap(one: Row, other: Row) -> bool:
    """Whether the slowest round of the better engine is slower than the fastest of this one."""
    return one["cpu_ratio"]["lowest"] <= other["cpu_ratio"]["highest"]


def scores(rows: list[Row]) -> list[tuple[str, str, str, str]]:
    """(figure, the best of ours, the best of the peers, what is to be said), among engines that round nothing."""
    table = []
    for what, figure in FIGURES.items():
        ours, peers = (
            [(figure(row), row["title"]) for row in rows if row["is_exact"] and row["is_ours"] is is_ours]
            for is_ours in (True, False)
        )
        if not ours or not peers or any(value is None for value, _ in ours + peers):
            continue
        own, best = min(ours), min(peers)
        said = behind(own[0], [(best[1], best[0])]) or ("level" if own[0] >= best[0] * (1 - LEVEL) else "ahead")
        table.append((what, _value(what, own), _value(what, best), said))
    return table


def _value(what: str, figure: tuple[float, str]) -> str:
    value, title = figure
    units = {
        "CPU": f"{value:.2f} x DDP",
        "wire": f"{value / 1e6:.1f} MB",
        "peak": f"{value / 2**20:.0f} MiB",
        "first step": f"{value:.2f} s of CPU",
    }
    return f"{units[what]} ({title})"
