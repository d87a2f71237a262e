"""`make_plan`: forecasts every set-up of a model on a machine, and recommends one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ..buckets.precision import resolve_casts
from ..config import AUTO
from ..forecast.fit import PlanError, Room
from ..forecast.peak import Activations
from .batches import batch_of, longest
from .candidates import candidates_of, ddp_candidate
from .fewer_bits import fewer_bits
from .layouts import CONTEXT_BYTES, Job, Layout, step_time
from .memory_savers import parts_that_help
from .meta_models import model_without_memory, optimizer_like_trainers
from .request import PlanRequest
from .search import Candidate, Choice, Machine, StepTime, advice_on_files, choose
from .set_ups import SetUp, set_ups
from .tensor_parallel import split_without_memory
from .trace import Batch, reserve_on, trace

_LONGEST = 2048
FILES_FOLDER = "/path/to/a/local/disk"
"""`offload.nvme_path` of a plan, a placeholder for a folder on the machine."""

_LEFT_OUT = (
    "the model is split over ranks (tp_size, ep_size): the plan counts the state of each rank's part, sharded over the ranks "
    "with the same part; it omits activations, step times and the traffic inside a copy"
)

AS_GIVEN = "as given"
"""The shape of a micro-batch given by the caller."""

_AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planner's findings.

    Attributes:
        model: the model's name, in words; `parameters` and `trained` count its elements.
        held: elements of a rank's part of the model if tensor parallelism splits the model; otherwise all elements.
        activations: of a micro-batch; None if tracing failed, and then `warnings` contains the reason.
        candidates: the set-ups, the simplest first.
        choice: the recommended set-up, with reasons.
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
        """Returns the recommended set-up's settings: None if nothing fits, {} for DDP."""
        chosen = self.choice.candidate
        return None if chosen is None else chosen.forecast.settings

    def yaml(self) -> str:
        """Returns the recommended set-up as a config file. Raises `PlanError` if nothing fits."""
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
                "logits_bytes": traced.peak_with(0).logits,
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
        batch: number of samples of a micro-batch; or the keyword arguments of a forward, for models with unknown inputs.
        kept: settings of the config that stay unchanged.
        optimizer: an optimizer over the model's parameters; by default AdamW as Trainer makes it.
        options: see `PlanRequest`.

    Raises:
        PlanError, ConfigError: the request contradicts itself, or cannot be planned.
    """
    request = _request_of(batch, options)
    settings = dict(kept or {})
    if request.offload_activations:
        settings["offload"] = {**(settings.get("offload") or {}), "activations": "cpu"}
    made = model if isinstance(model, nn.Module) else _model_of(model, request)
    if optimizer is not None and isinstance(model, str | Path):
        raise PlanError("hf_zero: an optimizer can be planned for a model object only, not for a model's name.")
    numels, device = _numels(made), torch.device("cpu" if request.on_cpu else "cuda")
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
        # A kept dtype is the same in each set-up.
        param_dtype = wanted[0].config.param_dtype if wanted else AUTO
        given = batch if isinstance(batch, Mapping) else None
        halves = replace(request, batch=max(1, request.batch // 2))
        traced = partial(_traced, made, given, request=request, param_dtype=param_dtype)
        activations, warnings = traced()
    room = _room_of(request, device)
    job = _job_of(request, made, optimizer or optimizer_like_trainers(made), device, room, activations, experts)
    found, faults = candidates_of(job, wanted, request.machine, request.accumulation, request.mixed_precision)
    # DDP does not support ranks that compute a sequence together.
    if not kept and request.sp_size == 1:
        found = [ddp_candidate(job, request), *found]
    if not found:
        raise PlanError(
            f"hf_zero: no set-up suits this model: {faults[0] if faults else 'none fits the kept settings'}"
        )
    choice = choose(found, room)
    why = list(choice.why)
    if activations is not None:
        why += parts_that_help(
            job,
            wanted,
            request.machine,
            request.accumulation,
            request.mixed_precision,
            room,
            choice,
            recomputed=lambda: traced(recomputes=True)[0],
            halved=lambda: None if request.batch % 2 or given is not None else traced(request=halves)[0],
        )
    if room.host == 0 and any(each.forecast.host_bytes for each in found):
        why.append("Set-ups with state in host memory fit only if `host_memory` (--host-memory) is given.")
    why += advice_on_files(found, room, request.machine, numels[0])
    why += _advice_on_links(job, choice, request)
    return Plan(
        model=str(model) if isinstance(model, str | Path) else type(model).__name__,
        parameters=numels[0],
        trained=numels[1],
        held=_numels(made)[0],
        request=request,
        room=room,
        activations=activations,
        candidates=tuple(found),
        choice=replace(choice, why=tuple(why)),
        warnings=(*warnings, *faults),
    )


def _job_of(
    request: PlanRequest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    room: Room,
    activations: Activations | None,
    experts: frozenset[nn.Parameter],
) -> Job:
    return Job(
        model=model,
        optimizers=[optimizer],
        device=device,
        world_size=request.data_ranks,
        ranks_a_node=request.gpus // request.tp_size,
        activations=activations,
        accumulates=request.accumulation > 1,
        experts=experts,
        expert_ranks=request.world_size // request.ep_size,
        free_bytes=room.device - CONTEXT_BYTES,
    )


def _advice_on_links(job: Job, choice: Choice, request: PlanRequest) -> list[str]:
    """Returns a line on whether fewer bits pay off for the recommended set-up; [] if its step time is unknown."""
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
    """Reduces a model made from the name or folder `model` to one rank's part; returns experts shared by fewer ranks."""
    if isinstance(model, nn.Module):
        raise PlanError(
            "hf_zero: tp_size and ep_size can be planned for a model's name, a folder or a config.json, not for a model object."
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
        raise PlanError(f"hf_zero: make_plan has no option {sorted(unknown)[0]!r}; allowed: {known}.")
    return PlanRequest(**options) if isinstance(batch, Mapping) else PlanRequest(batch=batch, **options)


def _numels(model: nn.Module) -> tuple[int, int]:
    """Returns the number of elements of all parameters, and of the trained ones."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return sum(p.numel() for p in model.parameters()), trained


def _model_of(name: str | Path, request: PlanRequest) -> nn.Module:
    return model_without_memory(
        name,
        dtype=getattr(torch, request.dtype),
        checkpointing=request.checkpointing,
        lora_rank=request.lora,
    )


def _traced(
    model: nn.Module, batch: Batch | None, *, request: PlanRequest, param_dtype: str, recomputes: bool = False
) -> tuple[Activations | None, list[str]]:
    most = longest(model)
    length = request.seq or min(_LONGEST, most or _LONGEST)
    if most is not None and length > most:
        raise PlanError(f"hf_zero: seq is {length}, but the model reads at most {most} tokens.")
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
