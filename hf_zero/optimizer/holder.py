"""Steps one bucket after another, and stores master weights and optimizer state between steps."""

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import torch

from ..buckets.bucket import GRADIENT_OF, TENSOR_OF, Bucket, Row, have_gradients
from ..buckets.rows import PackedPart
from ..buckets.sharded import widen
from ..comm.ledger import Label
from ..comm.transport import LocalTransport, Transport
from ..hooks.tensors import set_all
from ..hooks.weak import WeakHook
from ..offload.files import OffloadError, StoredShard
from ..offload.tiers import StateFiles
from ..offload.walk import Window
from .bucket_state import DUE, BucketState, KernelReport, StatePlace, group_with, own_step

_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")
_ROWS, _ROW_TENSORS = attrgetter("rows"), attrgetter("row_tensors")

# ---- One step of a stock optimizer, bucket by bucket, with bitwise the same result ----

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
        mine = {id(row.tensor) for row in rows}
        self._optimizer.param_groups = [group_with(groups[bucket.key.group], lambda tensor: id(tensor) in mine)]
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


class LentStep(BucketStep):
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

    def come_last(self) -> None:
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
            # In forward's order, as they are sent.
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
                self._stepped(bucket)

    def _walk(
        self, buckets: Sequence[Bucket], *, spared: int
    ) -> Generator[tuple[Bucket, torch.Tensor | None], None, None]:
        """Yields the buckets, offloaded ones last, each with a buffer of its file's contents."""
        in_files: dict[StoredShard, Bucket] = {}
        # Buckets in memory follow the order of forward, in which they are sent.
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


# ---- Storage of optimizer state between steps ----


@dataclass(frozen=True)
class Assigned:
    """Buckets that are stepped by a function other than their optimizer.

    Attributes:
        step: the function.
        states: the state of each bucket; None for a bucket whose state is already in memory.
    """

    step: BucketStep
    states: Mapping[Bucket, BucketState | None]


class StepChoice:
    """Decides how an engine's buckets are stepped; this class uses each optimizer's own arithmetic."""

    def assign(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> list[Assigned]:
        """Chooses the buckets not stepped by the optimizer itself. `states`: the states of all its buckets."""
        return []

    def scale_gradients(self, rows: Sequence[Row], coefficient: torch.Tensor | None) -> None:
        """Multiplies the rows' gradients by `coefficient`, a scalar, now or when next read; None leaves them unchanged."""
        if coefficient is None:
            return
        tensors = list(map(TENSOR_OF, rows))
        gradients: list[Any] = list(map(GRADIENT_OF, tensors))
        is_plain = {torch.Tensor}.issuperset(map(type, gradients))
        if not (is_plain and list(map(_DTYPE, gradients)) == list(map(_DTYPE, tensors))):
            widen(*tensors)
            gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        devices = set(map(_DEVICE, gradients))
        for device in devices:
            there = (
                gradients if len(devices) == 1 else [gradient for gradient in gradients if gradient.device == device]
            )
            mine = coefficient.to(there[0])
            # On the host, skip a multiplication by 1. On an accelerator, reading the coefficient would synchronize.
            if device.type != "cpu" or mine != 1:
                torch._foreach_mul_(there, mine)

    def unwritten(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Returns the buckets whose parameters were not written together with their masters since the last call."""
        return buckets

    def report(self) -> KernelReport | None:
        """Describes the steps of kernels; None if there are none."""
        return None


class StateHolder:
    """Stores master weights and optimizer state between steps. `optimizer.state` lists a row's kinds of state.

    [Note: where and how]
    Two choices are independent: the storage of a bucket's state (`BucketState`: memory, 8-bit blocks, a file, a master that
    is rounded away), and the arithmetic (`StepChoice`: the optimizer's own, or kernels). The optimizer's own step over all its
    parameters steps all remaining buckets.

    Args:
        place: chooses the storage of a new bucket's state.
        choice: see the note.
        files: files of state; None without files.
        transport: the collectives of the ranks that step together.

    Attributes:
        choice: see the note.
        loads: number of calls of `put` and `put_master`.
    """

    def __init__(
        self,
        *,
        place: Callable[[Bucket], BucketState],
        choice: StepChoice,
        files: StateFiles | None,
        transport: Transport,
    ):
        self._place = place
        self.choice = choice
        self._files = files
        self._transport = transport
        self._states: dict[Bucket, BucketState] = {}
        self._steps: list[BucketSteps] = []
        self._bucket_steps: list[BucketStep] = []
        self._lent_bytes = 0
        self.loads = 0

    @property
    def is_in_files(self) -> bool:
        """Whether state is in files, which are removed together with the holder."""
        return self._files is not None

    def adopt(self, bucket: Bucket) -> None:
        """Stores the state of a new bucket before the next bucket is built."""
        state = self._states[bucket] = self._place(bucket)
        # Before `rest`, after which parameters with the master's dtype are read from the master's region in the file.
        state.master.move_in()
        bucket.rest(state.master.region)

    def step_with(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        *,
        stepped: Callable[[Bucket], None],
        sends_early: Callable[[], bool],
    ) -> None:
        """Makes the optimizer's steps go over these buckets, which belong to this optimizer.

        Args:
            optimizer: the optimizer.
            buckets: its buckets.
            stepped: called after the step of each bucket that is stepped separately.
            sends_early: whether buckets are sent at this point. If so, buckets in host memory are also stepped separately.
        """
        # Without files, no disk can fail on one rank only, so the ranks need no agreement.
        in_memory = partial(BucketSteps, optimizer, window=None, transport=LocalTransport(), stepped=stepped)
        states = {bucket: self._states[bucket] for bucket in buckets}
        by_others = self.choice.assign(optimizer, states)
        for assigned in by_others:
            self._add(assigned.step, in_memory(assigned.states, step=assigned.step))
        left = states.keys() - {bucket for assigned in by_others for bucket in assigned.states}
        own = {b: state for b, state in states.items() if b in left and state.is_away}
        step = BucketStep(optimizer)
        if self._files is not None:
            self._add(step, BucketSteps(optimizer, own, self._files.window, self._transport, step))
        elif own:
            self._add(step, in_memory(own, step=step))
        in_host_memory = {
            bucket: states[bucket] for bucket in buckets if bucket.tier.is_apart and bucket in left - own.keys()
        }
        if in_host_memory:
            self._add(step, in_memory(in_host_memory, step=step, wanted=sends_early))
        self._lent_bytes = max(self._lent_bytes, *(state.state.lent_bytes for state in own.values()), 0)
        for bucket in buckets:
            if self._states[bucket].state.is_away:
                self._put_earlier(optimizer, bucket)

    def before_forward(self) -> None:
        for steps in self._steps:
            steps.come_last()

    def comes_last(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether no other hook runs between the steps of an optimizer's buckets and its own step."""
        mine = {steps.hook_id for steps in self._steps if steps.optimizer is optimizer}
        # If `mine` is empty, `[-0:]` is the whole list and the result is False, as wanted.
        return mine.issuperset(list(optimizer._optimizer_step_pre_hooks)[-len(mine) :])

    def after_step(self) -> None:
        """Ends the optimizer's step before gradients are freed."""
        if self._files is not None:
            # Called twice for an optimizer class whose step calls its parent's step.
            self._files.end_step()
        for steps in self._steps:
            steps.restore_gradients()

    def write_back(self, buckets: Sequence[Bucket]) -> None:
        """Copies stepped masters into the parameters."""
        for bucket in self.choice.unwritten(buckets):
            bucket.write_back()

    def fetched_master(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Opens a context in which the bucket's master may be read and written."""
        return self._states[bucket].master.fetched_master()

    def values(self, row: Row, name: str, value: Any) -> Any:
        """Returns the values of a row's `name` in `optimizer.state`, possibly as a copy."""
        return self._state_of(row).values(row, name, value)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """Returns a row's live state without a copy. `tensor`: the entry in `optimizer.state`."""
        return self._state_of(row).view(row, kind, tensor)

    def master_view(self, row: Row) -> torch.Tensor | PackedPart:
        """Returns a row's live master without a copy."""
        master = self._states[row.slot.bucket].master
        if master.is_away:
            self._refuse_broken()
        return master.view(row, row.tensor.detach())

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Stores a row's loaded state; returns the entry for `optimizer.state`."""
        self.loads += 1
        for step in self._bucket_steps:
            step.forget(row.slot.bucket)
        return self._states[row.slot.bucket].state.put(row, without_due(state))

    def put_master(self, row: Row, values: torch.Tensor) -> None:
        self.loads += 1
        self._states[row.slot.bucket].master.put(row, values)

    def close(self) -> None:
        """Moves state back to `optimizer.state` and releases all resources."""
        for steps in self._steps:
            steps.release()
        for state in self._states.values():
            if state.bucket.rows_are_parameters and state.state.is_away:
                # The rows are the parameters, so their state must stay with the optimizer.
                self._fill_register(state)
            state.state.close()
        if self._files is not None:
            # After `_fill_register`, which reads the files.
            self._files.close()

    # ---- memory ----

    def window_bytes(self) -> int:
        """Returns the maximum bytes of buffers for state during a step."""
        shards = [state.shard for state in self._states.values() if state.shard is not None]
        return self._lent_bytes + (0 if self._files is None else self._files.window.nbytes(shards))

    def state_bytes(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of a bucket's state. `tensors`: its entries in `optimizer.state`."""
        return self._states[bucket].state.nbytes(tensors)

    def _add(self, step: BucketStep, steps: BucketSteps) -> None:
        self._bucket_steps.append(step)
        self._steps.append(steps)

    def _put_earlier(self, optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
        """Stores state that the optimizer had before the engine was built."""
        for row in bucket.rows:
            if row.tensor in optimizer.state:
                optimizer.state[row.tensor] = self.put(row, optimizer.state[row.tensor])

    def _fill_register(self, state: BucketState) -> None:
        for row, found in state.registered().items():
            for name, value in found.items():
                found[name] = state.state.values(row, name, value)

    def _state_of(self, row: Row) -> StatePlace:
        state = self._states[row.slot.bucket].state
        if state.is_away:
            self._refuse_broken()
        return state

    def _refuse_broken(self) -> None:
        """Raises the error of a failed step, after which files contain parts of two steps."""
        for steps in self._steps:
            steps.refuse_broken()


def without_due(state: dict[str, Any]) -> dict[str, Any]:
    """Drops keys in old checkpoints that belong to a step delayed by one."""
    kept = {name: value for name, value in state.items() if not name.startswith(DUE)}
    if f"{DUE}gradient" in state:
        warnings.warn(
            "The checkpoint was made with `offload.delay: 1`, which was taken out of hf_zero: the gradients of its last step, "
            "which were due, are dropped.",
            stacklevel=2,
        )
    return kept
