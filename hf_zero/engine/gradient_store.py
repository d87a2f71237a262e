"""Where gradients lie between the backward hook and the optimizer: the difference between the stages.

A store keeps a flat gradient buffer a bucket while it fills, starts its reduction, and leaves the result in the `.grad` of
the bucket's rows. The three stores keep those buffers for different times; the pass above them (gradients.py) is one.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from ..comm.transport import Handle, Transport
from ..config import ZeroConfig
from ..device import Arrival, allocate
from ..offload.downlink import Downlink
from ..offload.tier import DeviceTier
from .buckets import Bucket, ParameterSlot, Row
from .buffer_pool import BufferPool
from .padding import clear_padding
from .reductions import Reduction
from .sharded_gradient import GradientState, ShardedGradient


@dataclass(frozen=True, kw_only=True)
class Landing:
    """What becomes of reduced gradients.

    Attributes:
        downlink: how they come into a tier's host memory.
        landed: told of each bucket whose rows have theirs, or will have on the arrival.
        most_under_way: reductions that may run before the oldest is waited for; None waits for all at the end of backward.
    """

    downlink: Downlink
    landed: Callable[[Bucket, Arrival], None]
    most_under_way: int | None


class GradientStore(ABC):
    """Takes whole local gradients, gives reduced shards.

    Args:
        world_size: gradients are divided by it as they are put, in DDP's order: divided, then summed.
    """

    def __init__(self, world_size: int, landing: Landing):
        self._share = 1.0 / world_size
        self._landing = landing
        self._open: dict[Bucket, torch.Tensor] = {}
        self._started: dict[Bucket, Handle] = {}
        self._arrivals: dict[Bucket, Arrival] = {}
        # Whose reduction is the second in its pass.
        self._again: set[Bucket] = set()

    @abstractmethod
    def held_bytes(self) -> dict[str, int]:
        """Bytes of gradient memory by kind: "gradients" lasting from backward to step, "gradient buffers" in passing."""

    @abstractmethod
    def release(self, bucket: Bucket) -> None:
        """Gives back what need not last from the step to the next backward."""

    @abstractmethod
    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """Keeps a whole gradient, unreduced, until a reducing pass (gradient accumulation without communication)."""

    @abstractmethod
    def _open_buffer(self, bucket: Bucket) -> torch.Tensor:
        """A flat buffer (numel,) of the reduce dtype to fill."""

    @abstractmethod
    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        """Starts the reduction of a filled buffer."""

    @abstractmethod
    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        """Leaves the reduced gradient in the rows, once the reduction has ended; it is there on the arrival.

        Args:
            going_on: rows whose gradient it adds to.
        """

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """The slot's share of a gradient: divided by the world size and cast, added if the slot has one already."""
        flat = self._buffer(slot.bucket)
        view = slot.view_of(flat)
        if slot.arrived:
            view.add_(gradient, alpha=self._share)
        elif gradient.data_ptr() == view.data_ptr():
            view.mul_(self._share)
        else:
            torch.mul(gradient, self._share, out=view)
        slot.arrived = True

    @abstractmethod
    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """A further gradient after the bucket's reduction started (a parameter used twice under reentrant checkpointing).

        `start_again` reduces it.
        """

    @abstractmethod
    def settle(self, slot: ParameterSlot) -> None:
        """Ends the pass for a slot whose gradient some rank contributed to."""

    def start(self, bucket: Bucket) -> None:
        """Starts the bucket's reduction. Slots to which nothing came take part with zeros."""
        self._start(bucket)

    def start_again(self, bucket: Bucket) -> None:
        """Starts the reduction of what came late, on this rank or another; its result is added to that of the first."""
        self.finish(bucket)
        # The first result may still be on its way out of the buffer that is filled again.
        self._await(bucket)
        self._again.add(bucket)
        self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        flat = self._buffer(bucket)
        for slot in bucket.slots:
            if not slot.arrived:
                slot.view_of(flat).zero_()
            slot.arrived = False
        self._started[bucket] = self._start_reduction(bucket, self._open.pop(bucket))
        most = self._landing.most_under_way
        if most is not None and len(self._started) > most:
            self.finish(next(iter(self._started)))

    def finish(self, bucket: Bucket) -> None:
        """Waits for the bucket's reduction, if one is under way, and leaves its result in the rows."""
        handle = self._started.pop(bucket, None)
        if handle is not None:
            handle.finish()
            self._await(bucket)
            held = (row for row in bucket.rows if row.tensor.grad is not None)
            going_on = {row for row in held if row.slot.continues or bucket in self._again}
            self._again.discard(bucket)
            self._arrivals[bucket] = self._deliver(bucket, going_on)
            self._landing.landed(bucket, self._arrivals[bucket])

    def finish_all(self) -> None:
        """Returns when all gradients are in the rows."""
        for bucket in list(self._started):
            self.finish(bucket)
        for bucket in list(self._arrivals):
            self._await(bucket)

    @abstractmethod
    def end_pass(self) -> None:
        """Called on every rank when all of a backward pass is home."""

    def discard_open(self) -> None:
        """Forgets buffers that a failed backward left half filled."""
        for bucket in self._open:
            for slot in bucket.slots:
                slot.arrived = False
        self._open.clear()

    def _await(self, bucket: Bucket) -> None:
        arrival = self._arrivals.pop(bucket, None)
        if arrival is not None:
            arrival.wait()

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._open:
            self._open[bucket] = self._open_buffer(bucket)
        return self._open[bucket]


def _new_buffer(bucket: Bucket) -> torch.Tensor:
    return clear_padding(allocate(bucket.layout.numel, bucket.precision.reduce, bucket.device), bucket.layout)


def _add_or_set(
    bucket: Bucket, reduced: torch.Tensor, home: torch.Tensor, downlink: Downlink, going_on: Collection[Row]
) -> Arrival:
    """Row by row: adds `reduced` to a gradient that goes on, else sets it. Both are flat as the rank's shard.

    `home` is where a gradient that is set stays: `reduced` itself, or a buffer that it is copied into, on the device where
    the optimizer steps; it is there on the arrival.
    """
    fresh = [row for row in bucket.rows if row not in going_on]
    arrival = Arrival()
    for row in going_on:
        row.tensor.grad.add_(row.of(reduced).to(row.tensor.grad.device))
    if home is not reduced and not going_on:
        arrival = downlink.start_copy(home, reduced)
    for row in fresh:
        if home is not reduced and going_on:
            row.of(home).copy_(row.of(reduced))
        row.tensor.grad = row.of(home)
    return arrival


class ReplicatedGradients(GradientStore):
    """Every rank keeps and reduces whole gradients by all-reduce; `p.grad` is a view of the bucket, as under DDP.

    A view that is still there in the next backward has been accumulated into by autograd, so it is divided and reduced
    again: sum of (average / W) is the average.
    """

    def __init__(self, transport: Transport, world_size: int, landing: Landing):
        super().__init__(world_size, landing)
        self._transport = transport
        self._flat: dict[Bucket, torch.Tensor] = {}
        # Of the parameters' dtype, where gradients travel in another.
        self._reduced: dict[Bucket, torch.Tensor] = {}
        self._under_way: dict[Bucket, torch.Tensor] = {}

    def held_bytes(self) -> dict[str, int]:
        held = (*self._flat.values(), *self._reduced.values())
        return {"gradients": sum(flat.nbytes for flat in held), "gradient buffers": 0}

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        if gradient.dtype != slot.bucket.precision.reduce:
            # Autograd itself keeps adding to `p.grad`, which may have no other dtype than the parameter.
            return
        view = slot.view_of(self._home(slot.bucket))
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            slot.parameter.grad = view

    def release(self, bucket: Bucket) -> None:
        """`p.grad` lasts until the script zeroes it."""

    def end_pass(self) -> None:
        """All of it is in `p.grad`."""

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        super().put(slot, gradient)
        slot.parameter.grad = None

    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        self.put(slot, gradient)

    def settle(self, slot: ParameterSlot) -> None:
        """`p.grad` is the reduced gradient already."""

    def start(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if not slot.arrived and slot.parameter.grad is not None:
                slot.used = True
                self.put(slot, slot.parameter.grad)
        super().start(bucket)

    def _home(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._flat:
            self._flat[bucket] = _new_buffer(bucket)
        return self._flat[bucket]

    def _open_buffer(self, bucket: Bucket) -> torch.Tensor:
        # What comes late finds the bucket's own buffer on its way, or with `p.grad` in it.
        is_late = bucket in self._started or bucket in self._again
        return _new_buffer(bucket) if is_late else self._home(bucket)

    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        self._under_way[bucket] = flat
        return self._transport.start_all_reduce(flat, bucket.label("all-reduce gradients"))

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        flat, precision = self._under_way.pop(bucket), bucket.precision
        if precision.reduce == precision.master:
            return _add_or_set(bucket, flat, flat, Downlink(), going_on)
        if bucket not in self._reduced:
            self._reduced[bucket] = allocate(bucket.layout.numel, precision.master, bucket.device)
        return _add_or_set(bucket, flat, self._reduced[bucket], Downlink(), going_on)


class ShardedStore(GradientStore):
    """What stages 1 and 2 share: the reduced gradient lies in rows, and a stand-in in `p.grad`."""

    def __init__(self, reduction: Reduction, world_size: int, landing: Landing):
        super().__init__(world_size, landing)
        self._reduction = reduction
        self._shards: dict[Bucket, torch.Tensor] = {}
        self._shard_bytes: dict[Bucket, int] = {}
        self._targets: dict[Bucket, torch.Tensor] = {}

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        if not slot.arrived:
            slot.continues = isinstance(slot.parameter.grad, ShardedGradient)
        super().put(slot, gradient)
        self.settle(slot)

    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        self.finish(slot.bucket)
        # The shard may still be on its way out of the buffer that is filled again.
        self._await(slot.bucket)
        self.put(slot, gradient)

    def settle(self, slot: ParameterSlot) -> None:
        # Where the script took the stand-in away (zero_grad), it meant whatever had been added to it, too.
        slot.stand_in.become(GradientState.HELD)
        if slot.parameter.grad is not slot.stand_in:
            slot.parameter.grad = slot.stand_in

    def start(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if not slot.arrived:
                gradient = slot.parameter.grad
                slot.continues = isinstance(gradient, ShardedGradient)
                if slot.continues:
                    gradient.refuse_if_spent()
                    gradient = gradient.take_pending()
                if gradient is not None:
                    slot.used = True
                    self.put(slot, gradient)
        super().start(bucket)

    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        target = self._targets[bucket] = self._target(bucket, flat)
        return self._reduction.start(bucket, flat, target)

    def end_pass(self) -> None:
        self._reduction.end_pass()

    @abstractmethod
    def _target(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        """Where the reduced shard (shard_numel,) of the master dtype lands."""

    def _shard(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._shards:
            self._shards[bucket] = bucket.tier.scratch(bucket.layout.shard_numel, bucket.precision.master)
            self._shard_bytes[bucket] = self._shards[bucket].nbytes
        return self._shards[bucket]

    def _downlink(self, bucket: Bucket) -> Downlink:
        return self._landing.downlink if bucket.tier.is_apart else Downlink()

    def _shard_or_scratch(self, bucket: Bucket) -> torch.Tensor:
        if bucket.tier.is_apart or any(row.tensor.grad is not None for row in bucket.rows):
            return DeviceTier(bucket.device).scratch(bucket.layout.shard_numel, bucket.precision.master)
        return self._shard(bucket)


class WholeGradients(ShardedStore):
    """Stage 1: a lasting whole buffer a bucket, so that micro-batches accumulate in it without communication.

    The reduced shard stays in this rank's own part of that buffer, where the dtypes allow it.
    """

    def __init__(self, reduction: Reduction, world_size: int, landing: Landing):
        super().__init__(reduction, world_size, landing)
        self._flat: dict[Bucket, torch.Tensor] = {}

    def held_bytes(self) -> dict[str, int]:
        whole = sum(flat.nbytes for flat in self._flat.values())
        return {"gradients": whole + sum(self._shard_bytes.values()), "gradient buffers": 0}

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        if isinstance(gradient, ShardedGradient) or gradient.dtype != slot.bucket.precision.reduce:
            return
        view = slot.view_of(self._home(slot.bucket))
        if gradient.data_ptr() != view.data_ptr():
            self._spill(slot.bucket)
            view.copy_(gradient)
            slot.parameter.grad = view

    def release(self, bucket: Bucket) -> None:
        # The whole buffer lasts: making it anew each step costs a pass over it. What has gone to a tier may still be read there.
        if bucket.tier.is_apart:
            self._shards.pop(bucket, None)

    def _home(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._flat:
            self._flat[bucket] = _new_buffer(bucket)
        return self._flat[bucket]

    def _open_buffer(self, bucket: Bucket) -> torch.Tensor:
        flat = self._home(bucket)
        self._spill(bucket)
        return flat

    def _spill(self, bucket: Bucket) -> None:
        """Moves a shard reduced earlier out of the buffer that is about to be filled again."""
        flat = self._home(bucket)
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        for row in bucket.rows:
            if row.tensor.grad is not None and begin <= row.tensor.grad.data_ptr() < end:
                row.tensor.grad = row.tensor.grad.clone()

    def _target(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        if self._reduces_in_place(bucket):
            return flat[bucket.own_interval.start : bucket.own_interval.stop]
        return self._shard_or_scratch(bucket)

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        reduced = self._targets.pop(bucket)
        home = reduced if self._reduces_in_place(bucket) and not bucket.tier.is_apart else self._shard(bucket)
        return _add_or_set(bucket, reduced, home, self._downlink(bucket), going_on)

    def _reduces_in_place(self, bucket: Bucket) -> bool:
        return bucket.precision.reduce == bucket.precision.master


class PooledGradients(ShardedStore):
    """Stage 2: a bucket's buffer is taken from a small pool for its first gradient and returned when it is reduced."""

    def __init__(self, reduction: Reduction, world_size: int, landing: Landing, pool: BufferPool):
        super().__init__(reduction, world_size, landing)
        self._pool = pool
        self._lent: dict[Bucket, torch.Tensor] = {}
        self._in_flight: deque[Bucket] = deque()

    def held_bytes(self) -> dict[str, int]:
        return {"gradients": sum(self._shard_bytes.values()), "gradient buffers": self._pool.most_bytes}

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """Autograd itself keeps adding to `p.grad` until the reducing pass."""

    def release(self, bucket: Bucket) -> None:
        # Activations grow from here to the next backward, which makes another shard as it needs it.
        self._shards.pop(bucket, None)

    def finish_all(self) -> None:
        super().finish_all()
        self._pool.rest()

    def discard_open(self) -> None:
        for bucket in self._open:
            self._pool.give_back(bucket, self._lent.pop(bucket))
        super().discard_open()

    def _open_buffer(self, bucket: Bucket) -> torch.Tensor:
        while self._pool.exhausted_for(bucket) and self._in_flight:
            self.finish(self._in_flight[0])
        self._lent[bucket] = self._pool.take(bucket)
        return clear_padding(self._lent[bucket][: bucket.layout.numel], bucket.layout)

    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        self._in_flight.append(bucket)
        return super()._start_reduction(bucket, flat)

    def _target(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        return self._shard_or_scratch(bucket)

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        self._in_flight.remove(bucket)
        self._pool.give_back(bucket, self._lent.pop(bucket))
        reduced, home = self._targets.pop(bucket), self._shard(bucket)
        return _add_or_set(bucket, reduced, home, self._downlink(bucket), going_on)


def choose_store(
    buckets: Sequence[Bucket],
    config: ZeroConfig,
    transport: Transport,
    reduction: Reduction,
    landing: Landing,
    *,
    world_size: int,
    replicated: bool,
) -> GradientStore:
    """The store of a stage.

    Args:
        replicated: every rank has the state of all parameters.
    """
    if all(bucket.whole for bucket in buckets):
        return ReplicatedGradients(transport, world_size, landing)
    apart = any(bucket.tier.is_apart for bucket in buckets)
    if config.stage < 2 or (replicated and not apart):
        return WholeGradients(reduction, world_size, landing)
    pool = BufferPool(buckets, config.grad_buffers, buckets[0].device)
    return PooledGradients(reduction, world_size, landing, pool)
