"""A plan as a picture: a stacked bar of a rank's memory for each set-up."""

from importlib.util import find_spec
from pathlib import Path

from ...plan.errors import PlanError
from ...plan.forecast import KINDS
from .planner import Plan

_COLOURS = {
    "parameters": "#4477aa",
    "frozen": "#99bbdd",
    "gradients": "#ee6677",
    "masters": "#228833",
    "optimizer state": "#66bb66",
    "residuals": "#bbcc33",
    "copies": "#aaaa00",
    "gradient buffers": "#eeaabb",
    "gathered": "#aa3377",
    "activations": "#ccbb44",
    "step": "#777777",
    "runtime": "#bbbbbb",
}


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture as a PNG.

    Raises:
        PlanError: there is no matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise PlanError("hf_zero: a picture needs matplotlib: pip install 'hf-zero[card]'.")
    # Without pyplot, which keeps figures and a backend for the whole process.
    from matplotlib.figure import Figure

    rows = list(plan.candidates)[::-1]
    figure = Figure(figsize=(10, 1.6 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    for kind in KINDS:
        held = [each.forecast.device.get(kind, 0) / 1e9 for each in rows]
        if any(held):
            axes.barh(range(len(rows)), held, left=left, color=_COLOURS[kind], label=kind, height=0.7)
            left = [before + more for before, more in zip(left, held)]
    axes.axvline(plan.room.device / 1e9, color="black", linestyle="--", linewidth=1, label="a rank's memory")
    chosen = plan.choice.candidate
    axes.set_yticks(range(len(rows)), [f"{'> ' if each is chosen else ''}{each.name}" for each in rows])
    for label, each in zip(axes.get_yticklabels(), rows):
        label.set_fontweight("bold" if each is chosen else "normal")
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize=8)
    axes.set_xlabel("GB a rank, at most")
    axes.set_title(f"{plan.model}, {plan.request.world_size} ranks", loc="left")
    axes.set_xlim(0, 1.08 * max([*left, plan.room.device / 1e9]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, format="png", metadata={"Software": None})
