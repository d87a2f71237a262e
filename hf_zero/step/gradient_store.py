"""Flat gradient buffers between backward and step: their pool, and a store for each lifetime of the buffers."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Literal, cast

import torch
from torch.autograd.graph import increment_version

from ..buckets.bucket import Bucket, ParameterSlot, Row
from ..buckets.memory import clear_padding
from ..buckets.sharded import GradientState, ShardedGradient, widen
from ..comm.transport import Handle, StepsInOrder
from ..config import ZeroConfig
from ..device import ARRIVED, Arrival, Reservation, reserve
from ..hooks.guards import look_only
from ..hooks.tensors import set_all
from ..layout.gradient_buffers import GRAD_BUFFERS, BufferKind, kind_of_buffer, shared_numel
from ..offload.copies import DeviceToHost
from ..offload.tiers import Tier
from .collectives import Reduction
from .common_starts import CommonStarts

# ---- A pool of bucket-sized gradient buffers, filled and reduced one after the other at stages 2 and 3 ----


class BufferPool:
    """Whole-bucket buffers by kind (`BufferKind`); at most `limit` large ones, in use or free.

    If gradients do not arrive in the order of the buckets, more than `limit` buffers may be needed at a time. Then the pool
    grows, because waiting would be a deadlock.

    Attributes:
        most_bytes: the largest number of bytes that all buffers have had at a time.
    """

    def __init__(self, buckets: Sequence[Bucket], limit: int, device: torch.device):
        self._tier = Tier(device)
        shared = shared_numel([bucket.layout for bucket in buckets])
        self._kind = {bucket: kind_of_buffer(bucket.layout, shared) for bucket in buckets}
        self._limit = limit
        # By kind and dtype. Small buffers do not count against the limit.
        self._free: dict[tuple[BufferKind, torch.dtype], list[torch.Tensor]] = {}
        self._large_out = 0
        self._bytes = 0
        self.most_bytes = 0

    def room_for(self, bucket: Bucket, beside: int = 0) -> int | None:
        """Returns how many large buffers may still be borrowed; None if the bucket's buffer is small, which has no limit.

        Args:
            beside: lowers the limit by this number of large buffers, whose memory is in use elsewhere.
        """
        return None if self._kind[bucket] is BufferKind.SMALL else max(0, self._most(beside) - self._large_out)

    def _most(self, beside: int) -> int:
        return max(1, self._limit - beside)

    def take(self, bucket: Bucket, beside: int = 0) -> torch.Tensor:
        """Returns a buffer of the reduce dtype with at least the bucket's elements and undefined contents. `beside`: as above."""
        kind, dtype = self._kind[bucket], bucket.precision.reduce
        self._large_out += kind is not BufferKind.SMALL
        free = self._free.get((kind, dtype), [])
        if len(free) == 1 and free[0].numel() >= bucket.layout.numel:
            return free.pop()
        large_enough = [place for place, buffer in enumerate(free) if buffer.numel() >= bucket.layout.numel]
        # The smallest of these, because a larger bucket may need a larger one at the same time.
        if large_enough:
            return free.pop(min(large_enough, key=lambda place: free[place].numel()))
        if kind is not BufferKind.SMALL:
            self._make_room(self._most(beside))
        buffer = self._tier.scratch(bucket.layout.numel, dtype)
        self._bytes += buffer.nbytes
        self.most_bytes = max(self.most_bytes, self._bytes)
        return buffer

    def release(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        kind = self._kind[bucket]
        self._large_out -= kind is not BufferKind.SMALL
        # Freed at once. Otherwise, an embedding's buffer would stay in memory until the end of the backward.
        if kind is BufferKind.OVERSIZE:
            self._bytes -= buffer.nbytes
        else:
            self._free.setdefault((kind, buffer.dtype), []).append(buffer)

    def rest(self) -> None:
        """Frees the buffers not in use."""
        self._bytes -= sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
        self._free.clear()

    def _make_room(self, most: int) -> None:
        """Frees unused large buffers until used and unused ones are at most `most`."""
        free = [buffers for (kind, _), buffers in self._free.items() if kind is BufferKind.SHARED]
        while self._large_out + sum(map(len, free)) > most and any(free):
            self._bytes -= max(free, key=len).pop().nbytes


# ---- Gradients between backward and the optimizer: buffers have different lifetimes at different stages ----
#
# A store keeps a flat gradient buffer per bucket while gradients arrive, starts its reduction, and puts the result in the `.grad`
# of the bucket's rows. The stores differ in the lifetimes of the buffers. They share the code of the pass (backward.py).

_FORM, _GRAD = attrgetter("dtype", "layout"), attrgetter("grad")


@dataclass(frozen=True, kw_only=True)
class Landing:
    """The receivers of reduced gradients.

    Attributes:
        d2h: copies reduced gradients to host memory, for offloaded buckets.
        most_under_way: maximum number of running reductions before the store waits for the oldest; None waits for all at the end
            of backward.
        goes_on: whether another backward will add to the reduced gradients, so that nobody reads them yet.
    """

    d2h: DeviceToHost
    most_under_way: int | None
    goes_on: Callable[[], bool]


class GradientStore(ABC):
    """Keeps gradients until the step: fills a flat buffer per bucket, and starts the buffer's reduction.

    `put` divides each gradient by the number of ranks, before the sum over the ranks, as DDP does.

    Attributes:
        start_passed_over: given a bucket that needs a buffer, starts an earlier bucket that is not full. Returns whether one was
            started.
        starts: counts the reductions that backward may wait for.
        places: the index of each bucket in the order of starts.
        went_on: while a failed pass is being ended, whether another backward was to add to its gradients; else None.
        may_ask: other ranks may be asked to start reductions that this rank wants to wait for.
        steps: starts the steps of reductions with several steps, between groups of ranks; None if there are none.
    """

    def __init__(self, reduction: Reduction, landing: Landing):
        self._reduction = reduction
        self._landing = landing
        # Flat gradient buffers being filled, (numel,) of the reduce dtype.
        self._open: dict[Bucket, torch.Tensor] = {}
        self._started: dict[Bucket, Handle] = {}
        self._arriving: list[Bucket] = []
        # Buckets filled by `put_whole` in this pass.
        self._whole: set[Bucket] = set()
        # Buckets with a second reduction in this pass.
        self._again: set[Bucket] = set()
        # Late gradients whose bucket's first reduction this rank may not wait for yet.
        self._late: dict[ParameterSlot, torch.Tensor] = {}
        self.start_passed_over: Callable[[Bucket], bool | None] = lambda bucket: False
        self.starts = CommonStarts(0)
        self.places: dict[Bucket, int] = {}
        self.steps: StepsInOrder | None = None
        self.may_ask = True
        self.went_on: bool | None = None

    @abstractmethod
    def held_bytes(self) -> dict[str, int]:
        """Bytes of gradient memory by kind: "gradients" live from backward to step, "gradient buffers" only during backward."""

    @abstractmethod
    def release(self, bucket: Bucket) -> None:
        """Frees memory not needed from the step to the next backward."""

    @abstractmethod
    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """Keeps a whole gradient, unreduced, until a reducing pass (gradient accumulation without communication).

        A store may do nothing. Then autograd itself adds to `p.grad` until the reducing pass.
        """

    @abstractmethod
    def _open_buffer(self, bucket: Bucket) -> torch.Tensor:
        """Returns a buffer to fill."""

    @abstractmethod
    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        """Starts the reduction of a filled buffer."""

    @abstractmethod
    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        """Puts the reduced gradient into the rows after the reduction. The values are valid after the returned arrival.

        Args:
            going_on: rows to whose gradients the values are added.
        """

    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """Keeps a gradient that arrived after the start of the bucket's reduction, for `start_again`.

        For example, reentrant checkpointing may compute two gradients of a parameter that is used twice.
        """
        self.put(slot, gradient)

    def finish_slots(self, slots: Iterable[ParameterSlot]) -> None:  # noqa: B027 (`p.grad` may be the reduced gradient itself)
        """Ends the pass for slots: if any rank used the parameter, `p.grad` now represents the reduced gradient."""

    def end_pass(self) -> None:
        """Called on every rank when all gradients of a backward pass are reduced."""
        self._whole.clear()
        self._reduction.end_pass()

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """Writes a gradient times the bucket's share (1 / ranks) into the slot, or adds it if the slot already has a gradient."""
        bucket = slot.bucket
        # Divide before the sum, as DDP does. A division after the sum rounds differently, so losses would not be bitwise equal.
        share = bucket.share
        view = slot.view_of(self._buffer(bucket))
        is_there = gradient.data_ptr() == view.data_ptr()
        if slot.arrived:
            view.add_(gradient, alpha=share)
        elif share == 1.0:
            # With one rank, a multiplication by 1 would read and write the whole gradient for nothing.
            if not is_there:
                view.copy_(gradient)
        elif is_there:
            view.mul_(share)
        else:
            torch.mul(gradient, share, out=view)
        slot.arrived = True

    @property
    def lasts_whole(self) -> bool:
        """Whether the buffers of all buckets live until the step."""
        return True

    def takes_whole(self, bucket: Bucket, bytes_to_come: int) -> bool:
        """Whether `put_whole` may handle the bucket. Its gradients must have the reduce dtype.

        If all buffers live until the step, the bucket's gradients, which wait for the last one, must not need more memory than
        the buffers that are still to be allocated. Otherwise peak memory would exceed the sum of all buffers.

        Args:
            bytes_to_come: bytes of the buffers that are not yet allocated when the bucket's last gradient arrives.
        """
        if bucket.slots[0].parameter.dtype != bucket.precision.reduce:
            return False
        if not self.lasts_whole:
            return True
        numels = [slot.parameter.numel() for slot in bucket.slots]
        # One gradient is alive in any case: autograd has just computed it.
        waiting_bytes = (sum(numels) - max(numels)) * bucket.precision.reduce.itemsize
        return waiting_bytes <= bytes_to_come

    def put_whole(self, bucket: Bucket, gradients: Sequence[torch.Tensor]) -> bool:
        """Writes all gradients of a bucket at once, times the share, as the first of this pass, and sets `p.grad` as `put` does.

        Args:
            gradients: plain tensors, one per slot. Accumulated gradients may be views of the bucket's lasting buffer.

        Returns:
            False if nothing was written, because dtypes, layouts or storages do not fit.
        """
        if set(map(_FORM, gradients)) != {(bucket.precision.reduce, torch.strided)}:
            return False
        if bucket in self._open:
            return False
        if not self._accumulates(bucket):
            flat = self._open[bucket] = self._buffer_for_whole(bucket)
            bucket.slot_views.fill(flat, gradients, bucket.share)
        else:
            flat = self._lasting_buffer(bucket)
            if not bucket.are_in_slots(flat, gradients):
                return False
            self._open[bucket] = flat
            if bucket.share != 1.0:
                flat.mul_(bucket.share)
        self._whole.add(bucket)
        return True

    def note_slots(self, bucket: Bucket) -> None:
        """Marks the slots of `put_whole` as filled, so that further gradients are added and do not replace the first ones.

        Does nothing if the reduction has started. Then further gradients are late, and get another buffer.
        """
        if bucket in self._open:
            self._whole.discard(bucket)
            for slot in bucket.slots:
                slot.arrived = True

    @abstractmethod
    def _accumulates(self, bucket: Bucket) -> bool:
        """Whether the bucket's lasting buffer already contains gradients of this step, reduced or not."""

    @abstractmethod
    def _lasting_buffer(self, bucket: Bucket) -> torch.Tensor:
        """Returns the bucket's buffer that lives until the step."""

    @abstractmethod
    def _buffer_for_whole(self, bucket: Bucket) -> torch.Tensor:
        """Returns a buffer with undefined contents for `put_whole`, while the gradients still have separate memory."""

    def start_again(self, bucket: Bucket) -> None:
        """Reduces late gradients of any rank, and adds the sum to the first one."""
        # The second sum is added to the first one, which must be finished.
        self.finish(bucket)
        # The first result may still be copied out of the buffer, which is filled again.
        bucket.await_gradient()
        late = [(slot, self._late.pop(slot)) for slot in bucket.slots if slot in self._late]
        for slot, gradient in late:
            self.put(slot, gradient)
        self._again.add(bucket)
        self._start(bucket)

    def start(self, bucket: Bucket) -> None:
        """Starts the bucket's reduction, with zeros in slots without a gradient."""
        self._start(bucket)

    def start_unfilled(self, bucket: Bucket) -> None:
        """Starts the bucket's reduction while autograd may still add to the sums of `no_sync` micro-batches in `p.grad`.

        The sums stay in `p.grad`. If they were reduced now, autograd's later gradients would be added after a rounding.
        """
        self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        flat = self._open.get(bucket)
        if flat is None:
            flat = self._buffer(bucket)
        is_whole = self._is_put_whole(bucket)
        if not is_whole:
            for slot in bucket.slots:
                if not slot.arrived:
                    # The buffer may contain values of another bucket or pass, which would enter the sum.
                    slot.view_of(flat).zero_()
        if self.steps is not None:
            # The next start advances older reductions by one step, and waits for their previous step.
            self.steps.may_advance = all(map(self._may_wait, self._started))
        # In this order, because the start may run out of memory. Then the filled buffer stays open for another attempt.
        self._started[bucket] = self._start_reduction(bucket, flat)
        del self._open[bucket]
        if not is_whole:
            for slot in bucket.slots:
                slot.arrived = False
        most = self._landing.most_under_way
        if most is not None and len(self._started) > most:
            # The oldest reduction, whose buffer returns to the pool first.
            oldest = next(iter(self._started))
            if self._may_wait(oldest):
                self.finish(oldest)

    def _may_wait(self, bucket: Bucket) -> bool:
        """Whether backward may wait for a bucket's reduction. See [Note: waits for reductions]."""
        return self.places[bucket] < self.starts.sure

    def start_last_steps(self, number: int) -> None:
        """Starts the last step of the reductions of the first `number` buckets, if reductions have several steps."""
        if self.steps is not None:
            for bucket, handle in self._started.items():
                if self.places[bucket] < number:
                    handle.start_last()

    def finish(self, bucket: Bucket) -> None:
        """Waits for the bucket's reduction, if one is running, and puts the result into the rows."""
        handle = self._started.pop(bucket, None)
        if handle is not None:
            # Until the reduction has finished, the transport uses the buffer.
            handle.finish()
            if self._is_put_whole(bucket):
                going_on = set()
            else:
                held = (row for row in bucket.rows if row.tensor.grad is not None)
                going_on = {row for row in held if row.slot.continues or bucket in self._again}
                self._again.discard(bucket)
            bucket.arrival = self._deliver(bucket, going_on)
            self._arriving.append(bucket)

    def finish_all(self) -> None:
        """Waits for all reductions and, unless another backward adds to the gradients, for the values in the rows."""
        for bucket in list(self._started):
            self.finish(bucket)
        arriving, self._arriving = self._arriving, []
        if not self.goes_on:
            for bucket in arriving:
                bucket.await_gradient()

    def discard_open(self) -> None:
        """Drops buffers left partly filled by a failed backward."""
        for bucket in self._open:
            for slot in bucket.slots:
                slot.arrived = False
        self._open.clear()
        self._whole.clear()
        self._late.clear()

    @property
    def goes_on(self) -> bool:
        """Whether another backward will add to the gradients of this pass."""
        return self._landing.goes_on() if self.went_on is None else self.went_on

    def _is_put_whole(self, bucket: Bucket) -> bool:
        """Whether `put_whole` filled the bucket for its first reduction in this pass; then its slots hold no notes."""
        return bucket in self._whole and bucket not in self._again

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        found = self._open.get(bucket)
        if found is None:
            found = self._open[bucket] = self._open_buffer(bucket)
        return found


def new_buffer(bucket: Bucket) -> torch.Tensor:
    """Returns a new flat gradient buffer of the reduce dtype, with zeros in the padding."""
    flat = Tier(bucket.device).scratch(bucket.layout.numel, bucket.precision.reduce)
    return clear_padding(flat, bucket.layout)


def add_or_set(
    bucket: Bucket, reduced: torch.Tensor, target: torch.Tensor, d2h: DeviceToHost, going_on: Collection[Row]
) -> Arrival:
    """Adds `reduced` to the gradients of the rows in `going_on`, and sets the gradients of the other rows.

    Sums are in the master dtype. All values are valid after the returned arrival.

    Args:
        reduced: this rank's reduced shard, flat.
        target: memory of gradients that are set: `reduced` itself, or a buffer of the same size on the optimizer's device.
    """
    if going_on:
        take = _sum_into(zip(bucket.rows, bucket.row_views.of(target)), going_on, sets=target is not reduced)
        return d2h.start_sum(take, reduced, bucket.arrival)
    # An earlier sum or copy may still write to this memory.
    bucket.await_gradient()
    arrival = ARRIVED if target is reduced else d2h.start_copy(target, reduced)
    bucket.lay_gradients(target)
    return arrival


def _sum_into(
    views: Iterable[tuple[Row, torch.Tensor]], going_on: Collection[Row], *, sets: bool
) -> Callable[[torch.Tensor], None]:
    """Returns a function that adds a reduced shard to the rows in `going_on` and, with `sets`, copies it to the other rows.

    The other rows get their new gradients, views of the target, at once. The function writes through `data`, and versions are
    increased here, because it may run later in another thread, after somebody has compared versions.
    """
    added, copied = [], []
    for row, view in views:
        if row in going_on:
            widen(row.tensor)
            gradient = cast(torch.Tensor, row.tensor.grad)
            added.append((row, gradient.data))
            increment_version(gradient)
        else:
            row.tensor.grad = view
            copied.append((row, view.data))

    def take(reduced: torch.Tensor) -> None:
        for row, values in added:
            values.add_(row.of(reduced))
        for row, values in copied if sets else ():
            values.copy_(row.of(reduced))

    return take


# ---- Unsharded gradients, reduced by all-reduce as under DDP ----


class ReplicatedGradients(GradientStore):
    """Every rank keeps and reduces whole gradients by all-reduce; `p.grad` is a view of the bucket, as under DDP.

    If a view is still `p.grad` in the next backward, autograd has added to the average from before. The sum is divided and
    reduced again, which is correct: the average, divided by W and summed over W ranks, is the same average.

    From the step on, only these views keep the memory alive. So the memory is freed when the script zeroes gradients, before
    the next forward needs memory for activations.
    """

    def __init__(self, reduction: Reduction, landing: Landing):
        super().__init__(reduction, landing)
        self._lasting: dict[Bucket, torch.Tensor] = {}
        # Reduced gradients in the master dtype, if the reduce dtype is different.
        self._reduced: dict[Bucket, torch.Tensor] = {}
        self._under_way: dict[Bucket, torch.Tensor] = {}
        self._held_bytes: dict[Bucket, int] = {}

    def held_bytes(self) -> dict[str, int]:
        return {"gradients": sum(self._held_bytes.values()), "gradient buffers": 0}

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        if gradient.dtype != slot.bucket.precision.reduce:
            # `p.grad` must have the parameter's dtype, so it cannot be a view of the buffer. Autograd adds to it.
            return
        view = slot.view_of(self._lasting_buffer(slot.bucket))
        if gradient.data_ptr() != view.data_ptr():
            # So autograd adds the next micro-batches directly into the bucket's buffer, which needs no copy before its reduction.
            slot.parameter.grad = view.copy_(gradient)

    def release(self, bucket: Bucket) -> None:
        """Drops the store's references. `p.grad` keeps the memory until the script zeroes gradients."""
        self._lasting.pop(bucket, None)
        self._reduced.pop(bucket, None)

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        super().put(slot, gradient)
        # Otherwise autograd would add a further gradient of this pass to `grad`, and the first gradient would count twice.
        slot.parameter.grad = None

    def put_whole(self, bucket: Bucket, gradients: Sequence[torch.Tensor]) -> bool:
        is_taken = super().put_whole(bucket, gradients)
        if is_taken:
            with look_only():
                # As in `put`.
                set_all(bucket.parameters, "grad", repeat(None))
        return is_taken

    def _accumulates(self, bucket: Bucket) -> bool:
        return bucket in self._lasting

    def _buffer_for_whole(self, bucket: Bucket) -> torch.Tensor:
        flat = Tier(bucket.device).scratch(bucket.layout.numel, bucket.precision.reduce)
        self._keep(bucket, flat)
        return flat

    def start(self, bucket: Bucket) -> None:
        if self._is_put_whole(bucket):
            super().start(bucket)
            return
        for slot in bucket.slots:
            if not slot.arrived and slot.parameter.grad is not None:
                # A gradient of `no_sync` micro-batches. This pass reduces it, too.
                slot.used = True
                self.put(slot, slot.parameter.grad)
        super().start(bucket)

    def _lasting_buffer(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._lasting:
            self._keep(bucket, new_buffer(bucket))
        return self._lasting[bucket]

    def _keep(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._lasting[bucket] = flat
        self._count(bucket)

    def _open_buffer(self, bucket: Bucket) -> torch.Tensor:
        # For late gradients, the bucket's own buffer is in use: it is being reduced, or contains `p.grad`.
        is_late = bucket in self._started or bucket in self._again
        return new_buffer(bucket) if is_late else self._lasting_buffer(bucket)

    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        self._under_way[bucket] = flat
        return self._reduction.start(bucket, flat, flat)

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        flat, precision = self._under_way.pop(bucket), bucket.precision
        if precision.reduce == precision.master:
            return add_or_set(bucket, flat, flat, DeviceToHost(), going_on)
        if bucket not in self._reduced:
            self._reduced[bucket] = Tier(bucket.device).scratch(bucket.layout.numel, precision.master)
            self._count(bucket)
        return add_or_set(bucket, flat, self._reduced[bucket], DeviceToHost(), going_on)

    def _count(self, bucket: Bucket) -> None:
        flat, reduced = self._lasting[bucket], self._reduced.get(bucket)
        self._held_bytes[bucket] = flat.nbytes + (0 if reduced is None else reduced.nbytes)


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
        landing: Landing,
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
        self._lent: dict[Bucket, torch.Tensor] = {}
        self._in_flight: deque[Bucket] = deque()
        self._scratches: dict[Bucket, int] = {}
        self._most_beside_bytes = 0

    def held_bytes(self) -> dict[str, int]:
        gradients = sum(self._lasting_bytes.values()) + sum(self._shard_bytes.values())
        return {
            "gradients": gradients + self._landing.d2h.sum_bytes,
            "gradient buffers": self._pool.most_bytes + self._most_beside_bytes,
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
        if not lasts or bucket.device.type != "cpu" or bucket.tier.is_apart or self._stays_in_place(bucket):
            self._shards.pop(bucket, None)
        reservation = self._reservations.get(bucket)
        if reservation is None:
            return
        if bucket.device.type != "cpu":
            del self._lasting[bucket], self._reservations[bucket]
        elif not bucket.tier.is_apart and reservation.flat.nbytes >= _KEPT_BELOW_BYTES:
            # Not if offloaded, because a copy to the tier may still read the buffer. The padding reads as zero afterwards.
            reservation.release()

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
            bucket.hold_gradients()
        return is_taken

    def _accumulates(self, bucket: Bucket) -> bool:
        return bucket in self._accumulated

    def _buffer_for_whole(self, bucket: Bucket) -> torch.Tensor:
        if self._lasts(bucket):
            return self._open_buffer(bucket)
        # The gradients themselves need as much memory as another buffer. `put_whole` writes zeros into the gaps, which saves a
        # kernel launch per gap here.
        return self._borrow(bucket, beside=1)

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
        bucket.await_gradient()
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

    def start(self, bucket: Bucket) -> None:
        if self._is_put_whole(bucket):
            super().start(bucket)
            return
        for slot in bucket.slots:
            # Unused in this pass. Earlier `no_sync` micro-batches may have left a sum, for which no hook will run.
            if not slot.arrived:
                gradient = slot.parameter.grad
                slot.continues = isinstance(gradient, ShardedGradient) and not gradient.is_spent
                if isinstance(gradient, ShardedGradient):
                    gradient = gradient.take_pending()
                if gradient is not None:
                    slot.used = True
                    self.put(slot, gradient)
        super().start(bucket)

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
        self._pool.rest()

    def discard_open(self) -> None:
        for bucket in self._open:
            # Return the buffer to the pool. A lost buffer would count against the limit until the end of the run.
            if bucket in self._lent:
                self._pool.release(bucket, self._lent.pop(bucket))
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

    def _borrow(self, bucket: Bucket, beside: int = 0) -> torch.Tensor:
        """Borrows a buffer from the pool, with undefined contents. `beside`: see `BufferPool.room_for`."""
        pool, in_flight = self._pool, self._in_flight
        room = pool.room_for(bucket, beside)
        if room == 1 and not in_flight:
            # The bucket would get the last buffer, so start an earlier, partly filled bucket before.
            self.start_passed_over(bucket)
            room = pool.room_for(bucket, beside)
        # Backward waits here for the oldest reduction, because the limit on buffers limits gradient memory.
        while room == 0 and (in_flight or self.start_passed_over(bucket)):
            if in_flight:
                oldest = in_flight[0]
                # Do not ask while a bucket starts: the bucket already counts as started, so other ranks would wait for it.
                if not self._may_wait(oldest) and (not self.may_ask or not self.starts.ask(self.places[oldest] + 1)):
                    break
                self.finish(oldest)
            room = pool.room_for(bucket, beside)
        lent = self._lent[bucket] = pool.take(bucket, beside)
        return lent if lent.numel() == bucket.layout.numel else lent[: bucket.layout.numel]

    def _spill(self, bucket: Bucket) -> None:
        """Moves an earlier reduced shard out of the buffer before the buffer is filled again."""
        flat = self._lasting_buffer(bucket)
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
        """Returns the memory for the reduced shard, (shard_numel,) of the dtype of the reduction's result."""
        precision, is_lent = bucket.precision, bucket in self._lent
        own, fits = bucket.own_interval, precision.reduced == precision.reduce
        if fits and not is_lent:
            # In place, because this rank does not need the other parts of its buffer.
            return flat[own.start : own.stop]
        if bucket.tier.is_apart:
            # Separate memory, because the copy to the host still reads the shard after the next bucket has got the buffer.
            return self._scratch(bucket)
        if precision.reduced == bucket.gradient_dtype and all(map(is_, map(_GRAD, bucket.row_tensors), repeat(None))):
            return self._shard(bucket)
        return flat[own.start : own.stop] if fits else self._scratch(bucket)

    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        reduced = self._targets.pop(bucket)
        if bucket not in self._lent:
            target = reduced if self._stays_in_place(bucket) else self._shard(bucket)
            return self._leave(bucket, reduced, target, going_on)
        self._in_flight.remove(bucket)
        arrival = self._leave(bucket, reduced, self._shard(bucket), going_on)
        self._scratches.pop(bucket, None)
        # After the copy out of the buffer, because the next bucket fills the buffer at once.
        self._pool.release(bucket, self._lent.pop(bucket))
        return arrival

    def _stays_in_place(self, bucket: Bucket) -> bool:
        """Whether a shard reduced in a lasting buffer stays there until the step."""
        precision = bucket.precision
        return precision.reduce == precision.reduced == bucket.gradient_dtype and not bucket.tier.is_apart

    def _shard(self, bucket: Bucket) -> torch.Tensor:
        """Returns the memory of this rank's gradients between backward and step, (shard_numel,) of `gradient_dtype`."""
        shard = self._shards.get(bucket)
        if shard is None:
            shard = bucket.tier.scratch(bucket.layout.shard_numel, bucket.gradient_dtype)
            self._keep_shard(bucket, shard)
        return shard

    def _keep_shard(self, bucket: Bucket, shard: torch.Tensor) -> None:
        self._shards[bucket] = shard
        self._shard_bytes[bucket] = max(shard.nbytes, self._shard_bytes.get(bucket, 0))

    def _widen(self, bucket: Bucket) -> None:
        """Moves the rows' gradients into a shard of the master dtype, for sums."""
        held = [row for row in bucket.rows if row.tensor.grad is not None]
        shard = bucket.tier.scratch(bucket.layout.shard_numel, bucket.precision.master)
        for row in held:
            widen(row.tensor)
            row.tensor.grad = row.of(shard).copy_(cast(torch.Tensor, row.tensor.grad))
        bucket.forget_laid()
        self._keep_shard(bucket, shard)

    def _leave(self, bucket: Bucket, reduced: torch.Tensor, target: torch.Tensor, going_on: Collection[Row]) -> Arrival:
        """Puts a reduced gradient into the rows, as `add_or_set` does, with sums in the master dtype."""
        # In bfloat16, small gradients of later micro-batches would be rounded away.
        if going_on and bucket.gradient_dtype != bucket.precision.master:
            self._widen(bucket)
            target = self._shard(bucket)
        return add_or_set(bucket, reduced, target, self._d2h(bucket), going_on)

    def _d2h(self, bucket: Bucket) -> DeviceToHost:
        return self._landing.d2h if bucket.tier.is_apart else _AT_ONCE

    def _scratch(self, bucket: Bucket) -> torch.Tensor:
        """Returns a temporary shard on the training device."""
        scratch = Tier(bucket.device).scratch(bucket.layout.shard_numel, bucket.precision.reduced)
        if bucket in self._lent:
            self._scratches[bucket] = scratch.nbytes
            self._most_beside_bytes = max(self._most_beside_bytes, sum(self._scratches.values()))
        return scratch


def choose_store(
    buckets: Sequence[Bucket], config: ZeroConfig, reduction: Reduction, landing: Landing
) -> GradientStore:
    """Returns the store for the config's stage."""
    if all(bucket.rows_are_parameters for bucket in buckets):
        return ReplicatedGradients(reduction, landing)
    # If the shard is the whole bucket, a reduced shard is as large as the buffer, so a pool would save nothing.
    is_replicated = all(bucket.group.groups.shard_size == 1 for bucket in buckets)
    is_whole = is_replicated and not any(bucket.tier.is_apart for bucket in buckets)
    passing = BufferPool(buckets, GRAD_BUFFERS, buckets[0].device)
    kept: Literal["accumulated", "pooled"] = "accumulated" if config.stage == 1 else "pooled"
    return ShardedGradients(reduction, landing, passing, "lasting" if is_whole else kept)
