"""Draws matplotlib pictures as PNG files, readable on white and on dark pages."""

import io
from pathlib import Path
from typing import Any

from ..checkpoint.files import replace_file

INK = "#767c85"
"""Color of text and lines other than data: its contrast is above 4 on white and on #0d1117."""


def new_axes(width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure without a background, and its only axes.

    Args:
        width, height: inches.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib refuses MPLBACKEND.
    """
    # Not pyplot, which keeps figures and a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.tick_params(colors=INK)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(INK)
    axes.spines[:].set_edgecolor(INK)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def add_legend(axes: Any) -> None:
    """Adds a legend to the right of the axes, so no data is covered."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, labelcolor=INK)


def write_png(figure: Any, path: Path, dpi: int) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format="png", metadata={"Software": None})
    replace_file(path, picture.getvalue())
