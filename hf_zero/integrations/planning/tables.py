"""A plan as a table and as lines."""

from collections.abc import Iterator

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


def table_of(plan: Plan) -> Table:
    """A row a set-up: GB a rank by kind, the host's, the disk's, and the time of a step."""
    held = [kind for kind in KINDS if kind in _SHOWN and any(c.forecast.device.get(kind) for c in plan.candidates)]
    table = Table(title="GB a rank, at most", title_justify="left")
    table.add_column("set-up", no_wrap=True)
    for kind in held:
        table.add_column(_SHOWN[kind], justify="right", no_wrap=True)
    for heading in ("other", "in all", "host", "disk", "save", "load"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("waits", justify="right", no_wrap=True)
    table.add_column("MFU", justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for each in plan.candidates:
        device = each.forecast.device
        other = each.forecast.device_bytes - sum(device.get(kind, 0) for kind in held)
        step, fit = each.step, plan.room.fit_of(each.forecast)
        times = ("", "", "") if step is None else (_time(step.step_s), _time(step.exposed_s), f"{step.mfu:.0%}")
        chosen = plan.choice.candidate is each
        table.add_row(
            each.name,
            *(_gb(device.get(kind, 0)) for kind in held),
            _gb(other),
            _gb(each.forecast.device_bytes),
            *(_gb(n) for n in (each.forecast.host_bytes, each.forecast.disk_bytes)),
            *(_gb(n) for n in (each.forecast.save_bytes, each.forecast.load_bytes)),
            *times,
            ("take this, " if chosen else "") + (FITS if fit == FITS else plan.room.describe(each.forecast)),
            style="bold" if chosen else "" if fit == FITS else "dim",
        )
    return table


def _gb(nbytes: int) -> str:
    return gb(nbytes) if nbytes else ""


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
