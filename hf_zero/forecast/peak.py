"""Forecast of a rank's peak memory: state, gradients, gathered parameters and activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..config import ZeroConfig
from .state import BucketCost, DdpState, StatePlan, buffers_at

DDP = "DDP"
"""Name of the set-up without this engine."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """Bytes alive when a gradient arrives, or the maximum from then until the next gradient.

    Attributes:
        gradient: name of the parameter whose gradient arrived last; "" before the first.
        come: bytes of gradients that have arrived before and are not counted as live.
        most: maximum of live bytes.
        logits: the part of `most` in logits, and in tensors of their shape that the loss makes.
        without_logits: maximum of live bytes without logits, possibly at a different time.
    """

    gradient: str = ""
    come: int = 0
    most: int = 0
    logits: int = 0
    without_logits: int = 0


class Peak(NamedTuple):
    """Bytes in addition to the state, at the moment of a backward with the most bytes.

    Attributes:
        live: activations, and gradients that have arrived.
        logits: the part of `live` in logits, and in tensors of their shape that the loss makes.
        buffers: buffers of whole gradients.
    """

    live: int
    logits: int
    buffers: int = 0


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The traced memory of one micro-batch during forward and backward.

    Attributes:
        curve: in the order of backward. The first entry is for the forward and the start of backward.
        saved_bytes: bytes that are live at the end of the forward, saved for backward.
        saved_logits: the part of `saved_bytes` in logits and in tensors of their shape.
        tile_bytes: bytes of logits that a chunked loss holds at one time.
        pinned_bytes: bytes that the forward itself moves to pinned host memory.
        flops: of forward and backward, recomputation included; `forward_flops` of the forward only.
        exchanged_bytes: bytes that a rank sends in both to the other ranks of its sequence (`sp_size`).
        tokens: number of elements of the micro-batch that the model reads.
        shape: batch size and length of the micro-batch, as text.
    """

    curve: tuple[Live, ...]
    saved_bytes: int
    flops: int
    forward_flops: int
    tokens: int
    shape: str
    saved_logits: int = 0
    tile_bytes: int = 0
    pinned_bytes: int = 0
    exchanged_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Maximum of live bytes, if each gradient is freed immediately."""
        return self.peak_with(0).live

    @property
    def has_logits(self) -> bool:
        """Whether the whole logits exist at any time."""
        return any(live.logits for live in self.curve)

    def peak_with(self, gradient_bytes: int, buffers: Sequence[int] = ()) -> Peak:
        """Finds the peak, if gradients accumulate during backward up to `gradient_bytes`.

        Args:
            buffers: bytes of whole-gradient buffers at each entry of the curve. An empty sequence means no buffers.
        """
        all_bytes = max((live.come for live in self.curve), default=0)
        share = gradient_bytes / all_bytes if all_bytes else 0.0
        moments = (
            Peak(round(live.most + share * live.come), live.logits, held)
            for live, held in zip(self.curve, buffers or [0] * len(self.curve))
        )
        return max(moments, key=lambda peak: (peak.live + peak.buffers, peak.logits), default=Peak(0, 0))

    def in_chunks(self) -> "Activations":
        """The same activations with a chunked loss, which holds one tile of the logits at a time."""
        tile = self.tile_bytes
        return replace(
            self,
            curve=tuple(
                replace(live, most=live.without_logits + tile * (live.logits > 0), logits=0) for live in self.curve
            ),
            saved_bytes=self.saved_bytes - self.saved_logits,
            saved_logits=0,
        )


@dataclass(frozen=True, kw_only=True)
class Passing:
    """Temporary bytes of a rank, in addition to its state.

    Attributes:
        gathered: stage 3's parameters that are whole at one time, in addition to the shards.
        received: parts of gradients that other ranks have sent and that are not yet added when backward ends.
        step: temporary tensors of the optimizer's step.
        window: state that passes through the memory of the step, between host memory or files and the step.
        file_buffers: host memory for reads and writes of files, if the step is on the device.
        runtime: memory that libraries allocate when training starts: an accelerator's context, thread pools, message buffers.
        largest_parameter: the model's largest parameter, as it is saved.
        model: all parameters and buffers, as they are loaded.
    """

    gathered: int = 0
    received: int = 0
    step: int = 0
    window: int = 0
    file_buffers: int = 0
    runtime: int = 0
    largest_parameter: int = 0
    model: int = 0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes needed by a rank with one set-up.

    Attributes:
        name: name of the set-up in tables.
        settings: settings of `ZeroConfig` that produce the set-up; {} for DDP.
        device: kind → bytes on the training device at the peak. Gradients count in full, and activations are reduced by the
            gradient bytes that have not arrived at that moment.
        host: kind → bytes in host memory next to an accelerator; {} if the training device is the host.
        pinned_bytes: page-locked part of host memory.
        disk_bytes: bytes in files.
        save_bytes, load_bytes: maximum of host memory while a checkpoint is written, and while the model is loaded.
        buffer_bytes: maximum of gradient buffers; `device` has their bytes at the peak.
        unknown: names of the kinds whose bytes cannot be known in advance.
    """

    name: str
    settings: Mapping[str, Any]
    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    pinned_bytes: int = 0
    disk_bytes: int = 0
    save_bytes: int = 0
    load_bytes: int = 0
    buffer_bytes: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, their buffers, masters and optimizer state, in memory and in files."""
        kept = sum(self.device.get(kind, 0) + self.host.get(kind, 0) for kind in STATE_KINDS)
        return kept + self.buffer_bytes + self.disk_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "settings": dict(self.settings),
            "device": dict(self.device),
            "device_bytes": self.device_bytes,
            "host": dict(self.host),
            "host_bytes": self.host_bytes,
            "pinned_bytes": self.pinned_bytes,
            "disk_bytes": self.disk_bytes,
            "save_bytes": self.save_bytes,
            "load_bytes": self.load_bytes,
            "unknown": list(self.unknown),
        }


@dataclass(frozen=True, kw_only=True)
class AtStart:
    """The forecast of a rank's peak memory at the start of a run.

    Attributes:
        batch: the shape of the forecast's micro-batch as text, or the reason why the shape is unknown.
        ours, ddp: forecasts with this engine and under DDP; None if unknown.
    """

    batch: str
    ours: Forecast | None = None
    ddp: Forecast | None = None


STATE_KINDS = ("parameters", "frozen", "gradients", "masters", "optimizer state", "residuals")
KINDS = (*STATE_KINDS, "gradient buffers", "gathered", "activations", "logits", "step", "runtime")
"""Kinds of memory, in the order in which tables and charts show them."""


def forecast(
    name: str,
    settings: Mapping[str, Any],
    config: ZeroConfig,
    plan: StatePlan,
    costs: Sequence[BucketCost],
    passing: Passing,
    activations: Activations | None,
    *,
    on_host: bool,
    accumulates: bool = False,
) -> Forecast:
    """Forecasts a rank's memory under a config.

    Backward and step run at different times, so the larger of the two counts in addition to the state. The gradient buffer of a
    bucket is allocated with the bucket's first gradient, so no buffer exists while the logits exist, before the first gradient.

    Args:
        plan, costs: the state of the rank (`plan_states`).
        activations: None if unknown.
        on_host: the training device is the host.
        accumulates: a step has several micro-batches, so gradients exist when the forward of the last one starts.
    """
    offload = config.offload
    moved = _moved(costs, config)
    state = {
        "parameters": plan.parameters,
        "frozen": plan.frozen,
        "gradients": plan.gradients,
        "masters": plan.masters,
        "optimizer state": plan.optimizer or 0,
        "residuals": plan.residuals,
    }
    in_files = {kind: min(nbytes, state[kind]) for kind, nbytes in moved["files"].items()}
    in_host = {kind: min(nbytes, state[kind] - in_files.get(kind, 0)) for kind, nbytes in moved["host"].items()}
    # Then the host is the training device, and these bytes count as the device's.
    if on_host:
        in_host = {}
    device = {kind: nbytes - in_files.get(kind, 0) - in_host.get(kind, 0) for kind, nbytes in state.items()}
    kept = ("masters", "optimizer state")
    saved_in_checkpoint = sum(device[kind] + in_host.get(kind, 0) for kind in kept)
    moves = activations is not None and offload.activations == "cpu" and not on_host
    saved = activations.saved_bytes if activations and moves else 0
    # Gradients arriving during backward and freed before the next forward.
    coming = device["gradients"] if not accumulates else 0
    peak = _peak(plan, costs, coming + passing.received, activations, moves=moves)
    logits = max(0, peak.logits - activations.saved_logits) if activations and moves else peak.logits
    visits = any(cost.visits for cost in costs)
    lingers = any(cost.visits and not cost.state_in_files for cost in costs)
    steps_here = on_host or visits or not offload.moves_state
    in_step = coming + (passing.step if steps_here else 0) + (passing.window if on_host or visits else 0)
    # All gradients exist at the end of backward, wherever its peak was.
    in_backward = max(coming, peak.live - saved + peak.buffers)
    buffers = min(peak.buffers, in_backward - coming)
    passes = in_backward - coming - buffers
    device |= {
        "gradient buffers": buffers,
        "gathered": passing.gathered,
        "activations": max(0, passes - logits),
        "logits": min(passes, logits),
        # Only the excess over backward, because step and backward do not run at the same time. But state of host memory is still
        # copied there during the next forward.
        "step": max(passing.window if lingers else 0, in_step - passing.gathered - in_backward),
        "runtime": passing.runtime,
    }
    pinned = activations.pinned_bytes if activations else 0
    in_step_on_host = passing.file_buffers if visits else passing.window
    host = {} if on_host else {**in_host, "step": in_step_on_host, "activations": saved + pinned}
    return Forecast(
        name=name,
        settings=settings,
        device=_ordered(device),
        host=_ordered(host),
        pinned_bytes=sum(in_host.values()) + passing.file_buffers,
        disk_bytes=sum(in_files.values()),
        save_bytes=saved_in_checkpoint + passing.largest_parameter,
        load_bytes=passing.model,
        buffer_bytes=plan.gradient_buffers,
        unknown=_unknown(plan.optimizer, activations),
    )


def _peak(
    plan: StatePlan, costs: Sequence[BucketCost], gathers: int, activations: Activations | None, *, moves: bool
) -> Peak:
    """Finds the peak of a backward.

    Args:
        gathers: bytes of a step's gradients, which accumulate during backward.
        moves: activations move to the host.
    """
    if activations is None:
        return Peak(gathers, 0, plan.gradient_buffers)
    if moves or not plan.gradient_buffers:
        # The curve does not record when activations leave the device, so the buffers at the peak are unknown.
        return activations.peak_with(gathers)._replace(buffers=plan.gradient_buffers)
    return activations.peak_with(gathers, buffers_at([live.gradient for live in activations.curve], costs))


def forecast_ddp(
    state: DdpState, passing: Passing, activations: Activations | None, *, accumulates: bool = False
) -> Forecast:
    """Forecasts a rank's memory under DistributedDataParallel. `accumulates`: see `forecast`."""
    there = state.gradients if accumulates else 0
    peak = activations.peak_with(state.gradients - there) if activations else Peak(0, 0)
    logits = peak.logits
    in_passes = max(there + peak.live, state.gradients + passing.step)
    passes = max(0, in_passes - state.gradients)
    device = {
        "parameters": state.parameters,
        "frozen": state.frozen,
        "gradients": state.gradients,
        "optimizer state": state.optimizer or 0,
        "gradient buffers": state.gradient_buckets,
        "activations": max(0, passes - logits),
        "logits": min(passes, logits),
        "runtime": passing.runtime,
    }
    return Forecast(
        name=DDP,
        settings={},
        device=_ordered(device),
        save_bytes=state.parameters + state.frozen,
        load_bytes=passing.model,
        buffer_bytes=state.gradient_buckets,
        unknown=_unknown(state.optimizer, activations),
    )


def _moved(costs: Sequence[BucketCost], config: ZeroConfig) -> dict[str, dict[str, int]]:
    """Kind → bytes in host memory and in files, with or without an accelerator."""
    offload = config.offload
    found: dict[str, dict[str, int]] = {"host": {}, "files": {}}
    if offload.moves_state:
        moved = [c for c in costs if c.trained and (c.offloaded or c.visits or c.state_in_files)]
        where = found["files" if offload.optimizer == "nvme" else "host"]
        where["optimizer state"] = sum(c.state_bytes or 0 for c in moved)
        where["masters"] = sum(c.kept_master_bytes for c in moved)
        # Reduced gradients are in host memory for both tiers of state.
        reduced = sum(c.layout.shard_numel * c.gradient_bytes for c in costs if c.trained and c.offloaded)
        found["host"]["gradients"] = reduced
    if offload.moves_params:
        where = found["files" if offload.params == "nvme" else "host"]
        where["parameters"] = sum(c.parameter_bytes for c in costs if c.trained and c.sharded)
        where["frozen"] = sum(c.parameter_bytes for c in costs if not c.trained and c.sharded)
    return found


def _ordered(held: Mapping[str, int]) -> dict[str, int]:
    return {kind: held[kind] for kind in KINDS if held.get(kind)}


def _unknown(optimizer: int | None, activations: Activations | None) -> tuple[str, ...]:
    found = ["optimizer state"] if optimizer is None else []
    return (*found, *(["activations"] if activations is None else []))
