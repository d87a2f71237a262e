"""One step of a stock optimizer as many steps, a bucket at a time, that come to the same bits."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from typing import cast

import torch

from ...buckets.bucket import Bucket, Row
from ...buckets.gradient_tensors import widen
from ...comm.transport import Label, Transport
from ...hooks import WeakHook
from ...offload.files import OffloadError
from ...offload.stored import StoredShard
from ...offload.window import Window
from .bucket_state import BucketState
from .state_kinds import group_with, own_step

_WORD = Label(kind="agreement on state in files", subject="the step")


def _untold(bucket: Bucket) -> None:
    """Nobody waits for a bucket's step."""


def _always() -> bool:
    return True


def _none_ahead(optimizer: torch.optim.Optimizer) -> Collection[Bucket]:
    """Every bucket is stepped in its time."""
    return ()


class BucketStep:
    """Who steps the rows of one bucket, by the optimizer's group as it is at that moment: here the optimizer's own arithmetic."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer

    def step(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        """Takes one step. `rows`: those of the bucket that have a gradient."""
        for row in rows:
            widen(row.tensor)
        groups = self._optimizer.param_groups
        mine = {id(row.tensor) for row in rows}
        self._optimizer.param_groups = [group_with(groups[bucket.key.group], lambda tensor: id(tensor) in mine)]
        try:
            own_step(self._optimizer)
        finally:
            self._optimizer.param_groups = groups

    def forget(self, bucket: Bucket) -> None:
        """Called when state of the bucket in the optimizer's register is replaced by other tensors."""


class LentStep(BucketStep):
    """A step for which the bucket's state is brought to memory, and put away behind it."""

    def __init__(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]):
        super().__init__(optimizer)
        self._states = states

    def step(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        self._states[bucket].lend(None)
        super().step(bucket, rows)
        self._states[bucket].take_back(None)


class BucketSteps:
    """Steps one bucket of an optimizer after another, with the bucket's state in memory for that moment.

    [Note: one step in parts]
    An element-wise optimizer treats each parameter by itself, so that its step over all rows and its steps over the rows of
    each bucket make the same values. For a part, the optimizer sees one group: a copy of the bucket's group with the bucket's
    rows only. What it changes in the group's settings (a counter, say) is dropped with the copy. The call that the script
    made then runs to its end over the real groups, with no gradient left in the rows that have been stepped: it changes the
    settings once, and hooks and schedulers see one step.

    The parts run in a hook before that call. It is the last such hook, so that others see, and may change, gradients first.

    A disk may fail under one rank. The others have stepped by then, and would wait for its parameters: each step ends with a
    word from all.

    Args:
        states: of each bucket that is stepped so; None where it is stepped as it lies.
        window: that state in files passes through; None where there is none.
        transport: of the ranks that step together.
        step: of one bucket.
        take_over: called before the first; returns the buckets that have been stepped ahead of their time, and wait for none.
        stepped: called with each bucket behind its step, or where it has none to take.
        wanted: whether a step is to be taken in parts; the optimizer's own call takes it otherwise.

    Attributes:
        optimizer: whose buckets they are.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: Mapping[Bucket, BucketState | None],
        window: Window | None,
        transport: Transport,
        step: BucketStep,
        *,
        take_over: Callable[[torch.optim.Optimizer], Collection[Bucket]] = _none_ahead,
        stepped: Callable[[Bucket], None] = _untold,
        wanted: Callable[[], bool] = _always,
    ):
        self.optimizer = optimizer
        self._stepped = stepped
        self._wanted = wanted
        self._states = states
        self._window = window
        self._step = step
        self._take_over = take_over
        self._transport = transport
        self._gradients: dict[Row, torch.Tensor] = {}
        self._broken: OffloadError | None = None
        self._hook = self._register()

    @property
    def hook_id(self) -> int:
        """Of the hook that takes the steps, among the optimizer's."""
        return self._hook.id

    def come_last(self) -> None:
        """Moves the hook behind those that were registered since."""
        self._hook.remove()
        self._hook = self._register()

    def give_back_gradients(self) -> None:
        """Gives the rows the gradients that they were stepped with."""
        for row, gradient in self._gradients.items():
            row.tensor.grad = gradient
        self._gradients.clear()

    def refuse_broken(self) -> None:
        """Raises what ended an earlier step."""
        if self._broken is not None:
            raise OffloadError(
                self._broken.errno, f"an earlier step of this run failed: {self._broken.strerror}"
            ) from self._broken

    def release(self) -> None:
        """Takes the hook off."""
        self._hook.remove()

    def _register(self):
        return self.optimizer.register_step_pre_hook(WeakHook(self, BucketSteps._on_step))

    def _on_step(self, _optimizer, _args: tuple, _kwargs: dict) -> None:
        if not self._wanted():
            return
        self.refuse_broken()
        rows_of = {bucket: [row for row in bucket.rows if row.tensor.grad is not None] for bucket in self._states}
        try:
            done = self._take_over(self.optimizer)
            left = {bucket: rows for bucket, rows in rows_of.items() if rows and bucket not in done}
            for bucket in rows_of:
                if bucket not in left:
                    self._stepped(bucket)
            self._step_each(left)
        except OffloadError as error:
            self._broken = error
        self._raise_together()
        for row in (row for rows in rows_of.values() for row in rows):
            self._gradients[row] = cast(torch.Tensor, row.tensor.grad)
            row.tensor.grad = None

    def _step_each(self, rows_of: Mapping[Bucket, Sequence[Row]]) -> None:
        # State that the optimizer makes in a first step is beside the buffer until it has been copied there.
        makes_state = any(row.tensor not in self.optimizer.state for rows in rows_of.values() for row in rows)
        with closing(self._walk(list(rows_of), spared=int(makes_state))) as walk:
            for bucket, buffer in walk:
                state = self._states[bucket]
                if state is not None:
                    state.lend(buffer)
                self._step.step(bucket, rows_of[bucket])
                if state is not None:
                    state.take_back(buffer)
                self._stepped(bucket)

    def _walk(
        self, buckets: Sequence[Bucket], *, spared: int
    ) -> Generator[tuple[Bucket, torch.Tensor | None], None, None]:
        """The buckets one after another, those in files last, each with a buffer that has its file's contents."""
        in_files: dict[StoredShard, Bucket] = {}
        # In memory in forward's order, as they are sent.
        for bucket in reversed(buckets) if self._window is None else buckets:
            state = self._states[bucket]
            if self._window is None or state is None or state.shard is None:
                yield bucket, None
            else:
                in_files[state.shard] = bucket
        if self._window is not None:
            with closing(self._window.walk(list(in_files), spared=spared)) as walk:
                for shard, buffer in walk:
                    yield in_files[shard], buffer

    def _raise_together(self) -> None:
        """Raises on every rank what has ended this step on one of them. Collective."""
        failed = torch.tensor([self._broken is not None], dtype=torch.uint8)
        if not self._transport.agree_max(failed, _WORD).item():
            return
        mine = None if self._broken is None else (self._broken.errno, self._broken.strerror)
        theirs = self._transport.exchange(mine)
        if self._broken is None:
            rank, (number, reason) = next((rank, fault) for rank, fault in enumerate(theirs) if fault)
            self._broken = OffloadError(number, f"on rank {rank}: {reason}")
        raise self._broken
