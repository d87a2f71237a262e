"""Memory of a training run by kind and by phase, from the shapes of its model alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .config import ConfigError, ZeroConfig
from .layout import GRAD_BUFFERS, BucketLayout, moment_bytes, pool_growth, pool_numel

# ---- What a planner refuses ----


class PlanError(ConfigError):
    """A plan that cannot be made: a model, a batch or a machine that is not understood."""


class NothingFitsError(PlanError):
    """No set-up fits.

    Attributes:
        least: the settings of the one that needs least.
    """

    def __init__(self, message: str, least: Mapping[str, Any]):
        super().__init__(message)
        self.least = least


# ---- The plan printed at the start: dtypes, buckets, and the bytes of state that a rank will hold ----

_RESIDUAL_BYTES = 2
"""An element, of what a rank has not sent of its gradient: bfloat16."""


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """One bucket's layout with the bytes an element takes as parameter, travelling gradient and master.

    `reduced_bytes`: in the dtype in which the sum over the ranks arrives. `gradient_bytes`: in that in which it waits for a step.

    `state_itemsizes`: bytes an element of each kind of optimizer state; None where it is not known beforehand. `sharded`
    parameters are kept as a shard (stage 3); not `trained` ones have neither gradient nor state. `apart`: masters and reduced
    gradients are in other memory. `keeps_master`: the master is there between steps, too. `in_files`: bytes a shard's element
    has in files, of its parameters, master and state together.
    """

    layout: BucketLayout
    param_bytes: int
    reduce_bytes: int
    reduced_bytes: int
    gradient_bytes: int
    master_bytes: int
    has_master: bool
    keeps_master: bool
    state_itemsizes: tuple[int, ...] | None
    sharded: bool = False
    trained: bool = True
    apart: bool = False
    in_files: int = 0

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters that a rank keeps all the time."""
        return (self.layout.shard_numel if self.sharded else self.layout.numel) * self.param_bytes

    @property
    def own_numel(self) -> int:
        """Elements of the parameters themselves, without padding."""
        return self.layout.numel - sum(gap.numel for gap in self.layout.padding)


@dataclass(frozen=True, kw_only=True)
class StatePlan:
    """Bytes a rank holds, padding included. Gradient buffers are in passing; the rest lasts through the step.

    `residuals` are what error feedback keeps of the gradients that a rank sends.

    `frozen` are the parameters that take no gradients, and buffers.

    `beside` are copies of state, with gradients, on which steps are taken early. `in_files` is the part of all kinds that
    is in files, and so in no memory.
    """

    parameters: int
    frozen: int
    masters: int
    gradients: int
    residuals: int
    gradient_buffers: int
    optimizer: int | None
    beside: int
    in_files: int

    @property
    def total(self) -> int:
        """Counts all lasting memory, the host's and the device's, as far as it is known beforehand."""
        lasts = (self.parameters, self.frozen, self.masters, self.gradients, self.residuals, self.beside)
        return sum(lasts) + (self.optimizer or 0) - self.in_files


@dataclass(frozen=True, kw_only=True)
class DdpState:
    """Bytes that each rank holds of the same model under DistributedDataParallel, whose gradient buckets last.

    `optimizer` is None where its state is not known beforehand.
    """

    parameters: int
    frozen: int
    gradients: int
    gradient_buckets: int
    optimizer: int | None

    @property
    def total(self) -> int:
        """Counts all memory, as far as it is known beforehand."""
        return self.parameters + self.frozen + self.gradients + self.gradient_buckets + (self.optimizer or 0)


def _residual_bytes(layout: BucketLayout, replicas: int) -> int:
    """Counts a bucket's residual: the whole, and between several shard groups also a shard and a part of it."""
    if layout.shards == 1:
        return 0
    between = layout.shard_numel + layout.shard_numel // replicas if replicas > 1 else 0
    return _RESIDUAL_BYTES * (layout.numel + between)


def plan_ddp(costs: Sequence[BucketCost], world_size: int, frozen: int = 0) -> DdpState:
    """The bytes of state for these buckets' parameters where nothing is sharded.

    Args:
        frozen: bytes of parameters that take no gradients, and of buffers.
    """
    trained = [cost for cost in costs if cost.trained]
    parameters = sum(cost.own_numel * cost.param_bytes for cost in trained)
    return DdpState(
        parameters=parameters,
        frozen=frozen,
        gradients=parameters,
        # A rank by itself has nothing to reduce.
        gradient_buckets=parameters if world_size > 1 else 0,
        optimizer=_sum_if_known([_whole_state_bytes(cost) for cost in trained]),
    )


def plan_states(
    costs: Sequence[BucketCost],
    config: ZeroConfig,
    replicas: int = 1,
    beside: int = 0,
    kept_whole: int = 0,
    *,
    accumulates: bool = False,
) -> StatePlan:
    """The bytes of state for these buckets under this stage.

    Above stage 0 a rank keeps the shard of gradients, and whole buckets pass through a pool (layout.py). Where whole
    gradients wait for the last micro-batch of a step, stage 1 reduces them where they are; stages 2 and 3 have them beside.

    Args:
        replicas: shard groups.
        beside: bytes for steps out of their time.
        kept_whole: bytes of frozen parameters and buffers that are in no bucket.
        accumulates: a step has several micro-batches.
    """
    # Before `costs` loses the frozen ones: their shards may be in files, too.
    in_files = sum(cost.layout.shard_numel * cost.in_files for cost in costs)
    frozen = kept_whole + sum(cost.parameter_bytes for cost in costs if not cost.trained)
    costs = [cost for cost in costs if cost.trained]
    waits = accumulates and config.accumulates_locally
    is_cut = any(cost.apart or (cost.layout.shards > 1 and cost.layout.numel) for cost in costs)
    passes = config.stage >= 1 and is_cut
    pooled = passes and not (waits and config.stage == 1)
    gradients = sum(_gradient_bytes(cost, pooled) for cost in costs)
    if pooled and waits:
        gradients += sum(cost.own_numel * cost.param_bytes for cost in costs)
    return StatePlan(
        parameters=sum(cost.parameter_bytes for cost in costs),
        frozen=frozen,
        masters=sum(cost.layout.shard_numel * cost.master_bytes for cost in costs if cost.keeps_master),
        gradients=gradients,
        residuals=sum(_residual_bytes(cost.layout, replicas) for cost in costs)
        if config.comm.gradients != "none"
        else 0,
        gradient_buffers=_buffer_bytes(pool_numel([cost.layout for cost in costs], GRAD_BUFFERS), costs)
        if pooled
        else 0,
        optimizer=_sum_if_known([_state_bytes(cost, config) for cost in costs]),
        beside=beside,
        in_files=in_files,
    )


def _sum_if_known(parts: Sequence[int | None]) -> int | None:
    """Sums the parts; None if one is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _whole_state_bytes(cost: BucketCost) -> int | None:
    return None if cost.state_itemsizes is None else sum(cost.state_itemsizes) * cost.own_numel


def _state_bytes(cost: BucketCost, config: ZeroConfig) -> int | None:
    if cost.state_itemsizes is None:
        return None
    if config.quantises_moments:
        return len(cost.state_itemsizes) * moment_bytes(cost.layout, cost.master_bytes)
    return sum(cost.state_itemsizes) * cost.layout.shard_numel


def _buffer_bytes(whole_numel: int, costs: Sequence[BucketCost]) -> int:
    """Counts bytes of buffers of whole gradients, of so many elements, and of these buckets' sums in temporary memory."""
    beside = [cost.layout.shard_numel * cost.reduced_bytes for cost in costs if cost.apart]
    return whole_numel * max(cost.reduce_bytes for cost in costs) + sum(sorted(beside, reverse=True)[:GRAD_BUFFERS])


def _buffers_at(gradients: Sequence[str], costs: Sequence[BucketCost]) -> list[int]:
    """Counts bytes of buffers of whole gradients after each gradient of a backward. A bucket's first gradient opens its buffer.

    Args:
        gradients: names of parameters, in the order in which their gradients come. Names of no bucket open no buffer.
    """
    bucket_of = {slot.name: number for number, cost in enumerate(costs) if cost.trained for slot in cost.layout.slots}
    order = list(dict.fromkeys(bucket_of[name] for name in gradients if name in bucket_of))
    opened = [costs[number] for number in order]
    growth = pool_growth([cost.layout for cost in opened], GRAD_BUFFERS)
    held = [0, *(_buffer_bytes(numel, opened[: at + 1]) for at, numel in enumerate(growth))]
    found, seen = [], set()
    for name in gradients:
        if name in bucket_of:
            seen.add(bucket_of[name])
        found.append(held[len(seen)])
    return found


def _gradient_bytes(cost: BucketCost, pooled: bool) -> int:
    shard = cost.layout.shard_numel * cost.gradient_bytes
    if pooled:
        return shard
    # Reduced in place where it can stay so, and else copied into a shard beside the whole gradient.
    in_place = cost.reduce_bytes == cost.reduced_bytes == cost.gradient_bytes and not cost.apart
    return cost.layout.numel * cost.reduce_bytes + (0 if in_place else shard)


# ---- The forecast of a rank's peak memory: state, gradients, gathered parameters, activations ----

DDP = "DDP"
"""Name of the set-up without this engine."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """Bytes that are live when a gradient comes, or at most from then until the next gradient comes.

    Attributes:
        gradient: name of the parameter whose gradient came last; "" before the first.
        come: bytes of gradients that have come before and are not counted as live.
        most: live at most.
        logits: of these, logits and what the loss makes of their shape.
        beside_logits: live at most without logits, maybe at another time.
    """

    gradient: str = ""
    come: int = 0
    most: int = 0
    logits: int = 0
    beside_logits: int = 0


class Peak(NamedTuple):
    """Bytes beside the state at the moment of a backward when there are most.

    Attributes:
        live: activations, and gradients that have come.
        logits: of these, logits and what the loss makes of their shape.
        buffers: of whole gradients.
    """

    live: int
    logits: int
    buffers: int = 0


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The traced memory of one micro-batch during forward and backward.

    Attributes:
        curve: in the order of backward. The first entry is of the forward and the start of backward.
        saved_bytes: live when the forward has ended: what it has saved for the backward.
        saved_logits: of these, logits and what has their shape.
        tile_bytes: of logits that a loss in chunks has at a time.
        pinned_bytes: that the forward itself moves to pinned host memory.
        flops: of the forward and the backward, recomputation included; `forward_flops` of the forward alone.
        exchanged_bytes: that a rank sends in both to the other ranks of its sequence (`sp_size`).
        tokens: elements of the micro-batch that the model reads.
        shape: rows and length of the micro-batch, in words.
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
        """Counts live bytes at most, if each gradient is freed as soon as it is computed."""
        return self.peak_beside(0).live

    @property
    def has_logits(self) -> bool:
        """Whether logits are whole at any time."""
        return any(live.logits for live in self.curve)

    def peak_beside(self, gradient_bytes: int, buffers: Sequence[int] = ()) -> Peak:
        """Finds the peak, with gradients that gather while backward goes on, until they take `gradient_bytes`.

        Args:
            buffers: bytes of buffers of whole gradients at each entry of the curve. An empty one: there are no buffers.
        """
        all_bytes = max((live.come for live in self.curve), default=0)
        share = gradient_bytes / all_bytes if all_bytes else 0.0
        moments = (
            Peak(round(live.most + share * live.come), live.logits, held)
            for live, held in zip(self.curve, buffers or [0] * len(self.curve))
        )
        return max(moments, key=lambda peak: (peak.live + peak.buffers, peak.logits), default=Peak(0, 0))

    def in_chunks(self) -> "Activations":
        """The same where the loss is computed in chunks: of the logits a tile is live at a time."""
        tile = self.tile_bytes
        return replace(
            self,
            curve=tuple(
                replace(live, most=live.beside_logits + tile * (live.logits > 0), logits=0) for live in self.curve
            ),
            saved_bytes=self.saved_bytes - self.saved_logits,
            saved_logits=0,
        )


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
        device: kind → bytes on the training device when most is there. Gradients count in full, and activations count less what
            gradients lack at that moment.
        host: kind → bytes in host memory beside an accelerator; {} where the training device is the host.
        pinned_bytes: of host memory that is page-locked.
        disk_bytes: in files.
        save_bytes, load_bytes: host memory at most while a checkpoint is written, and while the model is loaded.
        buffer_bytes: of gradient buffers at most; `device` has those at the peak.
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
        """Counts bytes of parameters, gradients, their buffers, masters and optimizer state, in memory and in files."""
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
        batch: the shape of the micro-batch that it is for, in words; or why it is not known.
        ours, ddp: with this engine and under DDP; None where it is not known.
    """

    batch: str
    ours: Forecast | None = None
    ddp: Forecast | None = None


STATE_KINDS = ("parameters", "frozen", "gradients", "masters", "optimizer state", "residuals", "copies")
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

    Backward and step are not at the same time: the larger of what both take beside the state counts. A bucket's gradient
    buffer is there from the bucket's first gradient on. So no buffer is there beside logits, before the first gradient.

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
    # The host is the training device then: these bytes count as the device's.
    if on_host:
        in_host = {}
    device = {kind: nbytes - in_files.get(kind, 0) - in_host.get(kind, 0) for kind, nbytes in state.items()}
    kept = ("masters", "optimizer state")
    saved_in_checkpoint = sum(device[kind] + in_host.get(kind, 0) for kind in kept)
    moves = activations is not None and offload.activations == "cpu" and not on_host
    saved = activations.saved_bytes if activations and moves else 0
    # Gradients that come during backward, and have gone before the next forward.
    coming = device["gradients"] if not accumulates else 0
    peak = _peak(plan, costs, coming + passing.received, activations, moves=moves)
    logits = max(0, peak.logits - activations.saved_logits) if activations and moves else peak.logits
    in_step = coming + (passing.step if on_host or not offload.moves_state else 0) + (passing.window if on_host else 0)
    # At least the gradients that come: all of them are there when the backward ends, wherever its peak was.
    in_backward = max(coming, peak.live - saved + peak.buffers)
    buffers = min(peak.buffers, in_backward - coming)
    passes = in_backward - coming - buffers
    device |= {
        "gradient buffers": buffers,
        "gathered": passing.gathered,
        "activations": max(0, passes - logits),
        "logits": min(passes, logits),
        # Only what the step takes beyond a backward: the two do not happen at the same time.
        "step": max(0, in_step - passing.gathered - in_backward),
        "runtime": passing.runtime,
    }
    pinned = activations.pinned_bytes if activations else 0
    host = {} if on_host else {**in_host, "step": passing.window, "activations": saved + pinned}
    return Forecast(
        name=name,
        settings=settings,
        device=_ordered(device),
        host=_ordered(host),
        pinned_bytes=sum(in_host.values()),
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
        gathers: bytes of a step's gradients, which gather during backward.
        moves: activations move to the host.
    """
    if activations is None:
        return Peak(gathers, 0, plan.gradient_buffers)
    if moves or not plan.gradient_buffers:
        # The curve does not say when activations leave the device, and so not which buffers are there at the peak.
        return activations.peak_beside(gathers)._replace(buffers=plan.gradient_buffers)
    return activations.peak_beside(gathers, _buffers_at([live.gradient for live in activations.curve], costs))


def forecast_ddp(
    state: DdpState, passing: Passing, activations: Activations | None, *, accumulates: bool = False
) -> Forecast:
    """Forecasts a rank's memory under DistributedDataParallel. `accumulates`: as `forecast`'s."""
    there = state.gradients if accumulates else 0
    peak = activations.peak_beside(state.gradients - there) if activations else Peak(0, 0)
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


# ---- Memory that a rank may take, and whether a forecast fits, is close to it, or is too large ----

FITS, CLOSE, TOO_LARGE = "fits", "close", "too large"
"""What may be said of a set-up, see [Note: three classes]."""

FORECAST_ERROR = 0.15
"""By so much at most a forecast differs from the peak that is measured: the bound of scripts/bench/planned_peaks.py, whose cells
lie between 6 % below the measured peak and 8 % above it."""

RESERVE = {"accelerator": 0.08, "host": 0.15, "host's heap": 0.3, "activations unknown": 0.4}
"""The part of free memory that a set-up which *fits* leaves, set by hand, by what takes it.

A caching allocator rounds up and splits. On a host there are page tables and sockets of the ranks, on the same account, and a
forecast may be 5 % low. glibc keeps freed blocks of up to 32 MiB in its heap, unless MALLOC_MMAP_THRESHOLD_ says less.
"""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes that a rank may take. None: not limited, as far as is known.

    [Note: three classes]
    A set-up *fits* if its forecast leaves the reserve of the device. It is *too large* if its forecast is above the device by
    more than a forecast has been wrong. Between the two it is *close*: it may run, or run out of memory. What is offloaded is
    counted, not estimated, so host memory and the disk know no *close*.

    Attributes:
        host: for each rank of a node. `disk` likewise.
        reserve: the part of the device that a set-up which fits leaves free.
    """

    device: int
    host: int | None = None
    disk: int | None = None
    reserve: float = RESERVE["accelerator"]

    def fit_of(self, forecast: Forecast) -> str:
        """FITS, CLOSE or TOO_LARGE."""
        needed = forecast.device_bytes
        if self._short_beside_device(forecast) or needed > self.device * (1 + FORECAST_ERROR):
            return TOO_LARGE
        return FITS if needed <= self.device * (1 - self.reserve) else CLOSE

    def describe(self, forecast: Forecast) -> str:
        """Names the class and its reason: `close: 390 of 390 MB`."""
        where, needed, there = self._short_beside_device(forecast) or ("", forecast.device_bytes, self.device)
        how = f"{where}, {of(needed, there)}" if where else of(needed, there)
        return f"{self.fit_of(forecast)}: {how if there else f'{size(needed)} of {where}, none was given'}"

    def _short_beside_device(self, forecast: Forecast) -> tuple[str, int, int] | None:
        """Names a place without room for offloaded state, with needed and free bytes."""
        needs = (("host memory", forecast.host_bytes, self.host), ("disk", forecast.disk_bytes, self.disk))
        for where, needed, there in needs:
            if there is not None and needed > there:
                return where, needed, there
        return None


def size(nbytes: float) -> str:
    """Formats bytes: 12.3 MB, 4.56 GB."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e9 else f"{gb(nbytes)} GB"


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}" if nbytes < 10e9 else f"{nbytes / 1e9:.1f}"


def of(part: float, whole: float) -> str:
    """Formats a share: 390 of 410 MB."""
    if max(part, whole) < 1e9:
        return f"{part / 1e6:.0f} of {whole / 1e6:.0f} MB"
    return f"{gb(part)} of {gb(whole)} GB"
