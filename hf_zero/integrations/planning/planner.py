"""`make_plan`: every set-up of a model on a machine, what each needs, and the one to take."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ...buckets.precision import resolve_casts
from ...config import AUTO, ConfigError
from ...plan.choose import Candidate, Choice, choose
from ...plan.errors import PlanError
from ...plan.forecast import Activations
from ...plan.machine import Machine
from ...plan.request import PlanRequest
from ...plan.room import Room
from ...plan.setups import SetUp, set_ups
from .forecasts import Job
from .free_memory import reserve_on
from .inputs import batch_of, longest
from .models import model_without_memory, optimizer_like_trainers
from .split import split_without_memory
from .times import ddp_step_time, step_time
from .trace import Batch, trace

_LONGEST = 2048
FILES_FOLDER = "/path/to/a/local/disk"
"""`offload.nvme_path` of a plan: which folder it is, the machine knows."""

_LEFT_OUT = (
    "the model is split over ranks (tp_size, ep_size): state is that of a rank's part over those with the same; activations, "
    "step times and what the ranks of a copy send each other are left out"
)

_AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a planner found.

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
        """Of the recommended set-up; None where nothing fits, {} where DDP does."""
        chosen = self.choice.candidate
        return None if chosen is None else chosen.forecast.settings

    def yaml(self) -> str:
        """The recommended set-up as a config file. Raises `PlanError` where nothing fits."""
        if self.settings is None:
            raise PlanError(" ".join(self.choice.why))
        settings = dict(self.settings) or {"stage": 0}
        why = "".join(f"# {line}\n" for line in self.choice.why)
        return f"# {self.model}: {self.request.world_size} ranks\n{why}{yaml.safe_dump(settings, sort_keys=False)}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """Forecasts memory and step time of each stage and tier, and says which to take. Needs no weights and no accelerator.

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
    made = model if isinstance(model, nn.Module) else _model_of(model, request)
    if optimizer is not None and isinstance(model, str | Path):
        raise PlanError("hf_zero: an optimizer goes with a model, not with a model's name.")
    numels = _numels(made)
    wanted = set_ups(
        kept or {},
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
        activations, warnings = _traced(made, batch if isinstance(batch, Mapping) else None, request, param_dtype)
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
    if not kept:
        found = [_ddp(job, request), *found]
    if not found:
        raise PlanError(
            f"hf_zero: no set-up suits this model: {faults[0] if faults else 'none goes with what is kept'}"
        )
    return Plan(
        model=str(model) if isinstance(model, str | Path) else type(model).__name__,
        parameters=numels[0],
        trained=numels[1],
        held=_numels(made)[0],
        request=request,
        room=room,
        activations=activations,
        candidates=tuple(found),
        choice=choose(found, room),
        warnings=(*warnings, *faults),
    )


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
    """Those set-ups with what they need, and why others are left out."""
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


def _model_of(name: str | Path, request: PlanRequest) -> nn.Module:
    return model_without_memory(
        name,
        dtype=getattr(torch, request.dtype),
        checkpointing=request.checkpointing,
        lora_rank=request.lora,
    )


def _traced(
    model: nn.Module, batch: Batch | None, request: PlanRequest, param_dtype: str
) -> tuple[Activations | None, list[str]]:
    most = longest(model)
    length = request.seq or min(_LONGEST, most or _LONGEST)
    if most is not None and length > most:
        raise PlanError(f"hf_zero: seq is {length}, and the model reads {most} at most.")
    rows = request.batch
    try:
        traced = trace(
            model,
            batch if batch is not None else lambda: batch_of(model, rows, length),
            shape="as given" if batch is not None else f"{rows} x {length}",
            tokens=rows * length,
            autocast=_AUTOCAST[request.mixed_precision],
            param_dtype=param_dtype,
        )
    except PlanError as error:
        return None, [str(error).removeprefix("hf_zero: ")]
    return traced, []
