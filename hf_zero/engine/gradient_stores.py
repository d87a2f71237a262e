"""The gradient stores of the stages: replicated, sharded, pooled and accumulated."""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal, cast

import torch

from ..buckets.bucket import Bucket, ParameterSlot, Row
from ..buckets.memory import clear_padding
from ..buckets.sharded import GradientState, ShardedGradient, widen
from ..comm.transport import Handle
from ..config import ZeroConfig
from ..device import Arrival, Reservation, reserve
from ..layout import slots
from ..offload.copies import Downlink
from ..offload.tiers import Tier
from .gradient_store import BufferPool, GradientStore, Landing, OpenBuffer, add_or_set, new_buffer
from .reductions import Reduction

# ---- Unsharded gradients, reduced by all-reduce as under DDP ----


class ReplicatedGradients(GradientStore):
    """Every rank keeps and reduces whole gradients by all-reduce; `p.grad` is a view of the bucket, as under DDP.

    A view that is still there in the next backward has been accumulated into by autograd, so it is divided and reduced
    again: sum of (average / W) is the average.

    From the step on only these views keep the memory, so that it goes when the script zeroes gradients, and the next forward's
    activations do not come on top of it.
    """

    def __init__(self, reduction: Reduction, landing: Landing):
        super().__init__(reduction, landing)
        self._lasting: dict[Bucket, OpenBuffer] = {}
        # Of the parameters' dtype, where gradients travel in another.
        self._reduced: dict[Bucket, torch.Tensor] = {}
        self._under_way: dict[Bucket, torch.Tensor] = {}
        self._held_bytes: dict[Bucket, int] = {}

    def held_bytes(self) -> dict[str, int]:
        return {"gradients": sum(self._held_bytes.values()), "gradient buffers": 0}

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        if gradient.dtype != slot.bucket.precision.reduce:
            # Autograd itself keeps adding to `p.grad`, which may have no other dtype than the parameter.
            return
        lasting = self._lasting_buffer(slot.bucket)
        view = lasting.views[slot.number]
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            slot.parameter.grad = slot.view_of(lasting.flat)

    def release(self, bucket: Bucket) -> None:
        """`p.grad` lasts until the script zeroes it."""
        self._lasting.pop(bucket, None)
        self._reduced.pop(bucket, None)

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        super().put(slot, gradient)
        slot.parameter.grad = None

    def put_small(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        super().put_small(slot, gradient)
        slot.parameter.grad = None

    def start(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if not slot.arrived and slot.parameter.grad is not None:
                slot.used = True
                self.put(slot, slot.parameter.grad)
        super().start(bucket)

    def _lasting_buffer(self, bucket: Bucket) -> OpenBuffer:
        if bucket not in self._lasting:
            self._lasting[bucket] = new_buffer(bucket)
            self._count(bucket)
        return self._lasting[bucket]

    def _open_buffer(self, bucket: Bucket) -> OpenBuffer:
        # What comes late finds the bucket's own buffer on its way, or with `p.grad` in it.
        is_late = bucket in self._started or bucket in self._again
        return new_buffer(bucket) if is_late else self._lasting_buffer(bucket)

    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        self._under_way[bucket] = flat
        return self._reduction.start(bucket, flat, flat)

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        flat, precision = self._under_way.pop(bucket), bucket.precision
        if precision.reduce == precision.master:
            return add_or_set(bucket, flat, flat, Downlink(), going_on)
        if bucket not in self._reduced:
            self._reduced[bucket] = Tier(bucket.device).scratch(bucket.layout.numel, precision.master)
            self._count(bucket)
        return add_or_set(bucket, flat, self._reduced[bucket], Downlink(), going_on)

    def _count(self, bucket: Bucket) -> None:
        flat, reduced = self._lasting[bucket].flat, self._reduced.get(bucket)
        self._held_bytes[bucket] = flat.nbytes + (0 if reduced is None else reduced.nbytes)


# Gradients that are reduced into shards, from a buffer for each bucket or from a small pool; the choice of a stage's store.

_KEPT_BELOW_BYTES = 2 << 20
"""Buffers of less keep their memory between steps on the host: it comes back there in small pages, each by a fault."""


class ShardedGradients(GradientStore):
    """The reduced gradient is in rows, and `p.grad` is a `ShardedGradient`.

    A bucket's buffer is taken from a small pool for its first gradient, and returned when it is reduced.

    Or the buffer lasts, where micro-batches accumulate in it without communication: without accumulation a rank never has all
    gradients at a time. The reduced shard then stays in this rank's own part of it, where the dtypes allow it. The memory goes
    with the step, so that the next forward's activations do not come on top of it: the buffer on an accelerator, whose allocator
    hands out again what is freed, and its pages on the host.

    Args:
        buffers: which buffers last: "pooled" for none, "accumulated" for those of buckets in which micro-batches have
            accumulated since the step, "lasting" for all.
    """

    def __init__(
        self,
        reduction: Reduction,
        landing: Landing,
        slots: BufferPool,
        buffers: Literal["pooled", "accumulated", "lasting"],
    ):
        super().__init__(reduction, landing)
        self._pool = slots
        self._buffers = buffers
        self._accumulated: set[Bucket] = set()
        self._shards: dict[Bucket, torch.Tensor] = {}
        self._shard_bytes: dict[Bucket, int] = {}
        self._targets: dict[Bucket, torch.Tensor] = {}
        self._lasting: dict[Bucket, OpenBuffer] = {}
        self._reservations: dict[Bucket, Reservation] = {}
        self._lasting_bytes: dict[Bucket, int] = {}
        # Buffers of the pool, and the buckets that are reduced in them.
        self._lent: dict[Bucket, torch.Tensor] = {}
        self._in_flight: deque[Bucket] = deque()
        self._scratches: dict[Bucket, int] = {}
        self._beside_bytes = self._most_beside_bytes = 0

    def held_bytes(self) -> dict[str, int]:
        gradients = sum(self._lasting_bytes.values()) + sum(self._shard_bytes.values())
        return {
            "gradients": gradients + self._landing.downlink.sum_bytes,
            "gradient buffers": self._pool.most_bytes + self._most_beside_bytes,
        }

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        is_of_buffer = not isinstance(gradient, ShardedGradient) and gradient.dtype == slot.bucket.precision.reduce
        if self._buffers == "pooled" or not is_of_buffer:
            return
        self._accumulated.add(slot.bucket)
        lasting = self._lasting_buffer(slot.bucket)
        view = lasting.views[slot.number]
        if gradient.data_ptr() != view.data_ptr():
            self._spill(slot.bucket)
            view.copy_(gradient)
            slot.parameter.grad = slot.view_of(lasting.flat)

    def release(self, bucket: Bucket) -> None:
        lasts = self._lasts(bucket)
        self._accumulated.discard(bucket)
        # Activations grow from here to the next backward, which makes another shard as it needs it.
        if not lasts or bucket.device.type != "cpu" or bucket.tier.is_apart or self._stays_in_place(bucket):
            self._shards.pop(bucket, None)
        reservation = self._reservations.get(bucket)
        if reservation is None:
            return
        if bucket.device.type != "cpu":
            del self._lasting[bucket], self._reservations[bucket]
        elif not bucket.tier.is_apart and reservation.flat.nbytes >= _KEPT_BELOW_BYTES:
            # What goes to a tier may still be read. The padding reads as zero afterwards, as before.
            reservation.release()

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        parameter, sharded_gradient = slot.parameter, slot.sharded_gradient
        if not slot.arrived:
            slot.continues = isinstance(parameter.grad, ShardedGradient)
        super().put(slot, gradient)
        # As `finish_slot` does: each gradient of a step comes here.
        sharded_gradient.state, sharded_gradient.pending = GradientState.HELD, None
        if parameter.grad is not sharded_gradient:
            parameter.grad = sharded_gradient

    def put_small(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        super().put_small(slot, gradient)
        sharded_gradient = slot.sharded_gradient
        sharded_gradient.state, sharded_gradient.pending = GradientState.HELD, None
        slot.parameter.grad = sharded_gradient

    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        self.finish(slot.bucket)
        # The shard may still be on its way out of the buffer that is filled again.
        slot.bucket.await_gradient()
        self.put(slot, gradient)

    def finish_slot(self, slot: ParameterSlot) -> None:
        if slot.parameter.grad is slot.sharded_gradient:
            # Another rank has zeroed it, and has used the parameter since.
            slot.sharded_gradient.refuse_if_spent()
        # Where the script took it out of `p.grad` (zero_grad), it meant whatever had been added to it, too.
        slot.sharded_gradient.become(GradientState.HELD)
        if slot.parameter.grad is not slot.sharded_gradient:
            slot.parameter.grad = slot.sharded_gradient

    def start(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if not slot.arrived:
                gradient = slot.parameter.grad
                slot.continues = isinstance(gradient, ShardedGradient) and not gradient.is_spent
                if isinstance(gradient, ShardedGradient):
                    gradient = gradient.take_pending()
                if gradient is not None:
                    slot.used = True
                    self.put(slot, gradient)
        super().start(bucket)

    def finish_all(self) -> None:
        super().finish_all()
        self._pool.rest()

    def discard_open(self) -> None:
        for bucket in self._open:
            if bucket in self._lent:
                self._pool.give_back(bucket, self._lent.pop(bucket))
        super().discard_open()

    def _lasts(self, bucket: Bucket) -> bool:
        """Whether the bucket's buffer lasts in this step."""
        return self._buffers == "lasting" or bucket in self._accumulated

    def _lasting_buffer(self, bucket: Bucket) -> OpenBuffer:
        if bucket not in self._lasting:
            reservation = reserve(bucket.layout.numel, bucket.precision.reduce, bucket.device, kept=slice(0, 0))
            flat = clear_padding(reservation.flat, bucket.layout)
            self._reservations[bucket], self._lasting[bucket] = reservation, OpenBuffer(bucket, flat)
            self._lasting_bytes[bucket] = flat.nbytes
        return self._lasting[bucket]

    def _open_buffer(self, bucket: Bucket) -> OpenBuffer:
        if self._lasts(bucket):
            self._spill(bucket)
            return self._lasting_buffer(bucket)
        if self._pool.is_last_for(bucket) and not self._in_flight:
            # It would take the last buffer, and one that is passed over wants a buffer, too.
            self.start_passed_over(bucket)
        while self._pool.exhausted_for(bucket) and (self._in_flight or self.start_passed_over(bucket)):
            if self._in_flight:
                self.finish(self._in_flight[0])
        self._lent[bucket] = self._pool.take(bucket)
        return OpenBuffer(bucket, clear_padding(self._lent[bucket][: bucket.layout.numel], bucket.layout))

    def _spill(self, bucket: Bucket) -> None:
        """Moves a shard reduced earlier out of the buffer that is about to be filled again."""
        flat = self._lasting_buffer(bucket).flat
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        if any(row.tensor.grad is not None and begin <= row.tensor.grad.data_ptr() < end for row in bucket.rows):
            self._widen(bucket)

    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        target = self._targets[bucket] = self._target(bucket, flat)
        handle = self._reduction.start(bucket, flat, target)
        if bucket in self._lent:
            self._in_flight.append(bucket)
        return handle

    def _target(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        """Where the reduced shard (shard_numel,) lands, of the dtype in which sums arrive."""
        precision, is_held = bucket.precision, any(row.tensor.grad is not None for row in bucket.rows)
        own, fits = bucket.own_interval, precision.reduced == precision.reduce
        if fits and bucket not in self._lent:
            return flat[own.start : own.stop]
        if bucket.tier.is_apart:
            # Copied from there when the buffer has been passed on.
            return self._scratch(bucket)
        if precision.reduced == bucket.gradient_dtype and not is_held:
            return self._shard(bucket)
        return flat[own.start : own.stop] if fits else self._scratch(bucket)

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        reduced = self._targets.pop(bucket)
        if bucket not in self._lent:
            target = reduced if self._stays_in_place(bucket) else self._shard(bucket)
            return self._leave(bucket, reduced, target, going_on)
        self._in_flight.remove(bucket)
        arrival = self._leave(bucket, reduced, self._shard(bucket), going_on)
        self._beside_bytes -= self._scratches.pop(bucket, 0)
        self._pool.give_back(bucket, self._lent.pop(bucket))
        return arrival

    def _stays_in_place(self, bucket: Bucket) -> bool:
        """Whether the shard that was reduced in a lasting buffer waits for the step there."""
        precision = bucket.precision
        return precision.reduce == precision.reduced == bucket.gradient_dtype and not bucket.tier.is_apart

    def _shard(self, bucket: Bucket) -> torch.Tensor:
        """Where the gradient of this rank's rows waits for the step: (shard_numel,) of the dtype that is stepped with."""
        if bucket not in self._shards:
            self._keep_shard(bucket, bucket.tier.scratch(bucket.layout.shard_numel, bucket.gradient_dtype))
        return self._shards[bucket]

    def _keep_shard(self, bucket: Bucket, shard: torch.Tensor) -> None:
        self._shards[bucket] = shard
        self._shard_bytes[bucket] = max(shard.nbytes, self._shard_bytes.get(bucket, 0))

    def _widen(self, bucket: Bucket) -> None:
        """Moves what the bucket's rows have into a shard of the master dtype, in which sums are taken."""
        held = [row for row in bucket.rows if row.tensor.grad is not None]
        shard = bucket.tier.scratch(bucket.layout.shard_numel, bucket.precision.master)
        for row in held:
            widen(row.tensor)
            row.tensor.grad = row.of(shard).copy_(cast(torch.Tensor, row.tensor.grad))
        self._keep_shard(bucket, shard)

    def _leave(self, bucket: Bucket, reduced: torch.Tensor, target: torch.Tensor, going_on: Collection[Row]) -> Arrival:
        """Leaves what has been reduced in the rows; the rest is as `add_or_set` says."""
        if going_on and bucket.gradient_dtype != bucket.precision.master:
            self._widen(bucket)
            target = self._shard(bucket)
        return add_or_set(bucket, reduced, target, self._downlink(bucket), going_on)

    def _downlink(self, bucket: Bucket) -> Downlink:
        return self._landing.downlink if bucket.tier.is_apart else Downlink()

    def _scratch(self, bucket: Bucket) -> torch.Tensor:
        """A shard on the training device, until its values have gone where they are wanted."""
        scratch = Tier(bucket.device).scratch(bucket.layout.shard_numel, bucket.precision.reduced)
        if bucket in self._lent:
            self._scratches[bucket] = scratch.nbytes
            self._beside_bytes += scratch.nbytes
            self._most_beside_bytes = max(self._most_beside_bytes, self._beside_bytes)
        return scratch


def choose_store(
    buckets: Sequence[Bucket], config: ZeroConfig, reduction: Reduction, landing: Landing
) -> GradientStore:
    """The store of a stage."""
    if all(bucket.rows_are_parameters for bucket in buckets):
        return ReplicatedGradients(reduction, landing)
    # Where the shard is all of the bucket, there is no smaller place to reduce it into.
    is_replicated = all(bucket.group.groups.shard_size == 1 for bucket in buckets)
    is_whole = is_replicated and not any(bucket.tier.is_apart for bucket in buckets)
    passing = BufferPool(buckets, slots.GRAD_BUFFERS, buckets[0].device)
    kept: Literal["accumulated", "pooled"] = "accumulated" if config.stage == 1 else "pooled"
    return ShardedGradients(reduction, landing, passing, "lasting" if is_whole else kept)
