"""A plan as a picture: a stacked bar of a rank's memory for each set-up."""

from importlib.util import find_spec
from pathlib import Path

from ..device import rounded
from ..forecast.fit import PlanError
from ..forecast.peak import KINDS
from ..integrations.drawing import INK, add_legend, new_axes, write_png
from .planner import Plan

_COLORS = {
    "parameters": "#4477aa",
    "frozen": "#99bbdd",
    "gradients": "#ee6677",
    "masters": "#228833",
    "optimizer state": "#66bb66",
    "residuals": "#bbcc33",
    "gradient buffers": "#eeaabb",
    "gathered": "#aa3377",
    "activations": "#ccbb44",
    "logits": "#ee9933",
    "step": "#777777",
    "runtime": "#bbbbbb",
}


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture as a PNG. Raises `PlanError` without matplotlib."""
    if find_spec("matplotlib") is None:
        raise PlanError("hf_zero: a picture needs matplotlib: pip install matplotlib.")
    rows = list(plan.candidates)[::-1]
    try:
        figure, axes = new_axes(10, 1.6 + 0.42 * len(rows))
    except ValueError as error:
        why = str(error).partition(";")[0]
        raise PlanError(
            f"hf_zero: the picture cannot be drawn: matplotlib refuses MPLBACKEND ({why}). Unset MPLBACKEND."
        ) from error
    left = [0.0] * len(rows)
    for kind in KINDS:
        held = [each.forecast.device.get(kind, 0) / 1e9 for each in rows]
        if any(held):
            axes.barh(range(len(rows)), held, left=left, color=_COLORS[kind], label=kind, height=0.7)
            left = [before + more for before, more in zip(left, held)]
    axes.axvline(plan.room.device / 1e9, color=INK, linestyle="--", linewidth=1, label="a rank's memory")
    chosen = plan.choice.candidate
    axes.set_yticks(range(len(rows)), [f"{'> ' if each is chosen else ''}{each.name}" for each in rows])
    for label, each in zip(axes.get_yticklabels(), rows):
        label.set_fontweight("bold" if each is chosen else "normal")
    for row, total in enumerate(left):
        axes.text(total, row, f" {rounded(total)}", va="center", fontsize=8, color=INK)
    axes.set_xlabel("GB a rank, at most")
    axes.set_title(f"{plan.model}, {plan.request.world_size} ranks", loc="left", color=INK)
    axes.set_xlim(0, 1.08 * max([*left, plan.room.device / 1e9]))
    add_legend(axes)
    write_png(figure, path, dpi=130)
