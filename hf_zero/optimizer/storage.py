"""Steps one bucket after another, and stores master weights and optimizer state between steps."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ..buckets.bucket import BUCKET_OF, TENSOR_OF, Bucket, Row
from ..buckets.clipped_gradient import widen
from ..buckets.gradients import GRADIENT_OF, laid_gradients_of
from ..buckets.rows import PackedPart
from ..comm.local import LocalTransport
from ..comm.transport import Transport
from ..offload.device_window import DeviceWindow
from ..offload.state_files import StateFiles
from .bucket_state import BucketState, KernelReport, StateStorage
from .bucket_steps import BucketStep, BucketSteps
from .nested_state import DUE

_DTYPE, _DEVICE, _ROWS, _HAS_SECOND_COPY = map(attrgetter, ("dtype", "device", "rows", "has_second_copy"))


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
        if coefficient is None or not rows:
            return
        tensors = list(map(TENSOR_OF, rows))
        gradients: list[Any] = list(map(GRADIENT_OF, tensors))
        is_plain = {torch.Tensor}.issuperset(map(type, gradients))
        if not (is_plain and list(map(_DTYPE, gradients)) == list(map(_DTYPE, tensors))):
            widen(*tensors)
            gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        else:
            gradients = _flats_of(rows) or gradients
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


def _flats_of(rows: Sequence[Row]) -> list[torch.Tensor] | None:
    """Returns the rows' gradients as a few flat tensors; None if these are not the gradients of whole buckets as reduced."""
    buckets = list(dict.fromkeys(map(BUCKET_OF, rows)))
    if len(rows) != sum(map(len, map(_ROWS, buckets))):
        return None
    laid = laid_gradients_of(buckets)
    return None if laid is None else [flat for flats in laid[0] for _, flat in flats]


class OptimizerStorage:
    """Stores master weights and optimizer state between steps. `optimizer.state` lists a row's kinds of state.

    [Note: where and how]
    Two choices are independent: the storage of a bucket's state (`BucketState`: memory, 8-bit blocks, a file, a master that
    is rounded away), and the arithmetic (`StepChoice`: the optimizer's own, or kernels). The optimizer's own step over all its
    parameters steps all remaining buckets.

    Args:
        choose_state: chooses the storage of a new bucket's state.
        choice: see the note.
        files: files of state; None without files.
        transport: the collectives of the ranks that step together.
        window: copies state from host memory to the device for the step; None without such state.

    Attributes:
        choice: see the note.
        loads: number of calls of `put` and `put_master`.
    """

    def __init__(
        self,
        *,
        choose_state: Callable[[Bucket], BucketState],
        choice: StepChoice,
        files: StateFiles | None,
        transport: Transport,
        window: DeviceWindow | None,
    ):
        self._choose_state = choose_state
        self._window = window
        self.choice = choice
        self._files = files
        self._transport = transport
        self._states: dict[Bucket, BucketState] = {}
        self._steps: list[BucketSteps] = []
        self._bucket_steps: list[BucketStep] = []
        self._most_bytes_in_step = 0
        self.loads = 0

    @property
    def is_in_files(self) -> bool:
        """Whether state is in files, which are removed together with the storage."""
        return self._files is not None

    def adopt(self, bucket: Bucket) -> None:
        """Stores the state of a new bucket before the next bucket is built."""
        state = self._states[bucket] = self._choose_state(bucket)
        # Store the master before `move_to_tier`: afterwards, parameters with its dtype are read from its region in the file.
        state.master.move_in()
        bucket.move_to_tier(state.master.region)

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
            bucket: states[bucket] for bucket in buckets if bucket.tier.is_offloaded and bucket in left - own.keys()
        }
        if in_host_memory:
            self._add(step, in_memory(in_host_memory, step=step, wanted=sends_early))
        self._most_bytes_in_step = max(
            self._most_bytes_in_step, *(state.state.bytes_in_step for state in own.values()), 0
        )
        for bucket in buckets:
            if self._states[bucket].state.is_away:
                self._put_earlier(optimizer, bucket)

    def before_forward(self) -> None:
        if self._window is not None:
            self._window.drop_fetched()
        if not self.hooks_are_last:
            for steps in self._steps:
                steps.reregister()

    @property
    def hooks_are_last(self) -> bool:
        """Whether the steps of buckets run after all of the script's hooks before a step."""
        return all(self.comes_last(steps.optimizer) for steps in self._steps)

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
        for bucket in filter(_HAS_SECOND_COPY, self.choice.unwritten(buckets)):
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
            state.state.close(state.registered())
        if self._window is not None:
            self._window.close()
        if self._files is not None:
            # After `_fill_register`, which reads the files.
            self._files.close()

    # ---- memory ----

    def window_bytes(self) -> int:
        """Returns the maximum bytes of buffers for state during a step."""
        shards = [state.shard for state in self._states.values() if state.shard is not None]
        in_files = 0 if self._files is None else self._files.window.nbytes(shards)
        return self._most_bytes_in_step + in_files + (0 if self._window is None else self._window.most_bytes)

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

    def _state_of(self, row: Row) -> StateStorage:
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
            "The checkpoint was made with `offload.delay: 1`, which was removed from hf_zero: the delayed gradients of its "
            "last step are dropped.",
            stacklevel=2,
        )
    return kept
