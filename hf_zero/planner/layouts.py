"""Bucket layouts, memory forecasts and step times of a model under given settings."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from ..buckets.bucket import BucketKey
from ..buckets.packed import bytes_of_scales, scales_as_parameters
from ..buckets.precision import Precision
from ..buckets.rows import PACKING_BYTES
from ..comm.groups import Groups, RankGroup
from ..config import ZeroConfig
from ..engine.division import Division, Part, SplitKinds, owners, precision_of, shards_parameters
from ..forecast.peak import Activations, Forecast, Passing, forecast, forecast_ddp
from ..forecast.state import BucketCost, DdpState, StatePlan, plan_ddp, plan_states
from ..layout.buckets import USUAL_ALIGNMENT, BucketLayout
from ..layout.gradient_buffers import GRAD_BUFFERS
from ..offload.device_window import WINDOW as ON_DEVICE
from ..offload.walk import WINDOW
from ..optimizer.scope import steps_on_device
from ..optimizer.trial_step import product_flops, state_itemsizes
from .search import Machine, Piece, StepTime, Work, simulate

# ---- The engine's layout of a model's state for any number of ranks, without allocating memory ----


@dataclass(frozen=True, kw_only=True)
class PlannedBucket:
    """A bucket in the engine's layout.

    Attributes:
        unit: the modules of the stage 3 unit that gathers the bucket; "" for the root's, and for buckets in no unit.
        cost: the bucket's bytes per element and its layout.
        passing_bytes: bytes of a gather in addition to the shard; 0 if the bucket is whole all the time.
        gathered_bytes: bytes of the whole bucket in the dtype of the gather.
        step_flops: operations of matrix products in the optimizer's step of the whole bucket.
    """

    unit: str
    cost: BucketCost
    passing_bytes: int
    gathered_bytes: int
    step_flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model's buckets with one config.

    Attributes:
        config: the config.
        groups: the ranks, grouped as the engine would.
        buckets: in the order of reduction.
        kept_whole: bytes of frozen parameters and buffers outside of all buckets.
    """

    config: ZeroConfig
    groups: Groups
    buckets: tuple[PlannedBucket, ...]
    kept_whole: int

    @property
    def costs(self) -> list[BucketCost]:
        return [bucket.cost for bucket in self.buckets]

    def plan(self, *, accumulates: bool = False) -> StatePlan:
        """Returns the bytes of state. `accumulates`: a step has several micro-batches."""
        return plan_states(
            self.costs,
            self.config,
            self.groups.replicate.size,
            kept_whole=self.kept_whole,
            accumulates=accumulates,
        )

    def gathered_bytes(self) -> int:
        """Returns the maximum gathered bytes of stage 3 beyond the shards: the root, the current unit and prefetched ones."""
        units: dict[str, int] = {}
        for bucket in self.buckets:
            if bucket.passing_bytes:
                units[bucket.unit] = units.get(bucket.unit, 0) + bucket.passing_bytes
        root = units.pop("", 0)
        if self.config.reshard_after_forward is False:
            return root + sum(units.values())
        return root + sum(sorted(units.values(), reverse=True)[: 1 + self.config.prefetch_units])


def ranks_without_a_group(world_size: int, ranks_a_node: int, config: ZeroConfig, backend: str) -> Groups:
    """Returns rank 0's groups of a run with this number of ranks, without creating process groups."""
    everyone = RankGroup(ranks=tuple(range(world_size)), index=0)
    alone = RankGroup(ranks=(0,), index=0)
    wanted = config.comm.shard_group_size
    size = 1 if config.stage == 0 else wanted if isinstance(wanted, int) else world_size
    shard = RankGroup(ranks=tuple(range(size)), index=0)
    replicate = RankGroup(ranks=tuple(range(0, world_size, size)), index=0)
    return Groups(
        backend="local" if world_size == 1 else backend,
        world=everyone,
        shard=shard if size > 1 else alone,
        replicate=replicate if world_size > size else alone,
        gather=shard if size > 1 else alone,
        nodes=tuple(rank // max(1, ranks_a_node) for rank in range(world_size)),
    )


def lay_out(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
    groups: Groups,
    device: torch.device,
    experts: Collection[nn.Parameter] = (),
    expert_ranks: int = 1,
    free_bytes: int | None = None,
) -> Layout:
    """Returns the buckets that the engine would make of a model.

    Args:
        model: the model, on any device.
        optimizers: over the model's parameters.
        config: the engine's settings.
        groups: the ranks.
        device: the training device.
        experts: parameters shared by only `expert_ranks` ranks.
        expert_ranks: see `experts`.
        free_bytes: the device's memory without the model; None if it has room for every model.

    Raises:
        ConfigError, ValueError: the engine would raise the same error.
    """
    with scales_as_parameters(model) if shards_parameters(config, groups) else nullcontext():
        return _lay_out(model, optimizers, config, groups, device, experts, expert_ranks, free_bytes)


def _lay_out(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
    groups: Groups,
    device: torch.device,
    experts: Collection[nn.Parameter],
    expert_ranks: int,
    free_bytes: int | None,
) -> Layout:
    owner = owners(model, optimizers)
    expert_shards = 1 if config.stage == 0 else expert_ranks
    division = Division(
        model,
        owner,
        optimizers,
        config,
        groups,
        device=device,
        align=USUAL_ALIGNMENT,
        split=SplitKinds(experts=experts, expert_shards=expert_shards),
    )
    # The engine is built when frozen parameters and buffers are on the device already.
    others_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if t not in owner)
    visits = steps_on_device(
        config,
        optimizers,
        device,
        [(p, expert_shards if p in experts else groups.shard_size) for p in owner],
        lambda: None if free_bytes is None else free_bytes - others_bytes,
    )
    placements = _Placements(config, device, sum(p.numel() for p in owner), visits=visits)
    state_of: dict[tuple[int, int, torch.dtype], tuple[int, ...] | None] = {}
    shapes = {name: p.shape for name, p in model.named_parameters()}

    @cache
    def flops_of(optimizer: int, group: int, shape: torch.Size) -> int:
        tried = optimizers[optimizer]
        return product_flops(tried, tried.param_groups[group], shape)

    buckets: list[PlannedBucket] = []
    taken: set[str] = set()
    may_lie_in_place = device.type == "cpu" and not config.offload.moves_params
    # From the kind of device, because a machine without GPUs may plan for one with GPUs.
    has_kernels = device.type == "cuda" and config.kernels != "never"
    for part in division.parts:
        for layout in division.layouts_of(part, first_index=len(buckets)):
            key = cast(BucketKey, layout.key)
            taken.update(slot.name for slot in layout.slots)
            placement = placements.next(key, sum(slot.interval.numel for slot in layout.slots), sharded=part.sharded)
            separate_master = placement.separates_masters
            adds = groups.backend == "gloo" and device.type == "cpu" and groups.shard_size > 1
            # Parameters rounded to blocks keep their masters.
            copies = placement.copies_masters and (part.sharded or config.comm.weights == "none")
            precision = precision_of(config, key, adds_in_master=adds, separate_master=separate_master, copies=copies)
            tried = (key.optimizer, key.group, precision.master)
            if tried not in state_of:
                state_of[tried] = _state_of(optimizers, *tried)
            by_kernel = has_kernels and key.optimizer >= 0 and _has_kernel(optimizers[key.optimizer])
            made = _planned(
                part,
                layout,
                placement,
                precision,
                state_of[tried],
                step_flops=sum(flops_of(key.optimizer, key.group, shapes[slot.name]) for slot in layout.slots)
                if layout.intact and key.optimizer >= 0
                else 0,
                in_place=may_lie_in_place,
                by_kernel=by_kernel,
                in_blocks=config.quantizes_moments,
            )
            buckets.append(made)
    others = [p for name, p in model.named_parameters() if name not in taken]
    kept_whole = sum(tensor.nbytes for tensor in (*others, *model.buffers())) + bytes_of_scales(model)
    return Layout(config=config, groups=groups, buckets=tuple(buckets), kept_whole=kept_whole)


def _planned(
    part: Part,
    layout: BucketLayout,
    placement: "_Placement",
    precision: Precision,
    state: tuple[int, ...] | None,
    *,
    step_flops: int,
    in_place: bool,
    by_kernel: bool,
    in_blocks: bool,
) -> PlannedBucket:
    """Returns a bucket with its cost.

    Args:
        part: the modules and parameters of the bucket.
        layout: the bucket's layout.
        placement: the tiers of its state and parameters.
        precision: its dtypes.
        state: bytes per element of each kind of optimizer state.
        step_flops: operations of matrix products in the optimizer's step.
        in_place: whether a shard with the dtype of the parameters may be a part of the gathered memory.
        by_kernel: whether a GPU kernel steps the bucket; it reads bfloat16 gradients as they were reduced.
        in_blocks: whether moments are stored in blocks.
    """
    stays_reduced = by_kernel and precision.reduced == torch.bfloat16 and not placement.is_offloaded
    is_master = placement.parameters_are_masters and precision.master == precision.kept
    keeps_master = precision.keeps_master and not is_master
    whole_bytes = layout.numel * precision.param.itemsize
    own_bytes = layout.shard_numel * precision.param.itemsize if in_place and precision.param == precision.kept else 0
    return PlannedBucket(
        unit=" ".join(part.modules),
        gathered_bytes=whole_bytes,
        step_flops=step_flops,
        passing_bytes=whole_bytes - own_bytes if part.sharded else 0,
        cost=BucketCost(
            layout=layout,
            param_bytes=precision.kept.itemsize,
            reduce_bytes=precision.reduce.itemsize,
            reduced_bytes=precision.reduced.itemsize,
            gradient_bytes=(precision.reduced if stays_reduced else precision.master).itemsize,
            master_bytes=precision.master.itemsize,
            has_master=precision.has_master,
            keeps_master=keeps_master,
            state_itemsizes=state,
            sharded=part.sharded,
            trained=cast(BucketKey, layout.key).trained,
            offloaded=placement.is_offloaded,
            visits=placement.visits,
            in_blocks=in_blocks,
            state_in_files=placement.state_in_files,
            parameters_in_files=placement.parameters_in_files,
        ),
    )


def ddp_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], world_size: int) -> DdpState:
    """Returns the bytes of state each rank would hold under DistributedDataParallel."""
    config = ZeroConfig(stage=0)
    groups = ranks_without_a_group(world_size, world_size, config, "gloo")
    layout = lay_out(model, optimizers, config, groups, torch.device("cpu"))
    return plan_ddp(layout.costs, world_size, layout.kept_whole)


def _state_of(
    optimizers: Sequence[torch.optim.Optimizer], optimizer: int, group: int, dtype: torch.dtype
) -> tuple[int, ...] | None:
    if optimizer < 0:
        return ()
    tried = optimizers[optimizer]
    return state_itemsizes(tried, tried.param_groups[group], dtype)


@dataclass(frozen=True, kw_only=True)
class _Placement:
    """A bucket's tiers of state and of parameters, without the folders created by real tiers."""

    is_offloaded: bool
    visits: bool
    separates_masters: bool
    copies_masters: bool
    state_in_files: bool
    parameters_in_files: bool
    parameters_are_masters: bool


class _Placements:
    """Assigns buckets to tiers like `Placement`; see [Note: which part moves].

    Args:
        visits: whether state in host memory is stepped on the device.
    """

    def __init__(self, config: ZeroConfig, device: torch.device, trained_numel: int, *, visits: bool):
        self._steps_on_device = visits
        self._offload, self._on_host = config.offload, device.type == "cpu"
        self._left_numel = self._offload.ratio * trained_numel if self._offload.moves_state else 0.0

    def next(self, key: BucketKey, numel: int, *, sharded: bool) -> _Placement:
        offload = self._offload
        moves = key.trained and self._left_numel > 0.5
        self._left_numel -= numel if key.trained else 0
        in_files = moves and offload.optimizer == "nvme"
        visits = moves and self._steps_on_device
        is_offloaded = moves and not visits and (not in_files or not self._on_host)
        params: Mapping[str, bool] = {"none": is_offloaded, "cpu": not moves, "nvme": True}
        return _Placement(
            is_offloaded=is_offloaded,
            visits=visits,
            separates_masters=params[offload.params] if sharded else is_offloaded,
            copies_masters=in_files and not visits and not (sharded and offload.moves_params),
            state_in_files=in_files,
            parameters_in_files=sharded and offload.params == "nvme",
            parameters_are_masters=sharded and offload.params == "nvme" and moves,
        )


# ---- Forecasts for every set-up of a model, from the engine's layout of its state and a trace of its activations ----

RUNTIME_ON_HOST_BYTES = 28 * 2**20
"""Thread pools, libraries loaded at the first matrix product, gloo's buffers. Set by hand from the peaks of planned_peaks.py."""

CONTEXT_BYTES, WORKSPACES_BYTES, COMMUNICATORS_BYTES = 400 * 2**20, 144 * 2**20, 256 * 2**20
"""A CUDA context; cuBLAS workspaces and kernels loaded at their first call; NCCL buffers. Set by hand. On an H100 the
workspaces of two threads needed 64 MiB; the remaining numbers have not been measured."""

_FUSED_BY_KERNELS = ("AdamW", "Adam", "SGD", "Lion")


def _has_kernel(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__name__ in _FUSED_BY_KERNELS


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model, inputs and ranks to plan for.

    Attributes:
        model: the model, with or without memory; not changed.
        optimizers: over the model's parameters.
        device: the training device.
        world_size: number of ranks.
        ranks_a_node: number of ranks per host.
        activations: activations of a micro-batch; None if unknown.
        accumulates: whether a step has several micro-batches.
        runtime_bytes: memory of libraries not yet in use when training begins; None for a usual value.
        experts: parameters shared by only `expert_ranks` of the ranks.
        free_bytes: the device's memory when the engine is built, without the model; None if it has room for every model.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    world_size: int
    ranks_a_node: int
    activations: Activations | None
    accumulates: bool = False
    runtime_bytes: int | None = None
    experts: Collection[nn.Parameter] = ()
    expert_ranks: int = 1
    free_bytes: int | None = None

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    @property
    def backend(self) -> str:
        return "gloo" if self.on_host else "nccl"

    def layout(self, config: ZeroConfig) -> Layout:
        """Returns the engine's buckets under a config."""
        groups = ranks_without_a_group(self.world_size, self.ranks_a_node, config, self.backend)
        how = (self.experts, self.expert_ranks, self.free_bytes)
        return lay_out(self.model, self.optimizers, config, groups, self.device, *how)

    def forecast(self, name: str, settings: Mapping[str, Any], config: ZeroConfig) -> Forecast:
        """Forecasts the bytes a rank needs under a config.

        Raises:
            ConfigError, ValueError: the engine would refuse the config.
        """
        return self.forecast_of(name, settings, self.layout(config))

    def forecast_of(self, name: str, settings: Mapping[str, Any], layout: Layout) -> Forecast:
        """Forecasts the bytes a rank needs for a layout."""
        config, plan = layout.config, layout.plan(accumulates=self.accumulates)
        passing = self._passing(
            gathered=layout.gathered_bytes(),
            received=_received_bytes(layout, reduces_in_place=not plan.gradient_buffers) if self.on_host else 0,
            step=self._step_bytes(
                [bucket.cost.layout.shard_numel * bucket.cost.master_bytes for bucket in layout.buckets]
            ),
            window=_window_bytes(layout),
            file_buffers=_file_buffers(layout),
        )
        return forecast(
            name,
            settings,
            config,
            plan,
            layout.costs,
            passing,
            self.activations,
            on_host=self.on_host,
            accumulates=self.accumulates,
        )

    def forecast_ddp(self) -> Forecast:
        """Forecasts the bytes a rank needs under DistributedDataParallel."""
        state = ddp_state(self.model, self.optimizers, self.world_size)
        largest = [p.nbytes for p in self.model.parameters() if p.requires_grad]
        passing = self._passing(step=self._step_bytes(largest, kernels=False))
        return forecast_ddp(state, passing, self.activations, accumulates=self.accumulates)

    def _passing(self, **held: int) -> Passing:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        on_device = CONTEXT_BYTES + WORKSPACES_BYTES + (COMMUNICATORS_BYTES if self.world_size > 1 else 0)
        usual = RUNTIME_ON_HOST_BYTES if self.on_host else on_device
        return Passing(
            runtime=usual if self.runtime_bytes is None else self.runtime_bytes,
            largest_parameter=max((tensor.nbytes for tensor in tensors), default=0),
            model=sum(tensor.nbytes for tensor in tensors),
            **held,
        )

    def _step_bytes(self, sizes: Sequence[int], *, kernels: bool = True) -> int:
        """Returns the temporary bytes of a step over tensors of these sizes: the largest one on the host, all with foreach."""
        found = 0
        for optimizer in self.optimizers:
            settings = optimizer.param_groups[0]
            if settings.get("fused"):
                continue
            if self.on_host and not settings.get("foreach"):
                largest = max((p.nbytes for group in optimizer.param_groups for p in group["params"]), default=0)
                found = max(found, 2 * min(largest, max(sizes, default=0)))
            elif not (kernels and _has_kernel(optimizer)):
                found = max(found, sum(sizes))
        return found


def _received_bytes(layout: Layout, *, reduces_in_place: bool) -> int:
    """Returns the bytes of gradient parts received from peers, if ranks send to each other point to point.

    Args:
        layout: the layout.
        reduces_in_place: True if all buckets may be in flight until the end of backward and a rank sums within its send
            buffer. Otherwise only a few are in flight, and the first part is received directly into the sum.
    """
    # Through a pool, the first received part is the buffer of the sum.
    spared = 1 if reduces_in_place else 2
    received = (
        max(0, cost.layout.shards - spared) * cost.layout.shard_numel * cost.reduce_bytes
        for cost in layout.costs
        if cost.trained
    )
    parts = sorted(received, reverse=True)
    return sum(parts if reduces_in_place else parts[:GRAD_BUFFERS])


def _window_bytes(layout: Layout) -> int:
    """Returns the bytes of state in the memory of the step, on the way from and to files or host memory: the largest buckets."""
    in_files = layout.config.offload.optimizer == "nvme"
    passing = [cost for cost in layout.costs if cost.trained and (cost.file_bytes if in_files else cost.visits)]
    if in_files and any(cost.visits for cost in passing):
        # One bucket. In a first step, the optimizer makes its state in addition to the file's copy and unpacked moments.
        return max(cost.file_bytes + _full_state_bytes(cost) * (1 + cost.in_blocks) for cost in passing)
    sizes = [_passing_bytes(cost) for cost in passing]
    return sum(sorted(sizes, reverse=True)[: 1 + WINDOW if in_files else ON_DEVICE])


def _file_buffers(layout: Layout) -> int:
    """Returns the bytes of host memory between files and a step on the device."""
    sizes = [cost.file_bytes for cost in layout.costs if cost.trained and cost.visits and cost.state_in_files]
    return min(1 + WINDOW, len(sizes)) * max(sizes, default=0)


def _passing_bytes(cost: BucketCost) -> int:
    """Returns the bytes of a bucket's optimizer state and separate master during its step: from files, without blocks."""
    state = cost.state_bytes if cost.visits else _full_state_bytes(cost)
    return (state or 0) + cost.kept_master_bytes


def _full_state_bytes(cost: BucketCost) -> int:
    return sum(cost.state_itemsizes or ()) * cost.layout.shard_numel


# ---- The time of a step of a set-up, simulated from the engine's buckets and the traced work ----

_DDP_BUCKET_BYTES = 25 * 2**20


def step_time(layout: Layout, machine: Machine, activations: Activations, micro_batches: int) -> StepTime:
    """Estimates an optimizer step with a layout. `micro_batches`: micro-batches per step."""
    groups, config = layout.groups, layout.config
    group = groups.shard if groups.shard.size > 1 else groups.replicate
    nodes = len({groups.nodes[rank] for rank in group.ranks})
    work = _work(layout, machine, activations, micro_batches)
    return simulate(_pieces(layout), config, machine, work, ranks=group.size, nodes=nodes)


def ddp_step_time(layout: Layout, machine: Machine, activations: Activations, micro_batches: int) -> StepTime:
    """Estimates a step under DistributedDataParallel, as stage 0 with buckets of 25 MiB. `layout`: a stage 0 layout."""
    config = ZeroConfig(stage=0)
    pieces: list[Piece] = []
    for piece in _pieces(layout):
        parts = max(1, -(-piece.reduce_bytes // _DDP_BUCKET_BYTES))
        each = Piece(numel=piece.numel // parts, reduce_bytes=piece.reduce_bytes // parts, gather_bytes=0)
        pieces += [each] * parts
    group = layout.groups.replicate
    nodes = len({layout.groups.nodes[rank] for rank in group.ranks})
    work = _work(layout, machine, activations, micro_batches)
    return simulate(pieces, config, machine, work, ranks=group.size, nodes=nodes)


def _pieces(layout: Layout) -> list[Piece]:
    """Returns the buckets in the order of reduction; at stage 3, the buckets of one unit are joined."""
    found: dict[object, Piece] = {}
    for number, bucket in enumerate(layout.buckets):
        cost = bucket.cost
        key = (bucket.unit, bool(bucket.unit) or number) if layout.config.stage == 3 else number
        before = found.get(key, Piece(numel=0, reduce_bytes=0, gather_bytes=0, reduce_calls=0, gather_calls=0))
        reduce_bytes, encoding_bytes = _reduced(layout.config, cost)
        gather_bytes, gather_encoding_bytes = _gathered(layout.config, bucket)
        found[key] = Piece(
            numel=before.numel + cost.own_numel,
            reduce_bytes=before.reduce_bytes + reduce_bytes,
            gather_bytes=before.gather_bytes + gather_bytes,
            encoding_bytes=before.encoding_bytes + encoding_bytes,
            gather_encoding_bytes=before.gather_encoding_bytes + gather_encoding_bytes,
            reduce_calls=before.reduce_calls + _calls(reduce_bytes, layout.config.comm.gradients != "none"),
            gather_calls=before.gather_calls + _calls(gather_bytes, gather_encoding_bytes > 0),
            in_layer=bool(bucket.unit),
        )
    return list(found.values())


_SCALE_BYTES = 4 / 256
"""Bytes per element for its block's float32 scale."""


def _reduced(config: ZeroConfig, cost: BucketCost) -> tuple[int, int]:
    """Returns the bytes of a bucket's gradients on the link, and the bytes of memory traffic of encoding and decoding."""
    if not cost.trained:
        return 0, 0
    numel, wide = cost.layout.numel, cost.reduce_bytes
    if config.comm.gradients != "none":
        # Encoding reads gradients and the bfloat16 residual, and writes residual and codes. Decoding reads codes.
        return int(numel * (1 + _SCALE_BYTES)), numel * (wide + 2 + 2 + 1 + 1)
    # A reduction in fewer bits than the gradients' copies them once.
    is_cast = cost.reduce_bytes < cost.param_bytes
    return numel * wide, numel * (cost.param_bytes + wide) * is_cast


def _gathered(config: ZeroConfig, bucket: PlannedBucket) -> tuple[int, int]:
    """Returns the same two numbers for a bucket's parameters. Each rank encodes its shard and decodes the whole bucket."""
    numel, nbytes = bucket.cost.layout.numel, bucket.gathered_bytes
    if config.comm.weights == "none" or not bucket.cost.trained:
        return nbytes, 0
    return int(numel * (1 + _SCALE_BYTES)), int(numel + nbytes + bucket.cost.layout.shard_numel * 5)


def _calls(nbytes: int, in_blocks: bool) -> int:
    """Returns the number of collectives for a bucket's bytes: codes and scales of blocks are sent separately."""
    return (2 if in_blocks else 1) if nbytes else 0


def _work(layout: Layout, machine: Machine, activations: Activations, micro_batches: int) -> Work:
    offload = layout.config.offload
    on_device = on_host = down = up = visits = passes = edge = 0
    device_flops = host_flops = 0.0
    for bucket in layout.buckets:
        cost = bucket.cost
        if not cost.trained:
            continue
        numel, state = cost.layout.shard_numel, cost.state_itemsizes or ()
        stepped = numel * (
            cost.gradient_bytes + 2 * (cost.master_bytes + sum(state)) + cost.param_bytes * cost.has_master
        )
        packed = numel * PACKING_BYTES * len(state) * cost.in_blocks
        products = bucket.step_flops / cost.layout.shards
        if cost.offloaded:
            on_host += stepped + packed
            host_flops += products
            down += numel * cost.gradient_bytes
            # Offloaded parameters are copied when they are gathered.
            up += numel * cost.param_bytes * (not offload.moves_params)
            edge = max(edge, numel * cost.gradient_bytes)
        else:
            on_device += stepped
            device_flops += products
        if cost.visits and cost.state_in_files:
            passes += 2 * cost.file_bytes
        elif cost.visits:
            visits += _passing_bytes(cost)
    fetched = sum(b.cost.parameter_bytes for b in layout.buckets) if offload.moves_params else 0
    # Gradients of earlier micro-batches are in memory before the last backward.
    gradients = layout.plan().gradients if micro_batches == 1 else 0
    return Work(
        forward_flops=activations.forward_flops,
        backward_flops=activations.flops - activations.forward_flops,
        model_flops=3 * activations.forward_flops,
        micro_batches=micro_batches,
        step_bytes=on_device,
        step_flops=device_flops,
        host_step_bytes=on_host,
        host_step_flops=host_flops,
        down_bytes=down,
        up_bytes=up,
        edge_bytes=edge,
        visiting_bytes=visits,
        window_bytes=_window_bytes(layout) if visits else 0,
        passing_bytes=passes,
        freed_bytes=max(0, activations.saved_bytes * (offload.activations != "cpu") - gradients),
        # All state and masters of a step are read and written.
        disk_bytes=sum(2 * bucket.cost.file_bytes for bucket in layout.buckets if bucket.cost.trained),
        fetched_bytes=fetched,
        moved_activation_bytes=activations.saved_bytes if offload.activations == "cpu" else 0,
        # The ranks of one sequence are neighbors, so the bandwidth within a node applies.
        exchange_s=activations.exchanged_bytes / machine.node_bytes_a_second,
    )
