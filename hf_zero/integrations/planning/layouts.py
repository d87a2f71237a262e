"""The engine's own layout of a model's state, with any number of ranks, moving nothing: a model without memory will do."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ...buckets.bucket import BucketKey
from ...buckets.precision import Precision
from ...comm.groups.groups import Groups, RankGroup
from ...config import ZeroConfig
from ...engine.build.bucketing import Division, Part, SplitKinds, owners, precision_of
from ...layout.slots import USUAL_ALIGNMENT, BucketLayout
from ...optimizer.state.state_kinds import state_itemsizes
from ...plan.states import BucketCost, DdpState, StatePlan, plan_ddp, plan_states


@dataclass(frozen=True, kw_only=True)
class PlannedBucket:
    """A bucket as the engine would make it.

    Attributes:
        unit: the modules of the unit of stage 3 that gathers it; "" for the root's and for what is in no unit.
        passing_bytes: what gathering it takes beyond the shard; 0 for one that is whole all the time.
        gathered_bytes: of all of it, in the dtype in which it is gathered.
    """

    unit: str
    cost: BucketCost
    passing_bytes: int
    gathered_bytes: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model's buckets with one config.

    Attributes:
        buckets: in the order in which they are reduced.
        kept_whole: bytes of frozen parameters and buffers that are in no bucket.
        groups: the ranks, as the engine would group them.
    """

    config: ZeroConfig
    groups: Groups
    buckets: tuple[PlannedBucket, ...]
    kept_whole: int

    @property
    def costs(self) -> list[BucketCost]:
        return [bucket.cost for bucket in self.buckets]

    def plan(self, *, accumulates: bool = False) -> StatePlan:
        """Bytes of state. `accumulates`: a step has several micro-batches."""
        return plan_states(
            self.costs,
            self.config,
            self.groups.replicate.size,
            kept_whole=self.kept_whole,
            accumulates=accumulates,
        )

    def gathered_bytes(self) -> int:
        """Parameters of stage 3 that are whole at a time, beyond the shards: the root, the unit in use and those ahead."""
        units: dict[str, int] = {}
        for bucket in self.buckets:
            if bucket.passing_bytes:
                units[bucket.unit] = units.get(bucket.unit, 0) + bucket.passing_bytes
        root = units.pop("", 0)
        if self.config.reshard_after_forward is False:
            return root + sum(units.values())
        return root + sum(sorted(units.values(), reverse=True)[: 1 + self.config.prefetch_units])


def ranks_without_a_group(world_size: int, ranks_a_node: int, config: ZeroConfig, backend: str) -> Groups:
    """Rank 0's groups of a run with so many ranks, which need not exist."""
    everyone = RankGroup(ranks=tuple(range(world_size)), place=0)
    alone = RankGroup(ranks=(0,), place=0)
    wanted = config.comm.shard_group_size
    size = 1 if config.stage == 0 else wanted if isinstance(wanted, int) else world_size
    shard = RankGroup(ranks=tuple(range(size)), place=0)
    replicate = RankGroup(ranks=tuple(range(0, world_size, size)), place=0)
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
) -> Layout:
    """The buckets that the engine would make of a model.

    Args:
        device: that it is trained on; the model may be elsewhere.
        experts: parameters that only `expert_ranks` ranks share.

    Raises:
        ConfigError, ValueError: as the engine would.
    """
    owner = owners(model, optimizers)
    division = Division(
        model,
        owner,
        optimizers,
        config,
        groups,
        device=device,
        align=USUAL_ALIGNMENT,
        split=SplitKinds(experts=experts, expert_shards=1 if config.stage == 0 else expert_ranks),
    )
    places = _Places(config, device, sum(p.numel() for p in owner))
    state_of: dict[tuple[int, int, torch.dtype], tuple[int, ...] | None] = {}
    buckets: list[PlannedBucket] = []
    taken: set[str] = set()
    may_lie_in_place = device.type == "cpu" and not config.offload.moves_params
    for part in division.parts:
        for layout in division.layouts_of(part, first_index=len(buckets)):
            key = cast(BucketKey, layout.key)
            taken.update(slot.name for slot in layout.slots)
            place = places.next(key, sum(slot.interval.numel for slot in layout.slots), sharded=part.sharded)
            apart = place.masters_apart
            adds = groups.backend == "gloo" and device.type == "cpu" and groups.shard_size > 1
            precision = precision_of(config, key, weights=None, adds_in_master=adds, apart=apart)
            tried = (key.optimizer, key.group, precision.master)
            if tried not in state_of:
                state_of[tried] = _state_of(optimizers, *tried)
            buckets.append(_planned(part, layout, place, precision, state_of[tried], in_place=may_lie_in_place))
    others = [p for name, p in model.named_parameters() if name not in taken]
    kept_whole = sum(p.nbytes for p in others) + sum(buffer.nbytes for buffer in model.buffers())
    return Layout(config=config, groups=groups, buckets=tuple(buckets), kept_whole=kept_whole)


def _planned(
    part: Part,
    layout: BucketLayout,
    place: "_Place",
    precision: Precision,
    state: tuple[int, ...] | None,
    *,
    in_place: bool,
) -> PlannedBucket:
    """A bucket and what it costs.

    Args:
        state: bytes an element of each kind of optimizer state.
        in_place: a shard that is kept in the dtype of the parameters may be part of what is gathered.
    """
    is_master = place.parameters_are_masters and precision.master == precision.kept
    keeps_master = precision.keeps_master and not is_master
    whole_bytes = layout.numel * precision.param.itemsize
    own_bytes = layout.shard_numel * precision.param.itemsize if in_place and precision.param == precision.kept else 0
    return PlannedBucket(
        unit=" ".join(part.modules),
        gathered_bytes=whole_bytes,
        passing_bytes=whole_bytes - own_bytes if part.sharded else 0,
        cost=BucketCost(
            layout=layout,
            param_bytes=precision.kept.itemsize,
            reduce_bytes=precision.reduce.itemsize,
            reduced_bytes=precision.reduced.itemsize,
            gradient_bytes=precision.master.itemsize,
            master_bytes=precision.master.itemsize,
            has_master=precision.has_master,
            keeps_master=keeps_master,
            state_itemsizes=state,
            sharded=part.sharded,
            trained=cast(BucketKey, layout.key).trained,
            apart=place.is_apart,
            in_files=place.bytes_in_files(
                precision.kept.itemsize * part.sharded, sum(state or ()), precision.master.itemsize * keeps_master
            ),
        ),
    )


def ddp_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], world_size: int) -> DdpState:
    """The bytes of state that each rank would hold under DistributedDataParallel."""
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
class _Place:
    """Where a bucket's state and its shard of parameters would be; what tiers know of themselves, without their folders."""

    is_apart: bool
    masters_apart: bool
    state_in_files: bool
    parameters_in_files: bool
    parameters_are_masters: bool

    def bytes_in_files(self, parameter: int, state: int, master: int) -> int:
        """An element's."""
        return (
            self.parameters_in_files * parameter
            + self.state_in_files * state
            + (self.state_in_files or self.parameters_in_files) * master
        )


class _Places:
    """Deals buckets to tiers as `Placement` does, see [Note: which part moves]."""

    def __init__(self, config: ZeroConfig, device: torch.device, trained_numel: int):
        self._offload, self._on_host = config.offload, device.type == "cpu"
        self._left_numel = self._offload.ratio * trained_numel if self._offload.moves_state else 0.0

    def next(self, key: BucketKey, numel: int, *, sharded: bool) -> _Place:
        offload = self._offload
        moves = key.trained and self._left_numel > 0.5
        self._left_numel -= numel if key.trained else 0
        in_files = moves and offload.optimizer == "nvme"
        early = isinstance(offload.speculate_bytes, int) and offload.speculate_bytes > 0
        is_apart = moves and (not in_files or not self._on_host or early)
        params: Mapping[str, bool] = {"none": is_apart, "cpu": not moves, "nvme": True}
        return _Place(
            is_apart=is_apart,
            masters_apart=params[offload.params] if sharded else is_apart,
            state_in_files=in_files,
            parameters_in_files=sharded and offload.params == "nvme",
            parameters_are_masters=sharded and offload.params == "nvme" and moves,
        )
