"""Computes the bytes of state on a rank from the layout of its buckets."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import ZeroConfig
from ..layout.blocks import moment_bytes
from ..layout.buckets import BucketLayout
from ..layout.gradient_buffers import GRAD_BUFFERS, pool_growth, pool_numel

_RESIDUAL_BYTES = 2
"""Bytes of an element of a residual (unsent part of a gradient): bfloat16."""


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """The layout of a bucket, and the bytes of an element in its different roles.

    Attributes:
        param_bytes, reduce_bytes, master_bytes: an element as a parameter, as a gradient in transit, and in the master.
        reduced_bytes: an element in the dtype of the sum over the ranks.
        gradient_bytes: an element in the dtype in which a gradient is kept for the step.
        keeps_master: the master is also kept between steps.
        state_itemsizes: bytes of an element for each kind of optimizer state; None if not known in advance.
        sharded: parameters are kept as a shard (stage 3).
        trained: False for parameters with neither gradient nor state.
        offloaded: masters and reduced gradients are offloaded.
        in_blocks: moments are stored in blocks of 8-bit codes.
        visits: optimizer state and separate masters are in host memory, and on the device for their step.
        state_in_files, parameters_in_files: optimizer state, or shards of parameters, are in files, each with the kept masters.
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
    offloaded: bool = False
    in_blocks: bool = False
    visits: bool = False
    state_in_files: bool = False
    parameters_in_files: bool = False

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters kept by a rank all the time."""
        return (self.layout.shard_numel if self.sharded else self.layout.numel) * self.param_bytes

    @property
    def kept_master_bytes(self) -> int:
        """Bytes of the rank's master between steps."""
        return self.layout.shard_numel * self.master_bytes * self.keeps_master

    @property
    def state_bytes(self) -> int | None:
        """Bytes of the rank's optimizer state as it is stored; None if not known in advance."""
        if self.state_itemsizes is None:
            return None
        if self.in_blocks:
            return len(self.state_itemsizes) * moment_bytes(self.layout, self.master_bytes)
        return sum(self.state_itemsizes) * self.layout.shard_numel

    @property
    def file_bytes(self) -> int:
        """Bytes of the rank's parameters, master and state in files."""
        found = self.parameter_bytes * self.parameters_in_files + (self.state_bytes or 0) * self.state_in_files
        # Masters in another dtype than the parameters belong to the state.
        is_parameters_own = self.parameters_in_files and self.master_bytes == self.param_bytes
        return found + self.kept_master_bytes * (self.state_in_files or is_parameters_own)

    @property
    def own_numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return self.layout.numel - sum(gap.numel for gap in self.layout.padding)


@dataclass(frozen=True, kw_only=True)
class StatePlan:
    """Bytes held by a rank, padding included. Gradient buffers are temporary; all other kinds exist throughout the step.

    Attributes:
        frozen: parameters without gradients, and buffers.
        residuals: unsent parts of gradients, kept by error feedback.
        in_files: the part of all kinds that is in files instead of memory.
    """

    parameters: int
    frozen: int
    masters: int
    gradients: int
    residuals: int
    gradient_buffers: int
    optimizer: int | None
    in_files: int

    @property
    def total(self) -> int:
        """Total of lasting bytes in host and device memory, as far as known in advance."""
        lasts = (self.parameters, self.frozen, self.masters, self.gradients, self.residuals)
        return sum(lasts) + (self.optimizer or 0) - self.in_files


@dataclass(frozen=True, kw_only=True)
class DdpState:
    """Bytes held by each rank of the same model under DistributedDataParallel, which keeps its gradient buckets.

    Attributes:
        optimizer: None if its state is not known in advance.
    """

    parameters: int
    frozen: int
    gradients: int
    gradient_buckets: int
    optimizer: int | None

    @property
    def total(self) -> int:
        """Total of all bytes, as far as known in advance."""
        return self.parameters + self.frozen + self.gradients + self.gradient_buckets + (self.optimizer or 0)


def _residual_bytes(layout: BucketLayout, replicas: int) -> int:
    """Bytes of a bucket's residual: of the whole bucket, and with several shard groups also of a shard and a part of a shard."""
    if layout.shards == 1:
        return 0
    between = layout.shard_numel + layout.shard_numel // replicas if replicas > 1 else 0
    return _RESIDUAL_BYTES * (layout.numel + between)


def plan_ddp(costs: Sequence[BucketCost], world_size: int, frozen: int = 0) -> DdpState:
    """Bytes of state for the parameters of these buckets if nothing is sharded.

    Args:
        frozen: bytes of parameters without gradients, and of buffers.
    """
    trained = [cost for cost in costs if cost.trained]
    parameters = sum(cost.own_numel * cost.param_bytes for cost in trained)
    return DdpState(
        parameters=parameters,
        frozen=frozen,
        gradients=parameters,
        # With one rank, nothing is reduced.
        gradient_buckets=parameters if world_size > 1 else 0,
        optimizer=_sum_if_known([_whole_state_bytes(cost) for cost in trained]),
    )


def plan_states(
    costs: Sequence[BucketCost],
    config: ZeroConfig,
    replicas: int = 1,
    kept_whole: int = 0,
    *,
    accumulates: bool = False,
) -> StatePlan:
    """Bytes of state for these buckets under the stage of `config`.

    Above stage 0 a rank keeps its shard of the gradients, and whole buckets pass through a pool (layout/gradient_buffers.py). If
    whole gradients are kept until the last micro-batch of a step, stage 1 reduces them in place; stages 2 and 3 keep them in
    addition to the pool.

    Args:
        replicas: number of shard groups.
        kept_whole: bytes of frozen parameters and buffers that are in no bucket.
        accumulates: a step has several micro-batches.
    """
    # Count before frozen buckets are dropped from `costs`, because their shards may also be in files.
    in_files = sum(cost.file_bytes for cost in costs)
    frozen = kept_whole + sum(cost.parameter_bytes for cost in costs if not cost.trained)
    costs = [cost for cost in costs if cost.trained]
    waits = accumulates and config.accumulates_locally
    is_cut = any(cost.offloaded or (cost.layout.shards > 1 and cost.layout.numel) for cost in costs)
    passes = config.stage >= 1 and is_cut
    pooled = passes and not (waits and config.stage == 1)
    gradients = sum(_gradient_bytes(cost, pooled) for cost in costs)
    if pooled and waits:
        gradients += sum(cost.own_numel * cost.param_bytes for cost in costs)
    return StatePlan(
        parameters=sum(cost.parameter_bytes for cost in costs),
        frozen=frozen,
        masters=sum(cost.kept_master_bytes for cost in costs),
        gradients=gradients,
        residuals=sum(_residual_bytes(cost.layout, replicas) for cost in costs)
        if config.comm.gradients != "none"
        else 0,
        gradient_buffers=_buffer_bytes(pool_numel([cost.layout for cost in costs], GRAD_BUFFERS), costs)
        if pooled
        else 0,
        optimizer=_sum_if_known([cost.state_bytes for cost in costs]),
        in_files=in_files,
    )


def _sum_if_known(parts: Sequence[int | None]) -> int | None:
    """Sums the parts; None if one is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _whole_state_bytes(cost: BucketCost) -> int | None:
    return None if cost.state_itemsizes is None else sum(cost.state_itemsizes) * cost.own_numel


def _buffer_bytes(whole_numel: int, costs: Sequence[BucketCost]) -> int:
    """Bytes of whole-gradient buffers with `whole_numel` elements, and of temporary memory for the sums of these buckets."""
    scratches = [cost.layout.shard_numel * cost.reduced_bytes for cost in costs if cost.offloaded]
    return whole_numel * max(cost.reduce_bytes for cost in costs) + sum(sorted(scratches, reverse=True)[:GRAD_BUFFERS])


def buffers_at(gradients: Sequence[str], costs: Sequence[BucketCost]) -> list[int]:
    """Bytes of whole-gradient buffers after each gradient of a backward. A bucket gets its buffer with its first gradient.

    Args:
        gradients: names of parameters in the order in which their gradients arrive. A name that is in no bucket opens no buffer.
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
    # Reduced in place if the dtype allows, otherwise copied into a shard next to the whole gradient.
    in_place = cost.reduce_bytes == cost.reduced_bytes == cost.gradient_bytes and not cost.offloaded
    return cost.layout.numel * cost.reduce_bytes + (0 if in_place else shard)
