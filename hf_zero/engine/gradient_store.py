"""Flat gradient buffers between backward and step, and the pool that they come from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import cast

import torch
from torch.autograd.graph import increment_version

from ..buckets.bucket import Bucket, ParameterSlot, Row
from ..buckets.memory import clear_padding
from ..buckets.sharded import widen
from ..comm.transport import Handle
from ..device import Arrival
from ..layout.slots import BufferKind, kind_of_buffer, shared_numel
from ..offload.copies import Downlink
from ..offload.tiers import Tier
from .reductions import Reduction

# ---- A pool of bucket-sized gradient buffers, which stages 2 and 3 fill and reduce one after the other ----


class OpenBuffer:
    """A bucket's flat gradient buffer (numel,) of the reduce dtype."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor):
        self.flat = flat
        self._bucket = bucket

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """Of the bucket's slots, in their order; made when the first is needed."""
        return self._bucket.views_of(self.flat)


class BufferPool:
    """Whole-bucket buffers, kept by kind (layout/slots.py); at most `limit` large ones, in use or free.

    When gradients come in another order than the buckets, more than `limit` may be open at a time; the pool then grows rather
    than stand still.

    Attributes:
        most_bytes: the most that all its buffers have had at a time.
    """

    def __init__(self, buckets: Sequence[Bucket], limit: int, device: torch.device):
        self._tier = Tier(device)
        self._shared_numel = shared_numel([bucket.layout for bucket in buckets])
        self._limit = limit
        # By kind and dtype: a small buffer that is free does not count against the limit.
        self._free: dict[tuple[BufferKind, torch.dtype], list[torch.Tensor]] = {}
        self._large_out = 0
        self._bytes = 0
        self.most_bytes = 0

    def exhausted_for(self, bucket: Bucket) -> bool:
        """True when a buffer for `bucket` would be one large buffer more than the limit."""
        return self._kind(bucket) is not BufferKind.SMALL and self._large_out >= self._limit

    def is_last_for(self, bucket: Bucket) -> bool:
        """True when the next buffer that is as large as this bucket's will be one more than the limit."""
        return self._kind(bucket) is not BufferKind.SMALL and self._large_out == self._limit - 1

    def take(self, bucket: Bucket) -> torch.Tensor:
        """A buffer of at least the bucket's elements, of the reduce dtype and undefined contents."""
        kind, dtype = self._kind(bucket), bucket.precision.reduce
        self._large_out += kind is not BufferKind.SMALL
        free = self._free.get((kind, dtype), [])
        large_enough = [place for place, buffer in enumerate(free) if buffer.numel() >= bucket.layout.numel]
        if large_enough:
            return free.pop(min(large_enough, key=lambda place: free[place].numel()))
        if kind is not BufferKind.SMALL:
            self._make_room()
        buffer = self._tier.scratch(bucket.layout.numel, dtype)
        self._bytes += buffer.nbytes
        self.most_bytes = max(self.most_bytes, self._bytes)
        return buffer

    def give_back(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        kind = self._kind(bucket)
        self._large_out -= kind is not BufferKind.SMALL
        if kind is BufferKind.OVERSIZE:
            self._bytes -= buffer.nbytes
        else:
            self._free.setdefault((kind, buffer.dtype), []).append(buffer)

    def rest(self) -> None:
        """Drops the buffers not in use, until the next backward."""
        self._bytes -= sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
        self._free.clear()

    def _make_room(self) -> None:
        """Drops free large buffers that would be too many beside those in use."""
        free = [buffers for (kind, _), buffers in self._free.items() if kind is BufferKind.SHARED]
        while self._large_out + sum(map(len, free)) > self._limit and any(free):
            self._bytes -= max(free, key=len).pop().nbytes

    def _kind(self, bucket: Bucket) -> BufferKind:
        return kind_of_buffer(bucket.layout, self._shared_numel)


# ---- How gradients are kept and reduced between backward and the optimizer: what the stages differ in ----
#
# A store keeps a flat gradient buffer a bucket while it fills, starts its reduction, and leaves the result in the `.grad` of
# the bucket's rows. The stores keep those buffers for different times; the pass above them (backward_pass.py) is one.

_AT_ONCE_NUMEL = 1 << 20
"""Gradients that fill no more are put in one piece, which takes as much memory once more meanwhile."""

_DTYPE, _NUMBER, _FIRST = attrgetter("dtype"), attrgetter("number"), itemgetter(0)


@dataclass(frozen=True, kw_only=True)
class Landing:
    """What becomes of reduced gradients.

    Attributes:
        downlink: how they come into a tier's host memory.
        landed: told of each bucket whose rows have theirs, or will have on the arrival.
        most_under_way: reductions that may run before the oldest is waited for; None waits for all at the end of backward.
        goes_on: whether another backward is to add to what this one leaves, so that nobody reads it yet.
    """

    downlink: Downlink
    landed: Callable[[Bucket, Arrival], None]
    most_under_way: int | None
    goes_on: Callable[[], bool]


class GradientStore(ABC):
    """Keeps gradients until the step: fills a flat buffer a bucket, and starts the buffer's reduction.

    A rank's share of the mean is taken of each gradient as it is put, in DDP's order: divided, then summed.

    Attributes:
        start_passed_over: given a bucket that wants a buffer, starts one that stands before it and is passed over.
            Returns whether it has.
    """

    def __init__(self, reduction: Reduction, landing: Landing):
        self._reduction = reduction
        self._landing = landing
        self._open: dict[Bucket, OpenBuffer] = {}
        self._started: dict[Bucket, Handle] = {}
        self._arriving: list[Bucket] = []
        # Put when the bucket starts.
        self._small: dict[Bucket, list[ParameterSlot]] = {}
        self._small_gradients: dict[Bucket, list[torch.Tensor]] = {}
        # Whose reduction is the second in its pass.
        self._again: set[Bucket] = set()
        self.start_passed_over: Callable[[Bucket], bool | None] = lambda bucket: False

    @abstractmethod
    def held_bytes(self) -> dict[str, int]:
        """Bytes of gradient memory by kind: "gradients" lasting from backward to step, "gradient buffers" in passing."""

    @abstractmethod
    def release(self, bucket: Bucket) -> None:
        """Gives back what need not last from the step to the next backward."""

    @abstractmethod
    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """Keeps a whole gradient, unreduced, until a reducing pass (gradient accumulation without communication).

        Where it does not, autograd itself keeps adding to `p.grad` until then.
        """

    @abstractmethod
    def _open_buffer(self, bucket: Bucket) -> OpenBuffer:
        """A buffer to fill."""

    @abstractmethod
    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        """Starts the reduction of a filled buffer."""

    @abstractmethod
    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        """Leaves the reduced gradient in the rows, once the reduction has ended; it is there on the arrival.

        Args:
            going_on: rows whose gradient it adds to.
        """

    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """A further gradient after the bucket's reduction started (a parameter used twice under reentrant checkpointing).

        `start_again` reduces it.
        """
        self.put(slot, gradient)

    def finish_slot(self, slot: ParameterSlot) -> None:  # noqa: B027 (`p.grad` may be the reduced gradient itself)
        """Ends the pass for a slot whose gradient some rank contributed to."""

    def end_pass(self) -> None:
        """Called on every rank when all gradients of a backward pass are reduced."""
        self._reduction.end_pass()

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """The slot's share of a gradient: divided by the number of ranks and cast, added if the slot has one already."""
        bucket = slot.bucket
        # Small ones wait until the bucket starts: most parameters of a model are small, and are put by two calls together.
        if slot.is_small and not slot.arrived:
            self.put_small(slot, gradient)
            return
        share = bucket.share
        view = self._buffer(bucket).views[slot.number]
        is_there = gradient.data_ptr() == view.data_ptr()
        if slot.arrived:
            self._put_small(bucket)
            view.add_(gradient, alpha=share)
        elif share == 1.0:
            if not is_there:
                view.copy_(gradient)
        elif is_there:
            view.mul_(share)
        else:
            torch.mul(gradient, share, out=view)
        slot.arrived = True

    def put_small(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """`put` of a small slot's first gradient in a pass."""
        slot.arrived = True
        bucket = slot.bucket
        if bucket in self._small:
            self._small[bucket].append(slot)
            self._small_gradients[bucket].append(gradient)
        else:
            self._small[bucket], self._small_gradients[bucket] = [slot], [gradient]

    def start_again(self, bucket: Bucket) -> None:
        """Starts the reduction of what came late, on this rank or another; its result is added to that of the first."""
        self.finish(bucket)
        # The first result may still be on its way out of the buffer that is filled again.
        bucket.await_gradient()
        self._again.add(bucket)
        self._start(bucket)

    def start(self, bucket: Bucket) -> None:
        """Starts the bucket's reduction. Slots to which nothing came take part with zeros."""
        self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        buffer = self._buffer(bucket)
        self._put_small(bucket)
        for slot in bucket.slots:
            if not slot.arrived:
                buffer.views[slot.number].zero_()
            slot.arrived = False
        # In this order: there may be no memory to start it with, and the buffer is discarded as an open one then.
        self._started[bucket] = self._start_reduction(bucket, buffer.flat)
        del self._open[bucket]
        most = self._landing.most_under_way
        if most is not None and len(self._started) > most:
            self.finish(next(iter(self._started)))

    def finish(self, bucket: Bucket) -> None:
        """Waits for the bucket's reduction, if one is under way, and leaves its result in the rows."""
        handle = self._started.pop(bucket, None)
        if handle is not None:
            handle.finish()
            held = (row for row in bucket.rows if row.tensor.grad is not None)
            going_on = {row for row in held if row.slot.continues or bucket in self._again}
            self._again.discard(bucket)
            bucket.arrival = self._deliver(bucket, going_on)
            self._arriving.append(bucket)
            self._landing.landed(bucket, bucket.arrival)

    def finish_all(self) -> None:
        """Returns when all gradients are in the rows, or on their way there where another backward adds to them."""
        for bucket in list(self._started):
            self.finish(bucket)
        arriving, self._arriving = self._arriving, []
        if not self._landing.goes_on():
            for bucket in arriving:
                bucket.await_gradient()

    def discard_open(self) -> None:
        """Forgets buffers that a failed backward left half filled."""
        for bucket in (*self._open, *self._small):
            for slot in bucket.slots:
                slot.arrived = False
        self._open.clear()
        self._small.clear()
        self._small_gradients.clear()

    def _put_small(self, bucket: Bucket) -> None:
        slots, gradients = self._small.pop(bucket, None), self._small_gradients.pop(bucket, [])
        if not slots:
            return
        buffer, share = self._buffer(bucket), bucket.share
        is_as_it_is = set(map(_DTYPE, gradients)) == {buffer.flat.dtype}
        is_all = is_as_it_is and len(slots) == len(bucket.slots)
        if is_all and share != 1.0 and buffer.flat.numel() <= _AT_ONCE_NUMEL:
            ordered = [gradient for _, gradient in sorted(zip(map(_NUMBER, slots), gradients), key=_FIRST)]
            bucket.fill_slots(buffer.flat, ordered, share)
            return
        views = [buffer.views[slot.number] for slot in slots]
        if not is_as_it_is:
            # Divided in their own dtype, as `put` does.
            torch._foreach_copy_(views, torch._foreach_mul(gradients, share))
            return
        torch._foreach_copy_(views, gradients)
        if share != 1.0:
            torch._foreach_mul_(views, share)

    def _buffer(self, bucket: Bucket) -> OpenBuffer:
        found = self._open.get(bucket)
        if found is None:
            found = self._open[bucket] = self._open_buffer(bucket)
        return found


def new_buffer(bucket: Bucket) -> OpenBuffer:
    """A flat gradient buffer of the reduce dtype, zero where no parameter lies."""
    flat = Tier(bucket.device).scratch(bucket.layout.numel, bucket.precision.reduce)
    return OpenBuffer(bucket, clear_padding(flat, bucket.layout))


def add_or_set(
    bucket: Bucket, reduced: torch.Tensor, target: torch.Tensor, downlink: Downlink, going_on: Collection[Row]
) -> Arrival:
    """Row by row: adds `reduced` to a gradient that goes on, else sets it. Both are flat as the rank's shard.

    Sums are of the master dtype.

    `target` is where a gradient that is set stays: `reduced` itself, or a buffer that it is copied into, on the device where
    the optimizer steps. Both are there on the arrival.
    """
    views = zip(bucket.rows, bucket.row_views_of(target))
    if going_on:
        return downlink.start_sum(_sum_into(views, going_on, sets=target is not reduced), reduced, bucket.arrival)
    # Into the same memory.
    bucket.await_gradient()
    arrival = Arrival() if target is reduced else downlink.start_copy(target, reduced)
    for row, view in views:
        row.tensor.grad = view
    return arrival


def _sum_into(
    views: Iterable[tuple[Row, torch.Tensor]], going_on: Collection[Row], *, sets: bool
) -> Callable[[torch.Tensor], None]:
    """What adds a reduced shard to the gradients of rows that go on, and, if it `sets`, copies it to those of the others.

    These have their views from now on. By `data`, since it may be called in another thread, when somebody has looked at
    versions: the edits are counted now.
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
