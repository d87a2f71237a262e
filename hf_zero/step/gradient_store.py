"""Flat gradient buffers between backward and step: their pool, and a store for each way of keeping them."""

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

# ---- A pool of bucket-sized gradient buffers, which stages 2 and 3 fill and reduce one after the other ----


class BufferPool:
    """Whole-bucket buffers, kept by kind (layout.py); at most `limit` large ones, in use or free.

    When gradients come in another order than the buckets, more than `limit` may be open at a time; the pool then grows rather
    than stand still.

    Attributes:
        most_bytes: the most that all its buffers have had at a time.
    """

    def __init__(self, buckets: Sequence[Bucket], limit: int, device: torch.device):
        self._tier = Tier(device)
        shared = shared_numel([bucket.layout for bucket in buckets])
        self._kind = {bucket: kind_of_buffer(bucket.layout, shared) for bucket in buckets}
        self._limit = limit
        # By kind and dtype: a small buffer that is free does not count against the limit.
        self._free: dict[tuple[BufferKind, torch.dtype], list[torch.Tensor]] = {}
        self._large_out = 0
        self._bytes = 0
        self.most_bytes = 0

    def room_for(self, bucket: Bucket, beside: int = 0) -> int | None:
        """Returns how many buffers may be taken, if they are as large as the bucket's; None for a small one, without a limit.

        Args:
            beside: as many bytes as so many large buffers have are in use elsewhere.
        """
        return None if self._kind[bucket] is BufferKind.SMALL else max(0, self._most(beside) - self._large_out)

    def _most(self, beside: int) -> int:
        return max(1, self._limit - beside)

    def take(self, bucket: Bucket, beside: int = 0) -> torch.Tensor:
        """A buffer of at least the bucket's elements, of the reduce dtype and undefined contents. `beside`: the same."""
        kind, dtype = self._kind[bucket], bucket.precision.reduce
        self._large_out += kind is not BufferKind.SMALL
        free = self._free.get((kind, dtype), [])
        if len(free) == 1 and free[0].numel() >= bucket.layout.numel:
            return free.pop()
        large_enough = [place for place, buffer in enumerate(free) if buffer.numel() >= bucket.layout.numel]
        # The smallest of these: a larger bucket may want a larger one while this is in use.
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
        # Not kept: an embedding's buffer would stay in memory for the rest of the backward.
        if kind is BufferKind.OVERSIZE:
            self._bytes -= buffer.nbytes
        else:
            self._free.setdefault((kind, buffer.dtype), []).append(buffer)

    def rest(self) -> None:
        """Drops the buffers not in use, until the next backward."""
        self._bytes -= sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
        self._free.clear()

    def _make_room(self, most: int) -> None:
        """Drops free large buffers that would be too many in addition to those in use."""
        free = [buffers for (kind, _), buffers in self._free.items() if kind is BufferKind.SHARED]
        while self._large_out + sum(map(len, free)) > most and any(free):
            self._bytes -= max(free, key=len).pop().nbytes


# ---- Gradients between backward and the optimizer: the stages differ in how long buffers last ----
#
# A store keeps a flat gradient buffer a bucket while it fills, starts its reduction, and leaves the result in the `.grad` of
# the bucket's rows. The stores keep those buffers for different times; the pass above them (backward.py) is one.

_FORM, _GRAD = attrgetter("dtype", "layout"), attrgetter("grad")


@dataclass(frozen=True, kw_only=True)
class Landing:
    """The receivers of reduced gradients.

    Attributes:
        d2h: copies them into a tier's host memory.
        landed: called for each bucket whose rows have their gradients, or will have on the arrival.
        most_under_way: reductions that may run before the oldest is waited for; None waits for all at the end of backward.
        goes_on: whether another backward is to add to what this one leaves, so that nobody reads it yet.
    """

    d2h: DeviceToHost
    landed: Callable[[Bucket, Arrival], None]
    most_under_way: int | None
    goes_on: Callable[[], bool]


class GradientStore(ABC):
    """Keeps gradients until the step: fills a flat buffer a bucket, and starts the buffer's reduction.

    A rank's share of the mean is taken of each gradient as it is put, in DDP's order: divided, then summed.

    Attributes:
        start_passed_over: given a bucket that wants a buffer, starts one that stands before it and is passed over.
            Returns whether it has.
        starts: counts the reductions that backward may wait for.
        places: the indices of the buckets, in the order in which they start.
        went_on: while the end of a failed pass is made up for, whether another backward was to add to it; else None.
        may_ask: other ranks may be asked to start reductions that this rank wants to wait for.
        steps: starts the steps of reductions between groups of ranks, if these have several.
    """

    def __init__(self, reduction: Reduction, landing: Landing):
        self._reduction = reduction
        self._landing = landing
        # Flat gradient buffers that are being filled, (numel,) of the reduce dtype.
        self._open: dict[Bucket, torch.Tensor] = {}
        self._started: dict[Bucket, Handle] = {}
        self._arriving: list[Bucket] = []
        # Put whole in this pass.
        self._whole: set[Bucket] = set()
        # Whose reduction is the second in its pass.
        self._again: set[Bucket] = set()
        # Gradients that came late while this rank may not wait for the reduction before them.
        self._late: dict[ParameterSlot, torch.Tensor] = {}
        self.start_passed_over: Callable[[Bucket], bool | None] = lambda bucket: False
        self.starts = CommonStarts(0)
        self.places: dict[Bucket, int] = {}
        self.steps: StepsInOrder | None = None
        self.may_ask = True
        self.went_on: bool | None = None

    @abstractmethod
    def held_bytes(self) -> dict[str, int]:
        """Bytes of gradient memory by kind: "gradients" lasting from backward to step, "gradient buffers" in passing."""

    @abstractmethod
    def release(self, bucket: Bucket) -> None:
        """Frees memory that need not last from the step to the next backward."""

    @abstractmethod
    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """Keeps a whole gradient, unreduced, until a reducing pass (gradient accumulation without communication).

        Where it does not, autograd itself keeps adding to `p.grad` until then.
        """

    @abstractmethod
    def _open_buffer(self, bucket: Bucket) -> torch.Tensor:
        """A buffer to fill."""

    @abstractmethod
    def _start_reduction(self, bucket: Bucket, flat: torch.Tensor) -> Handle:
        """Starts the reduction of a filled buffer."""

    @abstractmethod
    def _deliver(self, bucket: Bucket, going_on: Collection[Row]) -> Arrival:
        """Puts the reduced gradient into the rows behind the reduction; the values are there on the arrival.

        Args:
            going_on: rows whose gradient it adds to.
        """

    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """A further gradient after the bucket's reduction started (a parameter used twice under reentrant checkpointing).

        `start_again` reduces it.
        """
        self.put(slot, gradient)

    def finish_slots(self, slots: Iterable[ParameterSlot]) -> None:  # noqa: B027 (`p.grad` may be the reduced gradient itself)
        """Ends the pass for slots: `p.grad` stands for the reduced gradient where some rank has contributed to it."""

    def end_pass(self) -> None:
        """Called on every rank when all gradients of a backward pass are reduced."""
        self._whole.clear()
        self._reduction.end_pass()

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        """Puts the slot's share of a gradient: divided by the number of ranks and cast, added if the slot has one already."""
        bucket = slot.bucket
        # Divided before the sum, as DDP does: the other order rounds differently, and the losses would not be bitwise
        # equal.
        share = bucket.share
        view = slot.view_of(self._buffer(bucket))
        is_there = gradient.data_ptr() == view.data_ptr()
        if slot.arrived:
            view.add_(gradient, alpha=share)
        elif share == 1.0:
            # One rank: a multiplication by 1 would read and write the whole gradient for nothing.
            if not is_there:
                view.copy_(gradient)
        elif is_there:
            view.mul_(share)
        else:
            torch.mul(gradient, share, out=view)
        slot.arrived = True

    @property
    def lasts_whole(self) -> bool:
        """Whether the buffers of all buckets last until the step."""
        return True

    def takes_whole(self, bucket: Bucket, bytes_to_come: int) -> bool:
        """Whether `put_whole` may take the bucket's gradients: they have the dtype in which they are reduced.

        If all buffers last until the step, the gradients that wait for each other must not need more memory than the buffers
        that have yet to be allocated. Otherwise a rank would hold more than all buffers.

        Args:
            bytes_to_come: bytes of the buffers that are not allocated before the bucket's last gradient has come.
        """
        if bucket.slots[0].parameter.dtype != bucket.precision.reduce:
            return False
        if not self.lasts_whole:
            return True
        numels = [slot.parameter.numel() for slot in bucket.slots]
        # Autograd always has one gradient.
        waiting_bytes = (sum(numels) - max(numels)) * bucket.precision.reduce.itemsize
        return waiting_bytes <= bytes_to_come

    def put_whole(self, bucket: Bucket, gradients: Sequence[torch.Tensor]) -> bool:
        """Puts the shares of all gradients of a bucket, the first of this pass, and replaces `p.grad` as `put` does.

        Args:
            gradients: plain tensors, by slot; those that accumulated in the bucket's lasting buffer are views of it.

        Returns:
            False: not taken, since some differ from the others in kind or place.
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
        """Has further gradients added to those of `put_whole`, one by one; without the note, they would replace them.

        If the reduction has started, further gradients are late, and a buffer of their own takes them.
        """
        if bucket in self._open:
            self._whole.discard(bucket)
            for slot in bucket.slots:
                slot.arrived = True

    @abstractmethod
    def _accumulates(self, bucket: Bucket) -> bool:
        """Whether gradients of this step, reduced or not, lie in the bucket's lasting buffer."""

    @abstractmethod
    def _lasting_buffer(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's buffer that lasts until the step."""

    @abstractmethod
    def _buffer_for_whole(self, bucket: Bucket) -> torch.Tensor:
        """A buffer for all gradients of a bucket that still take their own memory; its contents are undefined."""

    def start_again(self, bucket: Bucket) -> None:
        """Reduces late gradients, of this rank or another, and adds the sum to the first one."""
        # The first sum must be finished: the second is added to it.
        self.finish(bucket)
        # The first result may still be on its way out of the buffer that is filled again.
        bucket.await_gradient()
        late = [(slot, self._late.pop(slot)) for slot in bucket.slots if slot in self._late]
        for slot, gradient in late:
            self.put(slot, gradient)
        self._again.add(bucket)
        self._start(bucket)

    def start(self, bucket: Bucket) -> None:
        """Starts the bucket's reduction. Slots to which nothing came take part with zeros."""
        self._start(bucket)

    def start_unfilled(self, bucket: Bucket) -> None:
        """Starts the bucket's reduction while autograd may still add to sums that `no_sync` micro-batches left in `p.grad`.

        These sums stay there. Reduced now, they would be rounded without the gradients that autograd adds to them later.
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
                    # A buffer comes with values of another bucket or pass, and the sum over the ranks would have them.
                    slot.view_of(flat).zero_()
        if self.steps is not None:
            # The next start moves older reductions one step further, and waits for the step before.
            self.steps.may_advance = all(map(self._may_wait, self._started))
        # In this order: there may be no memory to start it with. The buffer stays open then, and a further start finds it filled.
        self._started[bucket] = self._start_reduction(bucket, flat)
        del self._open[bucket]
        if not is_whole:
            for slot in bucket.slots:
                slot.arrived = False
        most = self._landing.most_under_way
        if most is not None and len(self._started) > most:
            # The oldest: its buffer goes back to the pool first.
            oldest = next(iter(self._started))
            if self._may_wait(oldest):
                self.finish(oldest)

    def _may_wait(self, bucket: Bucket) -> bool:
        """Whether backward may wait for a bucket's reduction. See [Note: waits for reductions]."""
        return self.places[bucket] < self.starts.sure

    def start_last_steps(self, number: int) -> None:
        """Moves the reductions of the first `number` buckets to their last step, if they have several."""
        if self.steps is not None:
            for bucket, handle in self._started.items():
                if self.places[bucket] < number:
                    handle.start_last()

    def finish(self, bucket: Bucket) -> None:
        """Waits for the bucket's reduction, if one is under way, and leaves its result in the rows."""
        handle = self._started.pop(bucket, None)
        if handle is not None:
            # Reduce before delivery: until then the buffer belongs to the transport.
            handle.finish()
            if self._is_put_whole(bucket):
                going_on = set()
            else:
                held = (row for row in bucket.rows if row.tensor.grad is not None)
                going_on = {row for row in held if row.slot.continues or bucket in self._again}
                self._again.discard(bucket)
            bucket.arrival = self._deliver(bucket, going_on)
            self._arriving.append(bucket)
            self._landing.landed(bucket, bucket.arrival)

    def finish_all(self) -> None:
        """Waits for all gradients in the rows; only for the reductions if another backward adds to them."""
        for bucket in list(self._started):
            self.finish(bucket)
        arriving, self._arriving = self._arriving, []
        if not self.goes_on:
            for bucket in arriving:
                bucket.await_gradient()

    def discard_open(self) -> None:
        """Forgets buffers that a failed backward left half filled."""
        for bucket in self._open:
            for slot in bucket.slots:
                slot.arrived = False
        self._open.clear()
        self._whole.clear()
        self._late.clear()

    @property
    def goes_on(self) -> bool:
        """Whether another backward is to add to this pass."""
        return self._landing.goes_on() if self.went_on is None else self.went_on

    def _is_put_whole(self, bucket: Bucket) -> bool:
        """Whether all gradients of the bucket's first reduction in this pass were put together: no slot has a note."""
        return bucket in self._whole and bucket not in self._again

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        found = self._open.get(bucket)
        if found is None:
            found = self._open[bucket] = self._open_buffer(bucket)
        return found


def new_buffer(bucket: Bucket) -> torch.Tensor:
    """A flat gradient buffer of the reduce dtype, zero where no parameter lies."""
    flat = Tier(bucket.device).scratch(bucket.layout.numel, bucket.precision.reduce)
    return clear_padding(flat, bucket.layout)


def add_or_set(
    bucket: Bucket, reduced: torch.Tensor, target: torch.Tensor, d2h: DeviceToHost, going_on: Collection[Row]
) -> Arrival:
    """Adds `reduced` to the gradients of rows that go on, and sets the others. Both are flat as the rank's shard.

    Sums are of the master dtype.

    `target` is where a gradient that is set stays: `reduced` itself, or a buffer that it is copied into, on the device where
    the optimizer steps. Both are there on the arrival.
    """
    if going_on:
        take = _sum_into(zip(bucket.rows, bucket.row_views.of(target)), going_on, sets=target is not reduced)
        return d2h.start_sum(take, reduced, bucket.arrival)
    # An earlier sum or copy may still write to the memory that is set here.
    bucket.await_gradient()
    arrival = ARRIVED if target is reduced else d2h.start_copy(target, reduced)
    bucket.lay_gradients(target)
    return arrival


def _sum_into(
    views: Iterable[tuple[Row, torch.Tensor]], going_on: Collection[Row], *, sets: bool
) -> Callable[[torch.Tensor], None]:
    """Returns a function that adds a reduced shard to rows that go on, and with `sets` copies it to the others.

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
        self._lasting: dict[Bucket, torch.Tensor] = {}
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
        view = slot.view_of(self._lasting_buffer(slot.bucket))
        if gradient.data_ptr() != view.data_ptr():
            # Autograd adds the next micro-batches in the bucket's own buffer, which is reduced without a copy.
            slot.parameter.grad = view.copy_(gradient)

    def release(self, bucket: Bucket) -> None:
        """Frees nothing: `p.grad` lasts until the script zeroes it."""
        self._lasting.pop(bucket, None)
        self._reduced.pop(bucket, None)

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        super().put(slot, gradient)
        # A further gradient of this pass would be added to the one in `grad`, which would then count twice.
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
                # A gradient from `no_sync` micro-batches, which this pass reduces.
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
        # What comes late finds the bucket's own buffer on its way, or with `p.grad` in it.
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


# Gradients that are reduced into shards, from a buffer for each bucket or from a small pool; the choice of a stage's store.

_AT_ONCE = DeviceToHost()

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
        # Buffers of the pool, and the buckets that are reduced in them.
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
            # The reduced shard of an earlier pass may still lie in this buffer: the copy would overwrite the shard.
            self._spill(slot.bucket)
            slot.parameter.grad = view.copy_(gradient)

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
        # Before `grad` is replaced below: a `ShardedGradient` there says that the sum of earlier passes goes on.
        if not slot.arrived:
            slot.continues = isinstance(parameter.grad, ShardedGradient)
        super().put(slot, gradient)
        # As `finish_slots` does: each gradient of a step comes here.
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
        # The gradients themselves take as much memory as another buffer. The join writes zeros where no gradient lies; to clear
        # the gaps before it would be a launch each.
        return self._borrow(bucket, beside=1)

    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        bucket = slot.bucket
        if bucket in self._started and not self._may_wait(bucket):
            before = self._late.get(slot)
            self._late[slot] = gradient if before is None else before.add_(gradient)
            if not isinstance(slot.parameter.grad, ShardedGradient):
                # Else autograd adds the next gradient to this one, which would count twice.
                slot.parameter.grad = None
            return
        self.finish(bucket)
        # The shard may still be on its way out of the buffer that is filled again.
        bucket.await_gradient()
        self.put(slot, gradient)

    def finish_slots(self, slots: Iterable[ParameterSlot]) -> None:
        for slot in slots:
            is_there = slot.parameter.grad is slot.sharded_gradient
            # Most were finished as they were put.
            if not slot.used or (is_there and not slot.used_elsewhere):
                continue
            if is_there:
                # Another rank has zeroed it, and has used the parameter since.
                slot.sharded_gradient.refuse_if_spent()
            # Where the script took it out of `p.grad` (zero_grad), it meant whatever had been added to it, too.
            slot.sharded_gradient.become(GradientState.HELD)
            if not is_there:
                slot.parameter.grad = slot.sharded_gradient

    def start(self, bucket: Bucket) -> None:
        if self._is_put_whole(bucket):
            super().start(bucket)
            return
        for slot in bucket.slots:
            # Unused in this pass: micro-batches under `no_sync` may have left a sum, which no hook brings any more.
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
                    # The sum may lie in the buffer, where the reduction needs zeros.
                    slot.parameter.grad = gradient.clone()
        super().start_unfilled(bucket)

    def finish_all(self) -> None:
        super().finish_all()
        self._pool.rest()

    def discard_open(self) -> None:
        for bucket in self._open:
            # Back to the pool: a lost buffer would count against the limit to the end of the run.
            if bucket in self._lent:
                self._pool.release(bucket, self._lent.pop(bucket))
                self._scratches.pop(bucket, None)
        super().discard_open()

    def _lasts(self, bucket: Bucket) -> bool:
        """Whether the bucket's buffer lasts in this step."""
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
        """Takes a buffer from the pool, with undefined contents. `beside`: see `BufferPool.take`."""
        pool, in_flight = self._pool, self._in_flight
        room = pool.room_for(bucket, beside)
        if room == 1 and not in_flight:
            # It would take the last buffer, and one that is passed over wants a buffer, too.
            self.start_passed_over(bucket)
            room = pool.room_for(bucket, beside)
        # Backward waits here for the oldest reduction: the limit on buffers is the limit on gradient memory.
        while room == 0 and (in_flight or self.start_passed_over(bucket)):
            if in_flight:
                oldest = in_flight[0]
                # Not while another bucket starts: it counts as started, and the other ranks would wait for it.
                if not self._may_wait(oldest) and (not self.may_ask or not self.starts.ask(self.places[oldest] + 1)):
                    break
                self.finish(oldest)
            room = pool.room_for(bucket, beside)
        lent = self._lent[bucket] = pool.take(bucket, beside)
        return lent if lent.numel() == bucket.layout.numel else lent[: bucket.layout.numel]

    def _spill(self, bucket: Bucket) -> None:
        """Moves a shard reduced earlier out of the buffer that is about to be filled again."""
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
        """Where the reduced shard (shard_numel,) lands, of the dtype in which sums arrive."""
        precision, is_lent = bucket.precision, bucket in self._lent
        own, fits = bucket.own_interval, precision.reduced == precision.reduce
        if fits and not is_lent:
            # In place: no rank needs the other parts of the sum.
            return flat[own.start : own.stop]
        if bucket.tier.is_apart:
            # Copied from there when the buffer has been passed on.
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
        # Behind the copy out of the buffer: the next bucket fills it at once.
        self._pool.release(bucket, self._lent.pop(bucket))
        return arrival

    def _stays_in_place(self, bucket: Bucket) -> bool:
        """Whether the shard that was reduced in a lasting buffer waits for the step there."""
        precision = bucket.precision
        return precision.reduce == precision.reduced == bucket.gradient_dtype and not bucket.tier.is_apart

    def _shard(self, bucket: Bucket) -> torch.Tensor:
        """Where the gradient of this rank's rows waits for the step: (shard_numel,) of the dtype that is stepped with."""
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
        """Leaves a reduced gradient in the rows; otherwise as `add_or_set`."""
        # Sums are taken in the master dtype: in bfloat16 small gradients of later micro-batches would be rounded away.
        if going_on and bucket.gradient_dtype != bucket.precision.master:
            self._widen(bucket)
            target = self._shard(bucket)
        return add_or_set(bucket, reduced, target, self._d2h(bucket), going_on)

    def _d2h(self, bucket: Bucket) -> DeviceToHost:
        return self._landing.d2h if bucket.tier.is_apart else _AT_ONCE

    def _scratch(self, bucket: Bucket) -> torch.Tensor:
        """A shard on the training device, until its values have gone where they are wanted."""
        scratch = Tier(bucket.device).scratch(bucket.layout.shard_numel, bucket.precision.reduced)
        if bucket in self._lent:
            self._scratches[bucket] = scratch.nbytes
            self._most_beside_bytes = max(self._most_beside_bytes, sum(self._scratches.values()))
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
    passing = BufferPool(buckets, GRAD_BUFFERS, buckets[0].device)
    kept: Literal["accumulated", "pooled"] = "accumulated" if config.stage == 1 else "pooled"
    return ShardedGradients(reduction, landing, passing, "lasting" if is_whole else kept)
