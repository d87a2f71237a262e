"""Pictures of a file of figures: one PNG a curve, one of a step's engines, one of links."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
MIB = 2**20
DOTS_AN_INCH = 110
OURS, PEERS = (
    ("#0b6e4f", "#2aa876", "#7fd1ae", "#14b8c4", "#075f7a", "#9bc53d", "#3a5a40"),
    ("#8a8a8a", "#d1495b", "#edae49", "#6f4a8e"),
)

PANELS: dict[str, Callable[[Record], float | None]] = {
    "CPU a step / DDP": lambda row: row["cpu_ratio"]["median"] if "cpu_ratio" in row else None,
    "MB that a rank sends a step": lambda row: row["sent_bytes"] / 1e6,
    "peak MiB of a rank": lambda row: row["peak_bytes"] / MIB if row["peak_bytes"] is not None else None,
}
"""A panel's heading -> its figure of an engine's row."""


def plot(record: Record, folder: Path, name: str) -> list[Path]:
    """Draws what there is to draw of a file of figures; returns the pictures, whose names begin with this one."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"steps": _plot_steps, "curves": _plot_curves, "links": _plot_links}
    return list(kinds[record["kind"]](record, folder / name)) if record["kind"] in kinds else []


def _plot_steps(record: Record, path: Path) -> Iterable[Path]:
    rows = record["engines"]
    figure, axes = _panels(len(PANELS), figsize=(13, 1.2 + 0.3 * len(rows)), sharey=True)
    for panel, (heading, value) in zip(axes, PANELS.items()):
        panel.barh(
            [row["title"] for row in rows],
            [value(row) or 0 for row in rows],
            color=[OURS[1] if row["is_ours"] else PEERS[0] for row in rows],
        )
        panel.set_title(heading, fontsize=10)
        panel.tick_params(labelsize=8)
    axes[0].invert_yaxis()
    yield _saved(figure, record, path.with_name(f"{path.name}.png"))


def _plot_curves(record: Record, path: Path) -> Iterable[Path]:
    for name, curve in record["curves"].items():
        panels = [(heading, lines) for heading, value in PANELS.items() if (lines := _lines_of(curve["points"], value))]
        figure, axes = _panels(len(panels), figsize=(4.4 * len(panels), 3.6))
        for panel, (heading, lines) in zip(axes, panels):
            _draw(panel, lines)
            panel.set_title(heading, fontsize=10)
            panel.set_xlabel(curve["varied"])
            panel.set_ylim(bottom=0)
        axes[0].legend(fontsize=8)
        yield _saved(figure, record, path.with_name(f"{path.name}-{name}.png"))


def _lines_of(points: list[Record], value: Callable[[Record], float | None]) -> dict[str, list[tuple[float, float]]]:
    """Engine -> (what was varied, figure), where it was measured."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for row in point["engines"]:
            if (found := value(row)) is not None:
                lines.setdefault(row["title"], []).append((point["value"], found))
    return lines


def _plot_links(record: Record, path: Path) -> Iterable[Path]:
    """Steps over the link's rate, measured and forecast, one panel a delay."""
    delays = sorted({run["delay_ms"] for run in record["runs"]})
    figure, axes = _panels(len(delays), figsize=(5 * len(delays), 4))
    for panel, delay in zip(axes, delays):
        measured: dict[str, list[tuple[float, float]]] = {}
        forecast: dict[str, list[tuple[float, float]]] = {}
        for run in sorted((run for run in record["runs"] if run["delay_ms"] == delay), key=lambda run: run["mbit"]):
            label = f"{run['title']}, {run['model']}"
            measured.setdefault(label, []).append((run["mbit"], run["step_ms"]))
            if run["simulated_ms"] is not None:
                forecast.setdefault(label, []).append((run["mbit"], run["simulated_ms"]))
        _draw(panel, measured, forecast)
        panel.set(xscale="log", yscale="log", xlabel="Mbit/s", ylabel="ms a step")
        panel.set_title(f"delay {delay:g} ms; dashed: the planner's forecast", fontsize=10)
        panel.legend(fontsize=7)
    yield _saved(figure, record, path.with_name(f"{path.name}.png"))


def _panels(count: int, **settings: Any) -> tuple[Any, Any]:
    """A figure and its axes, side by side."""
    # Imported here: most of what imports this module draws nothing, and the import takes more than a second.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, squeeze=False, **settings)
    return figure, axes[0]


def _draw(
    panel: Axes,
    lines: dict[str, list[tuple[float, float]]],
    dashed: dict[str, list[tuple[float, float]]] | None = None,
) -> None:
    colours = {True: iter(OURS * 3), False: iter(PEERS * 3)}
    for title, points in lines.items():
        colour = next(colours[title.startswith("hf_zero")])
        panel.plot(*zip(*points), marker="o", markersize=4, color=colour, label=title)
        if dashed and title in dashed:
            panel.plot(*zip(*dashed[title]), linestyle="--", linewidth=1, color=colour)
    panel.grid(alpha=0.25)
    panel.tick_params(labelsize=8)


def _saved(figure: Any, record: Record, path: Path) -> Path:
    from matplotlib import pyplot

    said = f"{record['cpu_model']}, torch {record['torch']}, commit {record['commit']}, {record['date'][:10]}"
    figure.text(0.995, 0.005, said, ha="right", va="bottom", fontsize=6, color="#777777")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    # Without the date of drawing and the version of what drew it, the same figures are the same file.
    figure.savefig(path, dpi=DOTS_AN_INCH, metadata={"Software": None})
    pyplot.close(figure)
    return path
