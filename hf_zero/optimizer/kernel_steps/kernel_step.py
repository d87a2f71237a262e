"""Steps of optimizers taken by flat kernels: a launch for each run of rows in place of many passes over each."""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import increment_version

from ...buckets.bucket import Bucket, Row
from ...buckets.contiguous_rows import Run, runs_of
from ...buckets.gradient_tensors import Coefficient, take_coefficient
from ...kernels.dynamic import Coded
from ...layout.blocks import is_in_blocks
from ..holders.block_state import StateInBlocks
from ..state.bucket_steps import BucketStep
from .kernel_forms import AdamWForm, Group, KernelForm, Place, form_of

_log = logging.getLogger(__name__)

_Phase = TypeVar("_Phase", bound=Hashable)


FoundInf = Callable[[], torch.Tensor | None]
"""One float32 element on the training device, above 0 where gradients are not finite. None where they are known to be, or the
step is to be taken whatever they are."""


class FlatState:
    """For each bucket and kind of state one tensor, laid out as the rank's shard.

    The optimizer's register stays the only place where a row's state is looked for: what it has there, from a checkpoint or
    from the optimizer's own step, is moved here when the row is next stepped, and what it has not starts at 0.
    """

    def __init__(self):
        self._flats: dict[Bucket, dict[str, torch.Tensor]] = {}

    def of(self, bucket: Bucket, name: str) -> torch.Tensor:
        """(shard_numel,) of the master dtype. Undefined where no row has been made ready."""
        flats = self._flats.setdefault(bucket, {})
        if name not in flats:
            flats[name] = bucket.tier.empty(bucket.layout.shard_numel, bucket.precision.master)
        return flats[name]

    def make_ready(self, row: Row, name: str, state: dict[str, Any]) -> bool:
        """Makes `state[name]`, the row's in the register, a view of the flat tensor; returns whether it had values."""
        view, value = row.of(self.of(row.slot.bucket, name)), state.get(name)
        if value is None:
            view.zero_()
        elif value.data_ptr() != view.data_ptr():
            view.copy_(value)
        state[name] = view
        return value is not None

    def forget(self, bucket: Bucket) -> None:
        """Leaves the memory to the views that are still in the register."""
        self._flats.pop(bucket, None)


class KernelStep(BucketStep):
    """One optimizer's buckets, stepped by the kernel that does what the optimizer would.

    [Note: steps by kernels]
    The kernel reads and writes a bucket's flat tensors: master, reduced gradient and state, of which the optimizer's register
    has views under its own names, and in the same pass the parameters' 16-bit copy. So the register is what its own step
    would have made, to the last digits, and either may take the next step: a checkpoint, a changed setting that the kernel
    has no form for, and the end of the engine need nothing more.

    It also multiplies by the clip coefficient, where nobody has read the gradients since the clip (`ClippedGradient`).

    Where nobody but the device knows yet whether the gradients are finite (`FoundInf`), the kernel reads it there and
    writes nothing if they are not; the count of steps, which the host keeps, goes on.

    Args:
        optimizer: of a class that `form_of` knows.
        found_inf: asked in each step.
        otherwise: steps a bucket whose group has a setting that the kernel has no form for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, form: KernelForm, found_inf: FoundInf, otherwise: BucketStep):
        self._optimizer = optimizer
        self._form = form
        self._found_inf = found_inf
        self._otherwise = otherwise
        self._flat = FlatState()
        self._said: set[str] = set()
        self._with_copy: set[Bucket] = set()

    def hindrance(self, bucket: Bucket) -> str | None:
        """Why the bucket cannot be stepped by the kernel as its group is now, in words; None if it can."""
        if bucket.precision.master != torch.float32:
            return f"{bucket.precision.master} parameters"
        return self._form.hindrance(self._optimizer.param_groups[bucket.key.group])

    @torch.no_grad()
    def step(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        hindrance = self.hindrance(bucket)
        if hindrance is not None:
            self._say(hindrance)
            self._otherwise.step(bucket, rows)
            return
        group = self._optimizer.param_groups[bucket.key.group]
        self._launch(group, bucket, rows)
        # A kernel writes behind torch's back; who asks whether a row has changed asks for its version.
        increment_version([row.tensor for row in rows])
        if bucket.copy_to_write is not None and len(rows) == len(bucket.rows):
            self._with_copy.add(bucket)

    def _launch(self, group: Group, bucket: Bucket, rows: Sequence[Row]) -> None:
        phase_of = self._form.begin(
            group, {row: self._optimizer.state[row.tensor] for row in rows}, self._flat.make_ready
        )
        flats = {name: self._flat.of(bucket, name) for name in self._form.state_names(group)}
        for run, phase, clip in self._runs(rows, phase_of):
            states = {name: flat[run.interval.start : run.interval.stop] for name, flat in flats.items()}
            self._form.step(group, phase, self._place(bucket, run, states, clip))

    def _runs(
        self, rows: Sequence[Row], phase_of: Mapping[Row, _Phase]
    ) -> Iterator[tuple[Run, _Phase, Coefficient | None]]:
        """Rows to be stepped together: a run, their phase, and what their gradients are to be multiplied by."""
        for run in runs_of(rows, {row: (phase_of[row], take_coefficient(row.tensor)) for row in rows}):
            phase, clip = cast("tuple[_Phase, Coefficient | None]", run.phase)
            yield run, phase, clip

    def _place(
        self, bucket: Bucket, run: Run, states: Mapping[str, torch.Tensor | Coded], clip: Coefficient | None
    ) -> Place:
        part, copy = slice(run.interval.start, run.interval.stop), bucket.copy_to_write
        return Place(
            weights=bucket.master[part],
            gradient=run.gradient,
            states=states,
            copy=None if copy is None else copy[part],
            multiplier=None if clip is None else clip.value,
            found_inf=self._found_inf(),
        )

    def forget(self, bucket: Bucket) -> None:
        self._flat.forget(bucket)

    def take_written(self) -> set[Bucket]:
        """The buckets whose parameters the steps since the last call have written beside the master."""
        written, self._with_copy = self._with_copy, set()
        return written

    def _say(self, hindrance: str) -> None:
        if hindrance not in self._said:
            self._said.add(hindrance)
            _log.warning("hf_zero: %s is stepped by torch: %s.", type(self._optimizer).__name__, hindrance)


class KernelStepInBlocks(KernelStep):
    """The same for buckets whose moments are in 8-bit blocks, which they do not leave.

    Parameters too small for blocks are stepped one by one, on their float32 moments.

    Args:
        blocks: each bucket's moments.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        form: AdamWForm,
        found_inf: FoundInf,
        otherwise: BucketStep,
        blocks: Mapping[Bucket, StateInBlocks],
    ):
        super().__init__(optimizer, form, found_inf, otherwise)
        self._form: AdamWForm = form
        self._blocks = blocks

    def _launch(self, group: Group, bucket: Bucket, rows: Sequence[Row]) -> None:
        register, blocks = self._optimizer.state, self._blocks[bucket]
        number_of = self._form.begin(group, {row: register[row.tensor] for row in rows}, blocks.make_ready)
        alone_of = {row: None if is_in_blocks(row.slot.parameter.numel()) else row for row in rows}
        packed, names = blocks.blocks(), self._form.state_names(group)
        for run, (number, alone), clip in self._runs(rows, {row: (number_of[row], alone_of[row]) for row in rows}):
            if alone is None:
                states = {name: packed[name].cut(run.interval) for name in names}
                self._form.step_in_blocks(group, number, self._place(bucket, run, states, clip))
            else:
                states = {name: register[alone.tensor][name].view(-1) for name in names}
                self._form.step(group, number, self._place(bucket, run, states, clip))


def kernel_of(optimizer: torch.optim.Optimizer, found_inf: FoundInf) -> KernelStep | None:
    """The kernel's step on state in float32; None where none does what the optimizer does."""
    form = form_of(optimizer)
    return None if form is None else KernelStep(optimizer, form, found_inf, BucketStep(optimizer))
