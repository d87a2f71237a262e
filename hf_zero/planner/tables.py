"""A plan as a table and as lines."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ..device import rounded
from ..forecast.fit import FITS, gb, size
from ..forecast.peak import DDP, KINDS
from .planner import AS_GIVEN, Plan
from .search import Candidate, duration

_SHOWN = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer state": "optimizer",
    "masters": "masters",
    "gradient buffers": "buffers",
    "gathered": "gathered",
    "activations": "activations",
    "logits": "logits",
}


def header(plan: Plan, *, verbose: bool = False) -> Iterator[str]:
    """Describes the plan's request, in lines.

    Args:
        verbose: adds the operations of a micro-batch, and the bytes saved for backward.
    """
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
        yield f"split over ranks, {split}: {plan.held:,} parameters a rank, sharded over the ranks with the same part"
    if plan.activations is not None:
        traced = plan.activations
        over, part = ("a rank", "") if request.sp_size == 1 else (f"over {request.sp_size} ranks", " on each rank")
        rows = request.batch * request.accumulation * request.world_size // request.sp_size
        rows_a_step = "" if traced.shape == AS_GIVEN else f": {rows:,} rows"
        yield f"a micro-batch of {traced.shape} {over}, {request.accumulation} a step{rows_a_step}"
        if verbose:
            saved, logits = size(traced.saved_bytes), traced.peak_with(0).logits
            yield f"a micro-batch computes {rounded(traced.flops / 1e12)} TFLOP{part} and saves {saved} for backward"
            if logits:
                yield f"logits, with what the loss makes of them, take {size(logits)}"
    yield from plan.warnings


_VERBOSE = (*_SHOWN.values(), "other", "save", "load", "waits", "MFU")
"""Columns that are only shown with details."""

_FIRST_LEFT_OUT = ("load", "save", "MFU", "waits", "other")
_LAST_LEFT_OUT = ("disk", "host", "saved")
"""Columns omitted on a narrow terminal before and after the kinds of memory, in this order."""

_LAST_KINDS = ("logits", "activations")
"""Kinds of memory omitted on a narrow terminal after the other kinds."""

_LEAST_LAST = 15
"""Minimum width of the last column, which may be wrapped with details."""


def table_of(plan: Plan, console: Console, *, verbose: bool = False) -> Table:
    """Makes a table with a line for each set-up: the savings, the GB needed by a rank, and the time of a step.

    Columns too many for the console are left out, and named below the table.

    Args:
        verbose: adds the GB by kind, of saves and of loads, waits and MFU, and the margin of each set-up.
    """
    out: list[str] = []
    table = _table(plan, out, verbose=verbose)
    kinds = [str(column.header) for column in table.columns if str(column.header) in _SHOWN.values()]
    kinds.sort(key=lambda heading: heading not in _LAST_KINDS)
    headings = {str(column.header) for column in table.columns}
    for heading in (*_FIRST_LEFT_OUT, *reversed(kinds), *_LAST_LEFT_OUT):
        if heading not in headings:
            continue
        if _least_width(table, verbose=verbose) <= console.width:
            break
        out.append(heading)
        table = _table(plan, out, verbose=verbose)
    return table


def _least_width(table: Table, *, verbose: bool) -> int:
    """Returns the width of a line without wrapped columns; with details, the last column may be wrapped."""
    widths = [max(map(len, (str(column.header), *map(str, column.cells)))) for column in table.columns]
    last = min(widths[-1], _LEAST_LAST) if verbose else widths[-1]
    return sum(widths[:-1]) + last + 3 * len(widths) + 1


def _table(plan: Plan, left_out: Sequence[str], *, verbose: bool) -> Table:
    cells = [_cells(plan, each, verbose=verbose) for each in plan.candidates]
    # Leave out columns without any value.
    used = {heading for row in cells for heading, cell in row.items() if cell}
    headings = [heading for heading in cells[0] if heading in used - set(left_out)]
    if not verbose:
        headings = [heading for heading in headings if heading not in _VERBOSE]
    table = Table(title="GB a rank, at most", title_justify="left", caption_justify="left")
    if left_out:
        table.caption = f"columns left out: {', '.join(left_out)} (use a wider terminal or --json)"
    elif not verbose:
        table.caption = "--verbose shows the GB by kind, and a step's waits."
    for heading in headings:
        is_text = heading in ("set-up", "fits")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading != "fits" or not verbose)
    for each, row in zip(plan.candidates, cells):
        is_chosen, fits = plan.choice.candidate is each, plan.room.fit_of(each.forecast) == FITS
        table.add_row(*(row[heading] for heading in headings), style="bold" if is_chosen else "" if fits else "dim")
    return table


def _cells(plan: Plan, each: Candidate, *, verbose: bool) -> dict[str, str]:
    """Maps the headings to a set-up's cells, the decisive ones first."""
    forecast, step = each.forecast, each.step
    ddp = next((other.forecast.device_bytes for other in plan.candidates if other.name == DDP), None)
    saved = 0 if ddp is None else ddp - forecast.device_bytes
    fit = plan.room.fit_of(forecast)
    if verbose:
        fit = FITS if fit == FITS else plan.room.describe(forecast)
    if plan.choice.candidate is each:
        fit = f"take this, {fit}" if verbose or fit != FITS else "take this"
    kinds = {_SHOWN[kind]: forecast.device.get(kind, 0) for kind in KINDS if kind in _SHOWN}
    return {
        "set-up": each.name,
        "saved": _gb(saved) if saved >= 0 else f"-{_gb(-saved)}",
        "in all": _gb(forecast.device_bytes),
        **{heading: _gb(nbytes) for heading, nbytes in kinds.items()},
        "other": _gb(forecast.device_bytes - sum(kinds.values())),
        "host": _gb(forecast.host_bytes),
        "disk": _gb(forecast.disk_bytes),
        "save": _gb(forecast.save_bytes),
        "load": _gb(forecast.load_bytes),
        "step": "" if step is None else duration(step.step_s),
        "waits": "" if step is None else duration(step.exposed_s),
        "MFU": "" if step is None else f"{step.mfu:.0%}",
        "fits": fit,
    }


def _gb(nbytes: int) -> str:
    return gb(nbytes) if nbytes else ""
