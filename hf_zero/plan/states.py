"""The plan printed at the start: dtypes, buckets, and the bytes of state that a rank will hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import CommConfig, ZeroConfig
from ..layout.blocks import moment_bytes
from ..layout.pool import GRAD_BUFFERS, pool_numel
from ..layout.slots import BucketLayout

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
        """All that lasts in memory, the host's and the device's, as far as it is known beforehand."""
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
        """As far as it is known beforehand."""
        return self.parameters + self.frozen + self.gradients + self.gradient_buckets + (self.optimizer or 0)


def keeps_residuals(comm: CommConfig) -> bool:
    """Whether ranks keep what quantising loses of their gradients."""
    return comm.gradients != "none" and comm.error_feedback


def _residual_bytes(layout: BucketLayout, replicas: int) -> int:
    """What error feedback keeps of a bucket: the whole, and between several shard groups also a shard and a part of it."""
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

    Above stage 0 a rank keeps the shard of gradients, and whole buckets pass through a pool (layout/pool.py). Where whole
    gradients wait for the last micro-batch of a step, stage 1 reduces them where they are; stages 2 and 3 have them beside.

    Args:
        replicas: shard groups.
        beside: bytes for steps out of their time.
        kept_whole: bytes of frozen parameters and buffers that are in no bucket.
        accumulates: a step has several micro-batches.
    """
    in_files = sum(cost.layout.shard_numel * cost.in_files for cost in costs)
    frozen = kept_whole + sum(cost.parameter_bytes for cost in costs if not cost.trained)
    costs = [cost for cost in costs if cost.trained]
    whole = {True: 0, False: 0}
    for cost in costs:
        whole[cost.layout.shards == 1] += cost.layout.numel
    waits = accumulates and config.accumulates_locally
    passes = config.stage >= 1 and (whole[False] > 0 or any(cost.apart for cost in costs))
    pooled = passes and not (waits and config.stage == 1)
    gradients = sum(_gradient_bytes(cost, pooled) for cost in costs)
    if pooled and waits:
        gradients += sum(cost.own_numel * cost.param_bytes for cost in costs)
    return StatePlan(
        parameters=sum(cost.parameter_bytes for cost in costs),
        frozen=frozen,
        masters=sum(cost.layout.shard_numel * cost.master_bytes for cost in costs if cost.keeps_master),
        gradients=gradients,
        residuals=sum(_residual_bytes(cost.layout, replicas) for cost in costs) if keeps_residuals(config.comm) else 0,
        gradient_buffers=_buffer_bytes(costs, GRAD_BUFFERS) if pooled else 0,
        optimizer=_sum_if_known([_state_bytes(cost, config) for cost in costs]),
        beside=beside,
        in_files=in_files,
    )


def _sum_if_known(parts: Sequence[int | None]) -> int | None:
    """None where a part is not known."""
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


def _buffer_bytes(costs: Sequence[BucketCost], limit: int) -> int:
    """Of whole gradients on their way, and of sums that do not land where they stay."""
    whole = pool_numel([cost.layout for cost in costs], limit) * max(cost.reduce_bytes for cost in costs)
    beside = [cost.layout.shard_numel * cost.reduced_bytes for cost in costs if cost.apart]
    return whole + sum(sorted(beside, reverse=True)[:limit])


def _gradient_bytes(cost: BucketCost, pooled: bool) -> int:
    shard = cost.layout.shard_numel * cost.gradient_bytes
    if pooled:
        return shard
    # Reduced in place where it can stay so, and else copied into a shard beside the whole gradient.
    in_place = cost.reduce_bytes == cost.reduced_bytes == cost.gradient_bytes and not cost.apart
    return cost.layout.numel * cost.reduce_bytes + (0 if in_place else shard)
