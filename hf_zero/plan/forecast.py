"""Forecast of the memory that a rank needs at its peak: state, gradients on their way, gathered parameters, activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import ZeroConfig
from .states import BucketCost, DdpState, StatePlan

DDP = "DDP"
"""Name of the set-up without this engine."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What one micro-batch holds during forward and backward, as traced.

    Attributes:
        curve: (bytes of gradients that have come so far, bytes live at most until the next one comes) in the order of backward;
            what is live does not count those gradients. The first entry is of the forward and the start of backward.
        saved_bytes: live when the forward has ended: what it has saved for the backward.
        flops: of the forward and the backward, recomputation included; `forward_flops` of the forward alone.
        tokens: elements of the micro-batch that the model reads.
        shape: rows and length of the micro-batch, in words.
    """

    curve: tuple[tuple[int, int], ...]
    saved_bytes: int
    flops: int
    forward_flops: int
    tokens: int
    shape: str

    @property
    def peak_bytes(self) -> int:
        """Live at most, where each gradient goes as soon as it is there."""
        return self.peak_beside(0)

    def peak_beside(self, gradient_bytes: int) -> int:
        """Live at most together with gradients that gather while backward goes on, until they take `gradient_bytes`."""
        all_bytes = max((come for come, _ in self.curve), default=0)
        share = gradient_bytes / all_bytes if all_bytes else 0.0
        return max((round(live + share * come) for come, live in self.curve), default=0)


@dataclass(frozen=True, kw_only=True)
class Passing:
    """Bytes that a rank holds for a while beside its state.

    Attributes:
        gathered: parameters of stage 3 that are whole at a time, beyond the shards.
        received: parts of gradients that peers have sent and that are not added up when backward ends.
        step: temporaries of the optimizer's step.
        window: state that passes through host memory on its way from and to files.
        runtime: what libraries take when training begins: a context on an accelerator, thread pools and message buffers.
        largest_parameter: of the model, as it is saved.
        model: all parameters and buffers, as they are loaded.
    """

    gathered: int = 0
    received: int = 0
    step: int = 0
    window: int = 0
    runtime: int = 0
    largest_parameter: int = 0
    model: int = 0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes that a rank needs with one set-up.

    Attributes:
        name: of the set-up, for tables.
        settings: of `ZeroConfig`, which make it; {} for DDP.
        device: kind → bytes on the training device when most is there.
        host: kind → bytes in host memory beside an accelerator; {} where the training device is the host.
        pinned_bytes: of host memory that is page-locked.
        disk_bytes: in files.
        save_bytes, load_bytes: host memory at most while a checkpoint is written, and while the model is loaded.
        unknown: kinds whose bytes are not known beforehand, in words.
    """

    name: str
    settings: Mapping[str, Any]
    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    pinned_bytes: int = 0
    disk_bytes: int = 0
    save_bytes: int = 0
    load_bytes: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def state_bytes(self) -> int:
        """Of parameters, gradients, masters and optimizer state, in memory and in files."""
        kept = (*STATE_KINDS, "gradient buffers")
        return sum(self.device.get(kind, 0) + self.host.get(kind, 0) for kind in kept) + self.disk_bytes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """What is said at the start of a run of a rank's memory when most is there.

    Attributes:
        batch: the shape of the micro-batch that it is for, in words; or why it is not known.
        ours, ddp: with this engine and under DDP; None where it is not known.
    """

    batch: str
    ours: Forecast | None = None
    ddp: Forecast | None = None


STATE_KINDS = ("parameters", "frozen", "gradients", "masters", "optimizer state", "residuals", "copies")
PASSING_KINDS = ("gradient buffers", "gathered", "activations", "step", "runtime")
KINDS = (*STATE_KINDS, *PASSING_KINDS)
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
    """What a rank holds with a config.

    Backward and step are not at the same time: the larger of what both take beside the state counts.

    Args:
        plan, costs: of its state (`plan_states`).
        activations: None where they are not known.
        on_host: the training device is the host.
        accumulates: a step has several micro-batches, so that gradients are there when the last one's forward begins.
    """
    offload = config.offload
    moved = _moved(plan, costs, config)
    state = {
        "parameters": plan.parameters,
        "frozen": plan.frozen,
        "gradients": plan.gradients,
        "masters": plan.masters,
        "optimizer state": plan.optimizer or 0,
        "residuals": plan.residuals,
        "copies": plan.beside,
    }
    in_files = {kind: min(nbytes, state[kind]) for kind, nbytes in moved["files"].items()}
    in_host = {kind: min(nbytes, state[kind] - in_files.get(kind, 0)) for kind, nbytes in moved["host"].items()}
    if on_host:
        in_host = {}
    device = {kind: nbytes - in_files.get(kind, 0) - in_host.get(kind, 0) for kind, nbytes in state.items()}
    kept = ("masters", "optimizer state")
    saved_in_checkpoint = sum(device[kind] + in_host.get(kind, 0) for kind in kept)
    saved = activations.saved_bytes if activations and offload.activations == "cpu" and not on_host else 0
    # Gradients that come during backward, and have gone before the next forward.
    coming = device["gradients"] if not accumulates else 0
    beside = coming + passing.received
    in_backward = activations.peak_beside(beside) if activations else beside
    in_step = coming + (passing.step if on_host or not offload.moves_state else 0) + (passing.window if on_host else 0)
    device |= {
        "gradient buffers": plan.gradient_buffers,
        "gathered": passing.gathered,
        "activations": max(0, in_backward - saved - coming),
        "step": max(0, in_step - passing.gathered - max(in_backward - saved, coming)),
        "runtime": passing.runtime,
    }
    host = {} if on_host else {**in_host, "step": passing.window, "activations": saved}
    return Forecast(
        name=name,
        settings=settings,
        device=_ordered(device),
        host=_ordered(host),
        pinned_bytes=sum(in_host.values()),
        disk_bytes=sum(in_files.values()),
        save_bytes=saved_in_checkpoint + passing.largest_parameter,
        load_bytes=passing.model,
        unknown=_unknown(plan.optimizer, activations),
    )


def forecast_ddp(
    state: DdpState, passing: Passing, activations: Activations | None, *, accumulates: bool = False
) -> Forecast:
    """What a rank holds under DistributedDataParallel.

    Args:
        accumulates: as `forecast`'s.
    """
    there = state.gradients if accumulates else 0
    traced = activations.peak_beside(state.gradients - there) if activations else 0
    in_passes = max(there + traced, state.gradients + passing.step)
    device = {
        "parameters": state.parameters,
        "frozen": state.frozen,
        "gradients": state.gradients,
        "optimizer state": state.optimizer or 0,
        "gradient buffers": state.gradient_buckets,
        "activations": max(0, in_passes - state.gradients),
        "runtime": passing.runtime,
    }
    return Forecast(
        name=DDP,
        settings={},
        device=_ordered(device),
        save_bytes=state.parameters + state.frozen,
        load_bytes=passing.model,
        unknown=_unknown(state.optimizer, activations),
    )


def _moved(plan: StatePlan, costs: Sequence[BucketCost], config: ZeroConfig) -> dict[str, dict[str, int]]:
    """Kind → bytes that are in host memory and in files, beside an accelerator or not."""
    offload = config.offload
    found: dict[str, dict[str, int]] = {"host": {}, "files": {}}
    if offload.moves_state:
        share = _share_apart(costs)
        where = found["files" if offload.optimizer == "nvme" else "host"]
        where["optimizer state"] = int((plan.optimizer or 0) * share)
        where["masters"] = int(plan.masters * share)
        # Reduced gradients are in host memory, wherever the state is.
        reduced = sum(c.layout.shard_numel * c.gradient_bytes for c in costs if c.trained and c.apart)
        found["host"]["gradients"] = reduced
        found["host"]["copies"] = plan.beside
    if offload.moves_params:
        where = found["files" if offload.params == "nvme" else "host"]
        where["parameters"] = sum(c.parameter_bytes for c in costs if c.trained and c.sharded)
        where["frozen"] = sum(c.parameter_bytes for c in costs if not c.trained and c.sharded)
    return found


def _share_apart(costs: Sequence[BucketCost]) -> float:
    trained = [cost for cost in costs if cost.trained]
    moved = sum(cost.layout.numel for cost in trained if cost.apart or cost.in_files)
    return moved / max(1, sum(cost.layout.numel for cost in trained))


def _ordered(held: Mapping[str, int]) -> dict[str, int]:
    return {kind: held[kind] for kind in KINDS if held.get(kind)}


def _unknown(optimizer: int | None, activations: Activations | None) -> tuple[str, ...]:
    found = ["optimizer state"] if optimizer is None else []
    return (*found, *(["activations"] if activations is None else []))
