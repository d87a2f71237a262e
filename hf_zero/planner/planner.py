"""`make_plan`: tries settings, and shows them as tables and a chart."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch import nn

from ..buckets.precision import resolve_casts
from ..config import AUTO, ConfigError
from ..forecast.fit import FITS, PlanError, Room, gb, size
from ..forecast.peak import DDP, KINDS, Activations
from ..integrations.drawing import INK, add_legend, new_axes, write_png
from .fewer_bits import fewer_bits
from .layouts import Job, Layout, ddp_step_time, step_time
from .request import (
    PlanRequest,
    SetUp,
    batch_of,
    checkpointing_argument,
    checkpointing_method,
    is_checkpointed,
    longest,
    model_without_memory,
    optimizer_like_trainers,
    set_ups,
    split_without_memory,
)
from .search import Candidate, Choice, Machine, StepTime, choose
from .trace import Batch, reserve_on, trace

# ---- `make_plan`: every set-up of a model on a machine, what each needs, and the one to take ----

_LONGEST = 2048
FILES_FOLDER = "/path/to/a/local/disk"
"""`offload.nvme_path` of a plan: which folder it is, the machine knows."""

_LEFT_OUT = (
    "the model is split over ranks (tp_size, ep_size): state is that of a rank's part over those with the same; activations, "
    "step times and what the ranks of a copy send each other are left out"
)

AS_GIVEN = "as given"
"""The shape of a micro-batch that a caller has given."""

_AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planner's findings.

    Attributes:
        model: its name, in words; `parameters` and `trained` are its elements.
        held: elements of the part that a rank's copy has, where tensor parallelism splits the model; else all.
        activations: of a micro-batch; None where they could not be traced, and then `warnings` says why.
        candidates: the set-ups, the simplest first.
        choice: the recommended one, with reasons.
    """

    model: str
    parameters: int
    trained: int
    held: int
    request: PlanRequest
    room: Room
    activations: Activations | None
    candidates: tuple[Candidate, ...]
    choice: Choice
    warnings: tuple[str, ...] = ()

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """Returns the recommended set-up's settings; None if nothing fits, {} if DDP does."""
        chosen = self.choice.candidate
        return None if chosen is None else chosen.forecast.settings

    def yaml(self) -> str:
        """The recommended set-up as a config file. Raises `PlanError` where nothing fits."""
        if self.settings is None:
            raise PlanError(" ".join(self.choice.why))
        settings = dict(self.settings) or {"stage": 0}
        why = "".join(f"# {line}\n" for line in self.choice.why)
        axis = f", sequences over {self.request.sp_size}: hf-zero run --sp {self.request.sp_size}"
        ranks = f"{self.request.world_size} ranks{axis * (self.request.sp_size > 1)}"
        return f"# {self.model}: {ranks}\n{why}{yaml.safe_dump(settings, sort_keys=False)}"

    def to_dict(self) -> dict[str, Any]:
        request = {name: getattr(self.request, name) for name in self.request.__dataclass_fields__}
        chosen, traced = self.choice.candidate, self.activations
        return {
            "model": self.model,
            "parameters": self.parameters,
            "trained": self.trained,
            "held": self.held,
            "request": request,
            "activations": None
            if traced is None
            else {
                "shape": traced.shape,
                "peak_bytes": traced.peak_bytes,
                "saved_bytes": traced.saved_bytes,
                "logits_bytes": traced.peak_beside(0).logits,
                "flops": traced.flops,
            },
            "set_ups": [
                {
                    **each.forecast.to_dict(),
                    "class": self.room.fit_of(each.forecast),
                    "fit": self.room.describe(each.forecast),
                    "step": _step(each),
                }
                for each in self.candidates
            ],
            "recommended": None if chosen is None else chosen.name,
            "settings": self.settings,
            "why": list(self.choice.why),
            "warnings": list(self.warnings),
        }


def _step(candidate: Candidate) -> dict[str, float] | None:
    return None if candidate.step is None else dict(vars(candidate.step))


def make_plan(
    model: str | Path | nn.Module,
    *,
    batch: int | Batch = 1,
    kept: Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Plan:
    """Forecasts memory and step time of each stage and offload setting, and recommends one. Needs no weights or accelerator.

    Args:
        model: a Hub name, a folder, a config.json, or a model, with or without memory.
        batch: rows of a micro-batch; or the keyword arguments of a forward, for models whose inputs are not known here.
        kept: settings of the config that stay as they are.
        optimizer: over the model's parameters; by default AdamW as Trainer makes it.
        options: see `PlanRequest`.

    Raises:
        PlanError, ConfigError: what cannot be planned, or contradicts itself.
    """
    request = _request_of(batch, options)
    settings = dict(kept or {})
    if request.offload_activations:
        settings["offload"] = {**(settings.get("offload") or {}), "activations": "cpu"}
    made = model if isinstance(model, nn.Module) else _model_of(model, request)
    if optimizer is not None and isinstance(model, str | Path):
        raise PlanError("hf_zero: an optimizer goes with a model, not with a model's name.")
    numels = _numels(made)
    wanted = set_ups(
        settings,
        world_size=request.data_ranks,
        on_host=request.on_cpu,
        nvme_path=FILES_FOLDER if request.disk else None,
    )
    experts: frozenset[nn.Parameter] = frozenset()
    if request.is_split:
        experts = _split(made, model, request)
        activations, warnings = None, [_LEFT_OUT]
    else:
        # One that is kept is the same in each set-up.
        param_dtype = wanted[0].config.param_dtype if wanted else AUTO
        traced = partial(_traced, made, batch if isinstance(batch, Mapping) else None, request, param_dtype)
        activations, warnings = traced()
    job = Job(
        model=made,
        optimizers=[optimizer or optimizer_like_trainers(made)],
        device=torch.device("cpu" if request.on_cpu else "cuda"),
        world_size=request.data_ranks,
        ranks_a_node=request.gpus // request.tp_size,
        activations=activations,
        accumulates=request.accumulation > 1,
        experts=experts,
        expert_ranks=request.world_size // request.ep_size,
    )
    room = _room_of(request, job.device)
    found, faults = candidates_of(job, wanted, request.machine, request.accumulation, request.mixed_precision)
    # DDP has no ranks that compute a sequence together.
    if not kept and request.sp_size == 1:
        found = [_ddp(job, request), *found]
    if not found:
        raise PlanError(
            f"hf_zero: no set-up suits this model: {faults[0] if faults else 'none goes with what is kept'}"
        )
    choice = choose(found, room)
    if activations is not None and not _fits(choice, room):
        helps = parts_that_help(
            job,
            wanted,
            request.machine,
            request.accumulation,
            request.mixed_precision,
            room,
            lambda: traced(recomputes=True)[0],
        )
        choice = replace(choice, why=(*choice.why, *helps))
    choice = replace(choice, why=(*choice.why, *_advice_on_links(job, choice, request)))
    return Plan(
        model=str(model) if isinstance(model, str | Path) else type(model).__name__,
        parameters=numels[0],
        trained=numels[1],
        held=_numels(made)[0],
        request=request,
        room=room,
        activations=activations,
        candidates=tuple(found),
        choice=choice,
        warnings=(*warnings, *faults),
    )


def _advice_on_links(job: Job, choice: Choice, request: PlanRequest) -> list[str]:
    """Says in a line whether the recommended set-up should send fewer bits; [] if its step time is not known."""
    chosen, activations = choice.candidate, job.activations
    if chosen is None or chosen.step is None or activations is None or request.data_ranks == 1:
        return []

    @cache
    def laid_out(written: str) -> Layout:
        config = SetUp(name="", settings=yaml.safe_load(written)).config
        return job.layout(resolve_casts(config, request.mixed_precision))

    def timed(settings: Mapping[str, Any], machine: Machine) -> StepTime:
        return step_time(laid_out(yaml.safe_dump(dict(settings))), machine, activations, request.accumulation)

    line = fewer_bits(chosen.forecast.settings, request.machine, timed)
    return [line] if line else []


def _split(made: nn.Module, model: str | Path | nn.Module, request: PlanRequest) -> frozenset[nn.Parameter]:
    """Leaves one rank's part of a model that was made of the name or folder `model`; returns experts that fewer ranks share."""
    if isinstance(model, nn.Module):
        raise PlanError(
            "hf_zero: tp_size and ep_size go with a model's name, a folder or a config.json, not with a model."
        )
    experts = split_without_memory(made, request.tp_size, request.ep_size)
    return experts if request.ep_size > request.tp_size else frozenset()


def _room_of(request: PlanRequest, device: torch.device) -> Room:
    return Room(
        device=request.bytes_of("gpu_memory") or 0,
        host=request.bytes_of("host_memory") or 0,
        disk=request.bytes_of("disk") or 0,
        reserve=reserve_on(device),
    )


def _request_of(batch: int | Batch, options: Mapping[str, Any]) -> PlanRequest:
    unknown = set(options) - set(PlanRequest.__dataclass_fields__)
    if unknown:
        known = ", ".join(PlanRequest.__dataclass_fields__)
        raise PlanError(f"hf_zero: make_plan has no option {sorted(unknown)[0]!r}; it has: {known}.")
    return PlanRequest(**options) if isinstance(batch, Mapping) else PlanRequest(batch=batch, **options)


def _numels(model: nn.Module) -> tuple[int, int]:
    """Elements of a model's parameters, and those of the trained ones."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return sum(p.numel() for p in model.parameters()), trained


def candidates_of(
    job: Job, wanted: list[SetUp], machine: Machine, micro_batches: int, mixed_precision: str
) -> tuple[list[Candidate], list[str]]:
    """Returns the set-ups with their needs, and the reasons against the others."""
    found, faults = [], []
    for each in wanted:
        try:
            config = resolve_casts(each.config, mixed_precision)
            layout = job.layout(config)
            forecast = job.forecast_of(each.name, each.settings, layout)
        except (ConfigError, ValueError) as error:
            faults.append(f"{each.name}: {str(error).removeprefix('hf_zero: ')}")
            continue
        step = None if job.activations is None else step_time(layout, machine, job.activations, micro_batches)
        found.append(Candidate(forecast=forecast, step=step))
    return found, faults


def _ddp(job: Job, request: PlanRequest) -> Candidate:
    forecast = job.forecast_ddp()
    if job.activations is None:
        return Candidate(forecast=forecast)
    layout = job.layout(SetUp(name="", settings={"stage": 0}).config)
    step = ddp_step_time(layout, request.machine, job.activations, request.accumulation)
    return Candidate(forecast=forecast, step=step)


# ---- Parts of others' packages that need less memory beside the state, and the first of them with which something fits ----


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part that a run may switch on. `line`: what to write."""

    words: str
    line: str


_IN_CHUNKS = _Part(
    words="the loss in chunks",
    line='SFTConfig(loss_type="chunked_nll") with TRL, or on a GPU TrainingArguments(use_liger_kernel=True)',
)
_RECOMPUTED = _Part(words="activation checkpointing", line=f"TrainingArguments({checkpointing_argument()}=True)")
_IN_HOST_MEMORY = _Part(words="activations in host memory", line="--zero ...,offload.activations=cpu")

_TRIED = (
    (_IN_CHUNKS,),
    (_RECOMPUTED,),
    (_IN_CHUNKS, _RECOMPUTED),
    (_IN_HOST_MEMORY,),
    (_IN_CHUNKS, _IN_HOST_MEMORY),
    (_IN_CHUNKS, _RECOMPUTED, _IN_HOST_MEMORY),
)
"""The cheapest first: chunks cost next to nothing, checkpoints a forward, and host memory its link."""


def parts_that_help(
    job: Job,
    wanted: Sequence[SetUp],
    machine: Machine,
    micro_batches: int,
    mixed_precision: str,
    room: Room,
    recomputed: Callable[[], Activations | None],
) -> list[str]:
    """Names the first parts with which one of the set-ups fits, in a line; [] where none would.

    Args:
        job: with its activations.
        recomputed: traces activations with checkpointing; None where the model does not support that.
    """
    plain = job.activations
    is_on = {
        _IN_CHUNKS: plain is None or not plain.has_logits,
        _RECOMPUTED: checkpointing_method(job.model) is None or is_checkpointed(job.model),
        _IN_HOST_MEMORY: job.on_host or any(each.config.offload.activations == "cpu" for each in wanted),
    }
    with_checkpoints: list[Activations | None] = []
    for parts in _TRIED:
        if any(is_on[part] for part in parts):
            continue
        activations = plain
        if _RECOMPUTED in parts:
            with_checkpoints = with_checkpoints or [recomputed()]
            activations = with_checkpoints[0]
        if activations is None:
            continue
        if _IN_CHUNKS in parts:
            activations = activations.in_chunks()
        tried = [_with_activations_on_host(each) for each in wanted] if _IN_HOST_MEMORY in parts else list(wanted)
        found, _ = candidates_of(replace(job, activations=activations), tried, machine, micro_batches, mixed_precision)
        choice = choose(found, room) if found else None
        if choice is not None and choice.candidate is not None and _fits(choice, room):
            words, lines = " and ".join(part.words for part in parts), "; ".join(part.line for part in parts)
            needed = size(choice.candidate.forecast.device_bytes)
            return [f"With {words}, {choice.candidate.name} fits: {needed} a rank. Write {lines}."]
    return []


def _fits(choice: Choice, room: Room) -> bool:
    return choice.candidate is not None and room.fit_of(choice.candidate.forecast) == FITS


def _with_activations_on_host(set_up: SetUp) -> SetUp:
    offload = {**(set_up.settings.get("offload") or {}), "activations": "cpu"}
    return replace(set_up, settings={**set_up.settings, "offload": offload})


def _model_of(name: str | Path, request: PlanRequest) -> nn.Module:
    return model_without_memory(
        name,
        dtype=getattr(torch, request.dtype),
        checkpointing=request.checkpointing,
        lora_rank=request.lora,
    )


def _traced(
    model: nn.Module, batch: Batch | None, request: PlanRequest, param_dtype: str, *, recomputes: bool = False
) -> tuple[Activations | None, list[str]]:
    most = longest(model)
    length = request.seq or min(_LONGEST, most or _LONGEST)
    if most is not None and length > most:
        raise PlanError(f"hf_zero: seq is {length}, and the model reads {most} at most.")
    rows, ranks = request.batch, request.sp_size
    try:
        traced = trace(
            model,
            batch if batch is not None else lambda: batch_of(model, rows, length),
            shape=AS_GIVEN if batch is not None else f"{rows} x {length}",
            tokens=rows * -(-length // ranks),
            autocast=_AUTOCAST[request.mixed_precision],
            param_dtype=param_dtype,
            recomputes=recomputes,
            on_host=request.on_cpu,
            sp_size=ranks,
        )
    except PlanError as error:
        return None, [str(error).removeprefix("hf_zero: ")]
    return traced.in_chunks() if request.chunked_loss else traced, []


# ---- A plan as a table and as lines ----

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
        verbose: adds the operations of a micro-batch and the bytes that it saves for backward.
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
        yield f"split over ranks, {split}: {plan.held:,} parameters a rank, sharded over the ranks that have the same"
    if plan.activations is not None:
        traced = plan.activations
        over, part = ("a rank", "") if request.sp_size == 1 else (f"over {request.sp_size} ranks", " on each rank")
        rows = request.batch * request.accumulation * request.world_size // request.sp_size
        rows_a_step = "" if traced.shape == AS_GIVEN else f": {rows:,} rows"
        yield f"a micro-batch of {traced.shape} {over}, {request.accumulation} a step{rows_a_step}"
        if verbose:
            saved, logits = size(traced.saved_bytes), traced.peak_beside(0).logits
            yield f"a micro-batch computes {traced.flops / 1e12:.3g} TFLOP{part} and saves {saved} for backward"
            if logits:
                yield f"logits, with what the loss makes of them, take {size(logits)}"
    yield from plan.warnings


_VERBOSE = (*_SHOWN.values(), "other", "save", "load", "waits", "MFU")
"""Columns that a table has only if details are asked for."""

_LAST_LEFT_OUT = ("save", "load", "other", "MFU", "waits", "disk", "host", "saved")
"""Columns that a narrow terminal has no room for, after those of kinds of memory; in this order."""

_LAST_KINDS = ("logits", "activations")
"""Kinds that a narrow terminal leaves out after the others."""

_LEAST_LAST = 15
"""Characters of the last column, which may be wrapped if details are asked for."""


def table_of(plan: Plan, console: Console, *, verbose: bool = False) -> Table:
    """Makes a table with a line for each set-up: what it saves, the GB that a rank needs, the time of a step.

    Columns for which the console has no room are left out, and named below the table.

    Args:
        verbose: adds the GB by kind, those of saves and loads, waits and MFU, and says by how much a set-up fits.
    """
    out: list[str] = []
    table = _table(plan, out, verbose=verbose)
    kinds = [str(column.header) for column in table.columns if str(column.header) in _SHOWN.values()]
    kinds.sort(key=lambda heading: heading not in _LAST_KINDS)
    headings = {str(column.header) for column in table.columns}
    for heading in (*reversed(kinds), *(each for each in _LAST_LEFT_OUT if each in headings)):
        if _least_width(table, verbose=verbose) <= console.width:
            break
        out.append(heading)
        table = _table(plan, out, verbose=verbose)
    return table


def _least_width(table: Table, *, verbose: bool) -> int:
    """Returns the characters of a line in which no column is wrapped, or only the last one if details are asked for."""
    widths = [max(map(len, (str(column.header), *map(str, column.cells)))) for column in table.columns]
    last = min(widths[-1], _LEAST_LAST) if verbose else widths[-1]
    return sum(widths[:-1]) + last + 3 * len(widths) + 1


def _table(plan: Plan, left_out: Sequence[str], *, verbose: bool) -> Table:
    cells = [_cells(plan, each, verbose=verbose) for each in plan.candidates]
    # A column without a value says nothing.
    used = {heading for row in cells for heading, cell in row.items() if cell}
    headings = [heading for heading in cells[0] if heading in used - set(left_out)]
    if not verbose:
        headings = [heading for heading in headings if heading not in _VERBOSE]
    table = Table(title="GB a rank, at most", title_justify="left", caption_justify="left")
    if left_out:
        table.caption = f"left out: {', '.join(left_out)} (a wider terminal has room, --json has them)"
    elif not verbose:
        table.caption = "--verbose shows the GB by kind, and what a step waits for."
    for heading in headings:
        is_text = heading in ("set-up", "fits")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading != "fits" or not verbose)
    for each, row in zip(plan.candidates, cells):
        is_chosen, fits = plan.choice.candidate is each, plan.room.fit_of(each.forecast) == FITS
        table.add_row(*(row[heading] for heading in headings), style="bold" if is_chosen else "" if fits else "dim")
    return table


def _cells(plan: Plan, each: Candidate, *, verbose: bool) -> dict[str, str]:
    """Maps the headings to a set-up's cells, those first that decide."""
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
        "step": "" if step is None else _time(step.step_s),
        "waits": "" if step is None else _time(step.exposed_s),
        "MFU": "" if step is None else f"{step.mfu:.0%}",
        "fits": fit,
    }


def _gb(nbytes: int) -> str:
    return gb(nbytes) if nbytes else ""


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


# ---- A plan as a picture: a stacked bar of a rank's memory for each set-up ----

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
    "logits": "#ee9933",
    "step": "#777777",
    "runtime": "#bbbbbb",
}


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture as a PNG. Raises `PlanError`: there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise PlanError("hf_zero: a picture needs matplotlib: pip install matplotlib.")
    rows = list(plan.candidates)[::-1]
    try:
        figure, axes = new_axes(10, 1.6 + 0.42 * len(rows))
    except ValueError as error:
        why = str(error).partition(";")[0]
        raise PlanError(
            f"hf_zero: no picture, since matplotlib refuses MPLBACKEND ({why}). Unset MPLBACKEND."
        ) from error
    left = [0.0] * len(rows)
    for kind in KINDS:
        held = [each.forecast.device.get(kind, 0) / 1e9 for each in rows]
        if any(held):
            axes.barh(range(len(rows)), held, left=left, color=_COLOURS[kind], label=kind, height=0.7)
            left = [before + more for before, more in zip(left, held)]
    axes.axvline(plan.room.device / 1e9, color=INK, linestyle="--", linewidth=1, label="a rank's memory")
    chosen = plan.choice.candidate
    axes.set_yticks(range(len(rows)), [f"{'> ' if each is chosen else ''}{each.name}" for each in rows])
    for label, each in zip(axes.get_yticklabels(), rows):
        label.set_fontweight("bold" if each is chosen else "normal")
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.3g}", va="center", fontsize=8, color=INK)
    axes.set_xlabel("GB a rank, at most")
    axes.set_title(f"{plan.model}, {plan.request.world_size} ranks", loc="left", color=INK)
    axes.set_xlim(0, 1.08 * max([*left, plan.room.device / 1e9]))
    add_legend(axes)
    write_png(figure, path, dpi=130)
