"""One step of a stock optimizer, taken a bucket at a time, to the same bits."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from itertools import chain, repeat
from operator import attrgetter

import torch

from ..buckets.bucket import TENSOR_OF, Bucket, Row
from ..buckets.clipped_gradient import widen
from ..buckets.gradients import GRADIENT_OF, have_gradients
from ..comm.transport import Transport
from ..comm.waits import Label
from ..hooks.tensors import set_all
from ..hooks.weak import WeakHook
from ..offload.files import OffloadError, StoredShard
from ..offload.walk import Window
from .bucket_state import BucketState
from .own_step import group_of, own_step

_ROWS, _ROW_TENSORS = attrgetter("rows"), attrgetter("row_tensors")

_AHEAD = 3
"""Buckets whose state is on the device or on its way there, if it is copied there for the step."""

_WORD = Label(kind="agreement on state in files", subject="the step")


class BucketStep:
    """Steps the rows of one bucket with the group's current settings; this class uses the optimizer's own arithmetic."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer

    def step(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        """Makes one step. `rows`: the rows of the bucket with a gradient."""
        # A gradient may be bfloat16 or have a pending clip coefficient. Kernels read both, but the optimizer needs plain
        # gradients.
        widen(*[row.tensor for row in rows])
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [group_of(groups[bucket.key.group], [row.tensor for row in rows])]
        try:
            own_step(self._optimizer)
        finally:
            # Also after an error: otherwise the script's optimizer would keep one group with a few rows.
            self._optimizer.param_groups = groups

    def step_each(self, rows_of: Mapping[Bucket, Sequence[Row]], stepped: Callable[[Bucket], None]) -> None:
        """Takes one step of several buckets in order, and calls `stepped` with each after its step."""
        for bucket, rows in rows_of.items():
            self.step(bucket, rows)
            stepped(bucket)

    def forget(self, bucket: Bucket) -> None:
        """Drops cached knowledge of a bucket's entries in `optimizer.state`, which are being replaced."""


def _rows_with_gradients(bucket: Bucket) -> Sequence[Row]:
    # Return the same list object if all rows have a gradient, because a kernel's step caches by it.
    return bucket.rows if have_gradients(bucket.row_tensors) else [r for r in bucket.rows if r.tensor.grad is not None]


class FetchedStep(BucketStep):
    """Steps a bucket whose state is fetched before the step and stored after it."""

    def __init__(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]):
        super().__init__(optimizer)
        self._states = states

    def step(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        self._states[bucket].lend(None)
        super().step(bucket, rows)
        self._states[bucket].store(None)


class BucketSteps:
    """Steps one bucket of an optimizer after another, with only this bucket's state in memory.

    [Note: one step in parts]
    An element-wise optimizer updates each parameter independently, so one step over all rows equals steps over the rows of
    each bucket. For each part, the optimizer sees a single group: a copy of the bucket's group with only the bucket's rows.
    Changes of the group's settings during the part (for example of a counter) are dropped with the copy. The script's own call
    then continues over the real groups, with no gradient left in the stepped rows: it changes the settings once, and hooks and
    schedulers see one step.

    The parts run in a pre-hook of this call. It is the last such hook, so other hooks see, and may change, gradients first.

    Args:
        optimizer: the optimizer.
        states: the state of each bucket; None for a bucket whose state is already in memory.
        window: moves state in files; None without files.
        transport: the collectives of the ranks that step together.
        step: steps one bucket.
        stepped: called with each bucket after its step, or if it has no step to make.
        wanted: whether to step in parts; if False, the optimizer's own call steps.

    Attributes:
        optimizer: the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: Mapping[Bucket, BucketState | None],
        window: Window | None,
        transport: Transport,
        step: BucketStep,
        *,
        stepped: Callable[[Bucket], None] = lambda bucket: None,
        wanted: Callable[[], bool] = lambda: True,
    ):
        self.optimizer = optimizer
        self._stepped = stepped
        self._wanted = wanted
        self._states = states
        self._window = window
        self._step = step
        self._transport = transport
        self._needs_no_fetch = window is None and not any(states.values())
        self._gradients: dict[Row, torch.Tensor | None] = {}
        self._broken: OffloadError | None = None
        self._hook = self._register()

    @property
    def hook_id(self) -> int:
        """Returns the id of the hook among the optimizer's hooks."""
        return self._hook.id

    def reregister(self) -> None:
        """Moves the hook after hooks registered since."""
        self._hook.remove()
        self._hook = self._register()

    def restore_gradients(self) -> None:
        """Restores the gradients of the stepped rows."""
        # If rows are the parameters themselves, the script must find `p.grad` after the step, as under DDP.
        set_all(map(TENSOR_OF, self._gradients), "grad", self._gradients.values())
        self._gradients.clear()

    def refuse_broken(self) -> None:
        """Raises the error of an earlier step."""
        if self._broken is not None:
            raise OffloadError(
                self._broken.errno, f"an earlier step of this run failed: {self._broken.strerror}"
            ) from self._broken

    def release(self) -> None:
        self._hook.remove()

    def _register(self):
        return self.optimizer.register_step_pre_hook(WeakHook(self, BucketSteps._on_step))

    def _on_step(self, _optimizer, _args: tuple, _kwargs: dict) -> None:
        if not self._wanted():
            return
        # Before any collective: every rank keeps the error of a failed step, so all ranks raise here and none waits.
        self.refuse_broken()
        buckets = list(self._states)
        if have_gradients(chain.from_iterable(map(_ROW_TENSORS, buckets))):
            rows_of = dict(zip(buckets, map(_ROWS, buckets)))
        else:
            rows_of = {bucket: _rows_with_gradients(bucket) for bucket in buckets}
        try:
            left = rows_of
            if not all(rows_of.values()):
                left = {bucket: rows for bucket, rows in rows_of.items() if rows}
                # Report buckets without a step, too: ranks send in the same order, and a missing bucket would block all later
                # ones.
                for bucket in rows_of:
                    if bucket not in left:
                        self._stepped(bucket)
            self._step_each(left)
        except OffloadError as error:
            self._broken = error
        # A disk may fail on one rank only. The other ranks have stepped by then and would wait for this rank's parameters.
        self._raise_together()
        # Removed before the script's own call, which would otherwise step these rows again.
        rows = list(chain.from_iterable(rows_of.values()))
        self._gradients.update(zip(rows, map(GRADIENT_OF, map(TENSOR_OF, rows))))
        set_all(map(TENSOR_OF, rows), "grad", repeat(None))

    def _step_each(self, rows_of: dict[Bucket, Sequence[Row]]) -> None:
        if self._needs_no_fetch:
            # Step in the order of the next forward, in which the buckets are sent.
            self._step.step_each(dict(reversed(rows_of.items())), self._stepped)
            return
        # In a first step, the optimizer allocates new state in addition to the buffer, until copied there.
        register = self.optimizer.state
        makes_state = self._window is not None and any(
            row.tensor not in register for rows in rows_of.values() for row in rows
        )
        # `closing` ends the walk if a step raises. Otherwise its threads would use buffers and files until garbage collection.
        with closing(self._walk(list(rows_of), spared=int(makes_state))) as walk:
            for bucket, buffer in walk:
                state = self._states[bucket]
                if state is not None:
                    state.lend(buffer)
                self._step.step(bucket, rows_of[bucket])
                if state is not None:
                    state.store(buffer)
                # A copy on the device is free for the next bucket.
                del buffer
                self._stepped(bucket)

    def _walk(
        self, buckets: Sequence[Bucket], *, spared: int
    ) -> Generator[tuple[Bucket, torch.Tensor | None], None, None]:
        """Yields the buckets, offloaded ones last, each with a buffer of its file's contents."""
        in_files: dict[StoredShard, Bucket] = {}
        # Buckets in memory follow the order of forward, in which they are sent.
        order = list(reversed(buckets)) if self._window is None else buckets
        for index, bucket in enumerate(order):
            state = self._states[bucket]
            for following in map(self._states.__getitem__, order[index : index + _AHEAD]):
                if following is not None:
                    following.start_fetch()
            if self._window is None or state is None or state.shard is None:
                yield bucket, None
            else:
                in_files[state.shard] = bucket
        if self._window is not None:
            with closing(self._window.walk(list(in_files), spared=spared)) as walk:
                # Without a variable for the buffer, which would keep a copy on the device.
                yield from map(lambda found: (in_files[found[0]], found[1]), walk)

    def _raise_together(self) -> None:
        """Raises one rank's error on every rank. Collective."""
        failed = torch.tensor([self._broken is not None], dtype=torch.uint8)
        # First agree on a flag, one small message per step; the reason is exchanged only after an error.
        if not self._transport.agree_max(failed, _WORD).item():
            return
        mine = None if self._broken is None else (self._broken.errno, self._broken.strerror)
        theirs = self._transport.exchange(mine)
        if self._broken is None:
            rank, (number, reason) = next((rank, fault) for rank, fault in enumerate(theirs) if fault)
            # Also stored on this rank: later steps and reads of the state then raise on all ranks, and no rank waits for
            # another.
            self._broken = OffloadError(number, f"on rank {rank}: {reason}")
        raise self._broken
