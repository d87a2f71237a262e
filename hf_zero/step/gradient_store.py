"""Flat gradient buffers between backward and step. The stages differ in how long a buffer lasts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

import torch
from torch.autograd.graph import increment_version

from ..buckets.all_buckets import await_gradients
from ..buckets.bucket import Bucket, ParameterSlot, Row
from ..buckets.clipped_gradient import widen
from ..buckets.gradients import are_in_slots, lay_gradients
from ..buckets.memory import clear_padding
from ..comm.steps_in_order import StepsInOrder
from ..comm.transport import Handle
from ..offload.copies import DeviceToHost
from ..offload.tiers import Tier
from ..queues import ARRIVED, Arrival
from .common_starts import CommonStarts
from .reductions import Reduction
from .step_context import StepContext

# A store keeps a flat gradient buffer per bucket while gradients arrive, starts its reduction, and puts the result in the `.grad`
# of the bucket's rows. The stores differ in the lifetimes of the buffers. They share the code of the pass (backward.py).

_FORM, _GRAD = attrgetter("dtype", "layout"), attrgetter("grad")
_PLAIN = {torch.Tensor}


@dataclass(frozen=True, kw_only=True)
class GradientTarget:
    """The receivers of reduced gradients.

    Attributes:
        d2h: copies reduced gradients to host memory, for offloaded buckets.
        most_under_way: maximum number of running reductions before the store waits for the oldest; None waits for all at the end
            of backward.
        step: the training step.
    """

    d2h: DeviceToHost
    most_under_way: int | None
    step: StepContext


class GradientStore(ABC):
    """Keeps gradients until the step: fills a flat buffer per bucket, and starts the buffer's reduction.

    `put` divides each gradient by the number of ranks, before the sum over the ranks, as DDP does.

    Attributes:
        starts: counts the reductions that backward may wait for.
        index_of: the index of each bucket in the order of starts.
        went_on: while a failed pass is being ended, whether another backward was to add to its gradients; else None.
        may_ask: other ranks may be asked to start reductions that this rank wants to wait for.
        steps: starts the steps of reductions with several steps, between groups of ranks; None if there are none.
    """

    def __init__(self, reduction: Reduction, landing: GradientTarget):
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
        self.starts = CommonStarts(0)
        self.index_of: dict[Bucket, int] = {}
        self.steps: StepsInOrder | None = None
        self.may_ask = True
        self.went_on: bool | None = None

    @abstractmethod
    def held_bytes(self) -> dict[str, int]:
        """Bytes of gradient memory by kind: "gradients" live from backward to step, "gradient buffers" only during backward."""

    @abstractmethod
    def release(self, bucket: Bucket) -> None:
        """Frees memory not needed from the step to the next backward."""

    def release_all(self, buckets: Iterable[Bucket]) -> None:
        """Calls `release` of each bucket."""
        for bucket in buckets:
            self.release(bucket)

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
            gradients: one per slot. Accumulated gradients may be views of the bucket's lasting buffer.

        Returns:
            False if nothing was written, because classes, dtypes, layouts or storages do not fit.
        """
        # An undefined gradient is None.
        if not _PLAIN.issuperset(map(type, gradients)) or bucket in self._open:
            return False
        if set(map(_FORM, gradients)) != {(bucket.precision.reduce, torch.strided)}:
            return False
        if self._accumulates(bucket):
            flat = self._lasting_buffer(bucket)
            if not are_in_slots(bucket, flat, gradients):
                return False
            self._open[bucket] = flat
            if bucket.share != 1.0:
                flat.mul_(bucket.share)
        else:
            flat = self._open[bucket] = self._buffer_for_whole(bucket)
            bucket.slot_views.fill(flat, gradients, bucket.share)
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
        bucket.arrival.wait()
        late = [(slot, self._late.pop(slot)) for slot in bucket.slots if slot in self._late]
        for slot, gradient in late:
            self.put(slot, gradient)
        self._again.add(bucket)
        self._start(bucket)

    def start(self, bucket: Bucket) -> None:
        """Starts the bucket's reduction, with zeros in slots without a gradient."""
        is_whole = self._is_put_whole(bucket)
        if not is_whole:
            self._put_remaining(bucket)
        self._start(bucket, is_whole=is_whole)

    @abstractmethod
    def _put_remaining(self, bucket: Bucket) -> None:
        """Puts gradients of earlier `no_sync` micro-batches for which no hook has run in this pass."""

    def start_unfilled(self, bucket: Bucket) -> None:
        """Starts the bucket's reduction while autograd may still add to the sums of `no_sync` micro-batches in `p.grad`.

        The sums stay in `p.grad`. If they were reduced now, autograd's later gradients would be added after a rounding.
        """
        self._start(bucket)

    def _start(self, bucket: Bucket, *, is_whole: bool = False) -> None:
        flat = self._open.get(bucket)
        if flat is None:
            flat = self._buffer(bucket)
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
        window = bucket.tier.window
        if window is not None and not self.goes_on:
            # The copies wait for the device's queue, in which the activations of the last layers are free by now.
            window.fetch_ahead()
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
        return self.index_of[bucket] < self.starts.sure

    def start_last_steps(self, number: int) -> None:
        """Starts the last step of the reductions of the first `number` buckets, if reductions have several steps."""
        if self.steps is not None:
            for bucket, handle in self._started.items():
                if self.index_of[bucket] < number:
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
            bucket.arrival.pending = self._deliver(bucket, going_on)
            self._arriving.append(bucket)

    def finish_all(self) -> None:
        """Waits for all reductions and, unless another backward adds to the gradients, for the values in the rows."""
        for bucket in list(self._started):
            self.finish(bucket)
        arriving, self._arriving = self._arriving, []
        if not self.goes_on:
            await_gradients(arriving)

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
        return self._landing.step.is_accumulating if self.went_on is None else self.went_on

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
        return d2h.start_sum(take, reduced, bucket.arrival.pending)
    # An earlier sum or copy may still write to this memory.
    bucket.arrival.wait()
    arrival = ARRIVED if target is reduced else d2h.start_copy(target, reduced)
    lay_gradients(bucket, target)
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
