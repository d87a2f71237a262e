"""Sharded gradients, from stage 1 on: flat buffers that are reduced to this rank's shard."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from operator import is_
from typing import Literal, cast

import torch

from ..allocation import Reservation, reserve
from ..buckets.bucket import Bucket, ParameterSlot, Row
from ..buckets.clipped_gradient import widen
from ..buckets.gradients import hold_gradients
from ..buckets.memory import clear_padding
from ..buckets.sharded_gradient import GradientState, ShardedGradient
from ..comm.transport import Handle
from ..config import ZeroConfig
from ..layout.gradient_buffers import GRAD_BUFFERS
from ..offload.copies import DeviceToHost
from ..offload.tiers import Tier
from ..queues import Arrival
from .buffer_pool import BufferPool
from .gradient_store import _GRAD, GradientStore, GradientTarget, add_or_set
from .reductions import Reduction
from .replicated_gradients import ReplicatedGradients

# Gradients that are reduced into shards, from a buffer per bucket or from a small pool; the choice of the store.

_AT_ONCE = DeviceToHost()

_KEPT_BELOW_BYTES = 2 << 20
"""Host buffers with fewer bytes keep their memory between steps, because each small page costs a page fault after a release."""


class ShardedGradients(GradientStore):
    """The reduced gradient is in rows, and `p.grad` is a `ShardedGradient`.

    Usually a bucket borrows a buffer from a small pool for its first gradient, and returns the buffer after the reduction. So a
    rank never stores all whole gradients at a time.

    If micro-batches accumulate without communication, the bucket's buffer lives until the step. The reduced shard then stays in
    this rank's part of the buffer if the dtypes allow. The step frees the memory before the next forward needs memory for
    activations: on an accelerator the whole buffer, on the host its pages.

    Args:
        buffers: which buffers live until the step: "pooled" for none, "accumulated" for buckets in which micro-batches have
            accumulated since the last step, "lasting" for all.
    """

    def __init__(
        self,
        reduction: Reduction,
        landing: GradientTarget,
        pool: BufferPool,
        buffers: Literal["pooled", "accumulated", "lasting"],
    ):
        super().__init__(reduction, landing)
        self._pool = pool
        self._buffers = buffers
        self._accumulated: set[Bucket] = set()
        self._shards: dict[Bucket, torch.Tensor] = {}
        self._shard_bytes: dict[Bucket, int] = {}
        self._targets: dict[Bucket, torch.Tensor] = {}
        self._lasting: dict[Bucket, torch.Tensor] = {}
        self._reservations: dict[Bucket, Reservation] = {}
        self._lasting_bytes: dict[Bucket, int] = {}
        # Buffers borrowed from the pool, and the buckets with a running reduction in such a buffer.
        self._borrowed: dict[Bucket, torch.Tensor] = {}
        self._in_flight: deque[Bucket] = deque()
        self._scratches: dict[Bucket, int] = {}
        self._most_scratch_bytes = 0

    def held_bytes(self) -> dict[str, int]:
        gradients = sum(self._lasting_bytes.values()) + sum(self._shard_bytes.values())
        return {
            "gradients": gradients + self._landing.d2h.sum_bytes,
            "gradient buffers": self._pool.most_bytes + self._most_scratch_bytes,
        }

    @property
    def lasts_whole(self) -> bool:
        return self._buffers == "lasting"

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        is_of_buffer = not isinstance(gradient, ShardedGradient) and gradient.dtype == slot.bucket.precision.reduce
        if self._buffers == "pooled" or not is_of_buffer:
            return
        self._accumulated.add(slot.bucket)
        view = slot.view_of(self._lasting_buffer(slot.bucket))
        if gradient.data_ptr() != view.data_ptr():
            # The copy would overwrite the reduced shard of an earlier pass, which may still be in this buffer.
            self._spill(slot.bucket)
            slot.parameter.grad = view.copy_(gradient)

    def release(self, bucket: Bucket) -> None:
        lasts = self._lasts(bucket)
        self._accumulated.discard(bucket)
        # Free the shard, because the next forward needs memory for activations. The next backward allocates another one.
        if not lasts or bucket.device.type != "cpu" or bucket.tier.is_offloaded or self._stays_in_place(bucket):
            self._shards.pop(bucket, None)
        reservation = self._reservations.get(bucket)
        if reservation is None:
            return
        if bucket.device.type != "cpu":
            del self._lasting[bucket], self._reservations[bucket]
        elif not bucket.tier.is_offloaded and reservation.flat.nbytes >= _KEPT_BELOW_BYTES:
            # Not if offloaded, because a copy to the tier may still read the buffer. The padding reads as zero afterwards.
            reservation.release()

    def release_all(self, buckets: Iterable[Bucket]) -> None:
        if self._buffers == "pooled" and not (self._accumulated or self._reservations):
            # The same as `release` for each bucket, in a loop in C.
            deque(map(self._shards.pop, buckets, repeat(None)), maxlen=0)
        else:
            super().release_all(buckets)

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        parameter, sharded_gradient = slot.parameter, slot.sharded_gradient
        # Before `grad` is replaced below. A `ShardedGradient` there means that this gradient adds to those of earlier passes.
        if not slot.arrived:
            slot.continues = isinstance(parameter.grad, ShardedGradient)
        super().put(slot, gradient)
        # The same as in `finish_slots`, inlined because every gradient of a step passes here.
        sharded_gradient.state, sharded_gradient.pending = GradientState.HELD, None
        if parameter.grad is not sharded_gradient:
            parameter.grad = sharded_gradient

    def put_whole(self, bucket: Bucket, gradients: Sequence[torch.Tensor]) -> bool:
        is_taken = super().put_whole(bucket, gradients)
        if is_taken:
            # As in `put`.
            hold_gradients(bucket)
        return is_taken

    def _accumulates(self, bucket: Bucket) -> bool:
        return bucket in self._accumulated

    def _buffer_for_whole(self, bucket: Bucket) -> torch.Tensor:
        if self._lasts(bucket):
            return self._open_buffer(bucket)
        # The gradients themselves need as much memory as another buffer. `put_whole` writes zeros into the gaps, which saves a
        # kernel launch per gap here.
        return self._borrow(bucket, in_use=1)

    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        bucket = slot.bucket
        if bucket in self._started and not self._may_wait(bucket):
            before = self._late.get(slot)
            self._late[slot] = gradient if before is None else before.add_(gradient)
            if not isinstance(slot.parameter.grad, ShardedGradient):
                # Otherwise autograd would add the next gradient to this one, which would count twice.
                slot.parameter.grad = None
            return
        self.finish(bucket)
        # The shard may still be copied out of the buffer, which is filled again.
        bucket.arrival.wait()
        self.put(slot, gradient)

    def finish_slots(self, slots: Iterable[ParameterSlot]) -> None:
        for slot in slots:
            is_there = slot.parameter.grad is slot.sharded_gradient
            # `put` has finished most slots.
            if not slot.used or (is_there and not slot.used_elsewhere):
                continue
            if is_there:
                # Only another rank used the parameter. After a step, the sum would lack this rank's freed gradient.
                slot.sharded_gradient.refuse_if_spent()
            # If the script removed the stand-in from `p.grad` (zero_grad), this also drops its pending sum.
            slot.sharded_gradient.become(GradientState.HELD)
            if not is_there:
                slot.parameter.grad = slot.sharded_gradient

    def _put_remaining(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            # Earlier `no_sync` micro-batches may have left a sum.
            if not slot.arrived:
                gradient = slot.parameter.grad
                slot.continues = isinstance(gradient, ShardedGradient) and not gradient.is_spent
                if isinstance(gradient, ShardedGradient):
                    gradient = gradient.take_pending()
                if gradient is not None:
                    slot.used = True
                    self.put(slot, gradient)

    def start_unfilled(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            if not slot.arrived:
                gradient = slot.parameter.grad
                slot.continues = isinstance(gradient, ShardedGradient) and not gradient.is_spent
                if bucket in self._accumulated and gradient is not None and not isinstance(gradient, ShardedGradient):
                    # The sum may be a view of the buffer, in which the reduction needs zeros.
                    slot.parameter.grad = gradient.clone()
        super().start_unfilled(bucket)

    def finish_all(self) -> None:
        super().finish_all()
        self._pool.free_unused()

    def discard_open(self) -> None:
        for bucket in self._open:
            # Return the buffer to the pool. A lost buffer would count against the limit until the end of the run.
            if bucket in self._borrowed:
                self._pool.release(bucket, self._borrowed.pop(bucket))
                self._scratches.pop(bucket, None)
        super().discard_open()

    def _lasts(self, bucket: Bucket) -> bool:
        """Whether the bucket's buffer lives until this step."""
        return self._buffers == "lasting" or bucket in self._accumulated

    def _lasting_buffer(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._lasting:
            reservation = reserve(bucket.layout.numel, bucket.precision.reduce, bucket.device, kept=slice(0, 0))
            flat = clear_padding(reservation.flat, bucket.layout)
            self._reservations[bucket], self._lasting[bucket] = reservation, flat
            self._lasting_bytes[bucket] = flat.nbytes
        return self._lasting[bucket]

    def _open_buffer(self, bucket: Bucket) -> torch.Tensor:
        if self._lasts(bucket):
            self._spill(bucket)
            return self._lasting_buffer(bucket)
        return clear_padding(self._borrow(bucket), bucket.layout)

    def _borrow(self, bucket: Bucket, in_use: int = 0) -> torch.Tensor:
        """Borrows a buffer from the pool, with undefined contents. `in_use`: see `BufferPool.room_for`."""
        pool, in_flight = self._pool, self._in_flight
        room = pool.room_for(bucket, in_use)
        if room == 1 and not in_flight:
            # The bucket would get the last buffer, so start an earlier, partly filled bucket before.
            self._landing.step.start_passed_over(bucket)
            room = pool.room_for(bucket, in_use)
        # Backward waits here for the oldest reduction, because the limit on buffers limits gradient memory.
        while room == 0 and (in_flight or self._landing.step.start_passed_over(bucket)):
            if in_flight:
                oldest = in_flight[0]
                # Do not ask while a bucket starts: the bucket already counts as started, so other ranks would wait for it.
                if not self._may_wait(oldest) and (not self.may_ask or not self.starts.ask(self.index_of[oldest] + 1)):
                    break
                self.finish(oldest)
            room = pool.room_for(bucket, in_use)
        borrowed = self._borrowed[bucket] = pool.take(bucket, in_use)
        return borrowed if borrowed.numel() == bucket.layout.numel else borrowed[: bucket.layout.numel]

    def _spill(self, bucket: Bucket) -> None:
        """Moves an earlier reduced shard out of the buffer before the buffer is filled again."""
        flat = self._lasting_buffer(bucket)
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        if any(row.tensor.grad is not None and begin <= row.tensor.grad.data_ptr() < end for row in bucket.rows):
            self._widen(bucket)

    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        target = self._targets[bucket] = self._target(bucket, flat)
        handle = self._reduction.start(bucket, flat, target)
        if bucket in self._borrowed:
            self._in_flight.append(bucket)
        return handle

    def _target(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        """Returns the memory for the reduced shard, (shard_numel,) of the dtype of the reduction's result."""
        reduced = bucket.precision.reduced
        fits = reduced == bucket.precision.reduce
        if not (fits and bucket not in self._borrowed):
            if bucket.tier.is_offloaded:
                # Separate memory, because the copy to the host still reads the shard after the next bucket has got the buffer.
                return self._scratch(bucket)
            if reduced == bucket.gradient_dtype and all(map(is_, map(_GRAD, bucket.row_tensors), repeat(None))):
                return self._shard(bucket)
            if not fits:
                return self._scratch(bucket)
        # In place, because this rank does not need the other parts of its buffer.
        own = bucket.own_interval
        return flat[own.start : own.stop]

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        reduced, is_borrowed = self._targets.pop(bucket), bucket in self._borrowed
        if is_borrowed:
            self._in_flight.remove(bucket)
        target = reduced if not is_borrowed and self._stays_in_place(bucket) else self._shard(bucket)
        arrival = self._leave(bucket, reduced, target, going_on)
        if is_borrowed:
            self._scratches.pop(bucket, None)
            # After the copy out of the buffer, because the next bucket fills the buffer at once.
            self._pool.release(bucket, self._borrowed.pop(bucket))
        return arrival

    def _stays_in_place(self, bucket: Bucket) -> bool:
        """Whether a shard reduced in a lasting buffer stays there until the step."""
        precision = bucket.precision
        return precision.reduce == precision.reduced == bucket.gradient_dtype and not bucket.tier.is_offloaded

    def _shard(self, bucket: Bucket) -> torch.Tensor:
        """Returns the memory of this rank's gradients between backward and step, (shard_numel,) of `gradient_dtype`."""
        shard = self._shards.get(bucket)
        if shard is None:
            shard = bucket.tier.scratch(bucket.layout.shard_numel, bucket.gradient_dtype)
            self._keep_shard(bucket, shard)
        return shard

    def _keep_shard(self, bucket: Bucket, shard: torch.Tensor) -> None:
        self._shards[bucket] = shard
        if shard.nbytes > self._shard_bytes.get(bucket, 0):
            self._shard_bytes[bucket] = shard.nbytes

    def _widen(self, bucket: Bucket) -> None:
        """Moves the rows' gradients into a shard of the master dtype, for sums."""
        held = [row for row in bucket.rows if row.tensor.grad is not None]
        shard = bucket.tier.scratch(bucket.layout.shard_numel, bucket.precision.master)
        for row in held:
            widen(row.tensor)
            row.tensor.grad = row.of(shard).copy_(cast(torch.Tensor, row.tensor.grad))
        bucket.laid = None
        self._keep_shard(bucket, shard)

    def _leave(self, bucket: Bucket, reduced: torch.Tensor, target: torch.Tensor, going_on: Collection[Row]) -> Arrival:
        """Puts a reduced gradient into the rows, as `add_or_set` does, with sums in the master dtype."""
        # In bfloat16, small gradients of later micro-batches would be rounded away.
        if going_on and bucket.gradient_dtype != bucket.precision.master:
            self._widen(bucket)
            target = self._shard(bucket)
        return add_or_set(bucket, reduced, target, self._d2h(bucket), going_on)

    def _d2h(self, bucket: Bucket) -> DeviceToHost:
        return self._landing.d2h if bucket.tier.is_offloaded else _AT_ONCE

    def _scratch(self, bucket: Bucket) -> torch.Tensor:
        """Returns a temporary shard on the training device."""
        scratch = Tier(bucket.device).scratch(bucket.layout.shard_numel, bucket.precision.reduced)
        if bucket in self._borrowed:
            self._scratches[bucket] = scratch.nbytes
            self._most_scratch_bytes = max(self._most_scratch_bytes, sum(self._scratches.values()))
        return scratch


def choose_store(
    buckets: Sequence[Bucket], config: ZeroConfig, reduction: Reduction, landing: GradientTarget
) -> GradientStore:
    """Returns the store for the config's stage."""
    if all(bucket.rows_are_parameters for bucket in buckets):
        return ReplicatedGradients(reduction, landing)
    # If the shard is the whole bucket, a reduced shard is as large as the buffer, so a pool would save nothing.
    is_replicated = all(bucket.group.groups.shard_size == 1 for bucket in buckets)
    is_whole = is_replicated and not any(bucket.tier.is_offloaded for bucket in buckets)
    passing = BufferPool(buckets, GRAD_BUFFERS, buckets[0].device)
    kept: Literal["accumulated", "pooled"] = "accumulated" if config.stage == 1 else "pooled"
    return ShardedGradients(reduction, landing, passing, "lasting" if is_whole else kept)
