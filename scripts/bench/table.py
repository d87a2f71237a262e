"""The tables a comparison prints."""

from __future__ import annotations

from bounds import Bound, broken_bounds
from rich.table import Table
from summary import EngineSummary, Ratio


def comparison_table(summaries: list[EngineSummary], bounds: dict[str, Bound], title: str) -> Table:
    """One row an engine, each figure beside its ratio to the baseline."""
    table = Table(title=title, title_justify="left")
    table.add_column("engine")
    for heading in ("CPU ms", "x DDP", "wall ms", "x DDP", "waits ms", "sent MB", "x DDP", "peak MiB", "x DDP"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("last loss", justify="right")
    table.add_column("losses")
    table.add_column("bounds (CPU, wire, peak)")
    for summary in summaries:
        table.add_row(
            summary.name,
            f"{summary.cpu_ms:.0f}",
            _ratio_text(summary.cpu_ratio),
            f"{summary.wall_ms:.0f}",
            _ratio_text(summary.wall_ratio),
            "" if summary.waited_ms is None else f"{summary.waited_ms:.0f}",
            f"{summary.sent_bytes / 1e6:.2f}",
            f"{summary.sent_ratio.median:.3f}",
            "" if summary.peak_bytes is None else f"{summary.peak_bytes / 2**20:.0f}",
            "" if summary.peak_ratio is None else f"{summary.peak_ratio:.2f}",
            f"{summary.last_loss:.6f}",
            "bitwise DDP's" if summary.loss_difference == 0.0 else f"differs by {summary.loss_difference:.3g}",
            _bound_text(summary, bounds[summary.name]) if summary.name in bounds else "",
        )
    return table


def hosts_table(summaries: list[EngineSummary], title: str) -> Table:
    """Wall time between two hosts, and the bytes one of them sent to the other."""
    table = Table(title=title, title_justify="left")
    table.add_column("engine")
    for heading in ("wall ms a step", "x DDP", "waits ms", "sent MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            summary.name,
            f"{summary.wall_ms:.0f}",
            _ratio_text(summary.wall_ratio),
            "" if summary.waited_ms is None else f"{summary.waited_ms:.0f}",
            f"{summary.sent_bytes / 1e6:.1f}",
        )
    return table


def _ratio_text(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.lowest:.2f}-{ratio.highest:.2f})"


def _bound_text(summary: EngineSummary, bound: Bound) -> str:
    limits = f"{bound.cpu_ratio:.2f}, {bound.sent_ratio:.2f}, {bound.peak_ratio:.2f}"
    broken = broken_bounds(summary, bound)
    return f"{limits}: not met, {'; '.join(broken)}" if broken else f"{limits}: met"
