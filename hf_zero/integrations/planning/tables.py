"""A plan as a table and as lines."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ...plan.forecast import KINDS
from ...plan.room import FITS, gb, size
from .planner import Plan

_SHOWN = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer state": "optimizer",
    "masters": "masters",
    "gradient buffers": "buffers",
    "gathered": "gathered",
    "activations": "activations",
}


def header(plan: Plan) -> Iterator[str]:
    """What was planned, in lines."""
    request = plan.request
    where = f"{request.nodes} x {request.gpus}" if request.nodes > 1 else f"{request.gpus}"
    kind = "ranks on the CPU" if request.on_cpu else "accelerators"
    trained = "" if plan.trained == plan.parameters else f", {plan.trained:,} of them trained"
    yield f"{plan.model}: {plan.parameters:,} parameters{trained}; {where} {kind} with {size(plan.room.device)} each"
    if request.is_split:
        sizes = {
            f"layers over {request.tp_size} (tp_size)": request.tp_size,
            f"experts over {request.ep_size} (ep_size)": request.ep_size,
        }
        split = " and ".join(words for words, size in sizes.items() if size > 1)
        yield f"split over ranks, {split}: {plan.held:,} parameters a rank, sharded over the ranks that have the same"
    if plan.activations is not None:
        traced = plan.activations
        yield (
            f"a micro-batch of {traced.shape} a rank, {request.accumulation} a step: {traced.flops / 1e12:.3g} TFLOP, and "
            f"{size(traced.saved_bytes)} saved for backward"
        )
    yield from plan.warnings


_LAST_LEFT_OUT = ("save", "load", "other", "MFU", "waits", "disk", "host")
"""Columns that a narrow terminal does without, after those of kinds of memory; in this order."""


_LEAST_LAST = 15
"""Characters of the last column, which may be wrapped."""


def table_of(plan: Plan, console: Console) -> Table:
    """A row a set-up: GB a rank by kind, the host's, the disk's, and the time of a step.

    Columns for which the console has no room are left out, and named below the table.
    """
    out: list[str] = []
    table = _table(plan, out)
    kinds = [str(column.header) for column in table.columns if str(column.header) in _SHOWN.values()]
    for heading in (*reversed(kinds), *_LAST_LEFT_OUT):
        if _least_width(table) <= console.width:
            break
        out.append(heading)
        table = _table(plan, out)
    return table


def _least_width(table: Table) -> int:
    """Characters of a line in which only the last column is wrapped."""
    widths = [max(map(len, (str(column.header), *map(str, column.cells)))) for column in table.columns]
    return sum(widths[:-1]) + min(widths[-1], _LEAST_LAST) + 3 * len(widths) + 1


def _table(plan: Plan, left_out: Sequence[str]) -> Table:
    held = [kind for kind in KINDS if kind in _SHOWN and any(c.forecast.device.get(kind) for c in plan.candidates)]
    headings = ("set-up", *(_SHOWN[kind] for kind in held), "other", "in all", "host", "disk", "save", "load")
    headings += ("step", "waits", "MFU", "fits")
    shown = [index for index, heading in enumerate(headings) if heading not in left_out]
    table = Table(title="GB a rank, at most", title_justify="left")
    if left_out:
        table.caption = f"left out: {', '.join(left_out)} (a wider terminal has room, --json has them)"
        table.caption_justify = "left"
    for index in shown:
        heading = headings[index]
        is_text = heading in ("set-up", "fits")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading != "fits")
    for each in plan.candidates:
        device = each.forecast.device
        other = each.forecast.device_bytes - sum(device.get(kind, 0) for kind in held)
        step, fit = each.step, plan.room.fit_of(each.forecast)
        times = ("", "", "") if step is None else (_time(step.step_s), _time(step.exposed_s), f"{step.mfu:.0%}")
        chosen = plan.choice.candidate is each
        cells = (
            each.name,
            *(_gb(device.get(kind, 0)) for kind in held),
            _gb(other),
            _gb(each.forecast.device_bytes),
            *(_gb(n) for n in (each.forecast.host_bytes, each.forecast.disk_bytes)),
            *(_gb(n) for n in (each.forecast.save_bytes, each.forecast.load_bytes)),
            *times,
            ("take this, " if chosen else "") + (FITS if fit == FITS else plan.room.describe(each.forecast)),
        )
        style = "bold" if chosen else "" if fit == FITS else "dim"
        table.add_row(*(cells[index] for index in shown), style=style)
    return table


def _gb(nbytes: int) -> str:
    return gb(nbytes) if nbytes else ""


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
