"""Steps of torch's optimizers taken by flat kernels: a launch for each run of rows in place of many passes over each."""

import logging
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from .bucket_steps import BucketStep, OwnStep
from .buckets import Bucket, Row
from .flat_state import FlatState
from .kernel_forms import KernelForm, Place, form_of
from .nonfinite import NonFiniteCheck
from .runs import runs_of

_log = logging.getLogger(__name__)


class KernelStep(BucketStep):
    """One optimizer's buckets, stepped by the kernel that does what the optimizer would.

    [Note: steps by kernels]
    The kernel reads and writes a bucket's flat tensors: master, reduced gradient and state, of which the optimizer's register
    has views under torch's own names, and in the same pass the parameters' 16-bit copy. So the register is what torch's step
    would have made, to the last digits, and either may take the next step: a checkpoint, a changed setting that the kernel
    has no form for, and the end of the engine need nothing more.

    Where nobody but the device knows yet whether the gradients are finite (`NonFiniteCheck`), the kernel reads it there and
    writes nothing if they are not; the count of steps, which the host keeps, goes on.

    Args:
        optimizer: of a class that `form_of` knows.
        nonfinite: what has looked at the gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, form: KernelForm, nonfinite: NonFiniteCheck):
        self._optimizer = optimizer
        self._form = form
        self._nonfinite = nonfinite
        self._own = OwnStep(optimizer)
        self._flat = FlatState()
        self._said: set[str] = set()
        self._with_copy: set[Bucket] = set()

    def hindrance(self, bucket: Bucket) -> str | None:
        """Why the bucket cannot be stepped by the kernel as its group is now, in words; None if it can."""
        if bucket.precision.master != torch.float32:
            return f"{bucket.precision.master} parameters"
        return self._form.hindrance(self._optimizer.param_groups[bucket.layout.key[3]])

    @torch.no_grad()
    def step(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        hindrance = self.hindrance(bucket)
        if hindrance is not None:
            self._say(hindrance)
            self._own.step(bucket, rows)
            return
        group = self._optimizer.param_groups[bucket.layout.key[3]]
        phase_of = self._form.begin(group, {row: self._optimizer.state[row.tensor] for row in rows}, self._flat)
        flats = {name: self._flat.of(bucket, name) for name in self._form.state_names(group)}
        copy, found_inf = bucket.copy_to_write, self._nonfinite.found_inf
        for run in runs_of(rows, phase_of):
            part = slice(run.interval.start, run.interval.stop)
            place = Place(
                weights=bucket.master[part],
                gradient=run.gradient,
                states={name: flat[part] for name, flat in flats.items()},
                copy=None if copy is None else copy[part],
                found_inf=found_inf,
            )
            self._form.step(group, run.phase, place)
        # A kernel writes behind torch's back; who asks whether a row has changed asks for its version.
        increment_version([row.tensor for row in rows])
        if copy is not None and len(rows) == len(bucket.rows):
            self._with_copy.add(bucket)

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


def kernel_or_own_step(optimizer: torch.optim.Optimizer, nonfinite: NonFiniteCheck) -> BucketStep:
    """The kernel's step where one does what the optimizer does, else the optimizer's own."""
    form = form_of(optimizer)
    if form is None:
        _log.info("hf_zero: no kernel does what %s does; its own step is taken.", type(optimizer).__name__)
        return OwnStep(optimizer)
    return KernelStep(optimizer, form, nonfinite)
