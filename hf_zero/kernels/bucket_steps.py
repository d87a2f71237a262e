"""Steps buckets with kernels, for optimizers with a kernel."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, filterfalse, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch.autograd.graph import increment_version

from ..arithmetic.flat import FLOAT_DTYPES, runs_triton
from ..buckets.all_buckets import ROWS_ARE_PARAMETERS
from ..buckets.bucket import BUCKET_OF, TENSOR_OF, Bucket, Row
from ..buckets.clipped_gradient import ClippedGradient, Coefficient, clip_later, take_coefficient, take_coefficients
from ..buckets.gradients import GRADIENT_OF, laid_gradients_of, step_on_reduced
from ..buckets.rows import Coded
from ..buckets.runs import Run, runs_of
from ..hooks.tensors import set_all
from ..layout.blocks import is_in_blocks
from ..layout.intervals import Interval
from ..optimizer.bucket_state import BucketState, KernelReport, States
from ..optimizer.bucket_steps import BucketStep, FetchedStep
from ..optimizer.moments_in_blocks import StateInBlocks
from ..optimizer.storage import Assigned, StepChoice
from .adamw import AdamW, adamw
from .adamw_in_blocks import adamw_in_blocks
from .flat_steps import Operands, PreparedLaunch
from .lion import Lion, lion
from .sgd import SGD, sgd

# ---- Optimizers with a kernel: their supported settings, and their state ----

Group = Mapping[str, Any]

MakeReady = Callable[[str, States], set[Row]]
"""Moves one kind of state of the rows to the kernel's memory. Returns the rows without earlier state, which now start at zero."""


class KernelForm(ABC):
    """The kernel's version of one optimizer: the same state under the same names.

    Args:
        optimizer: for settings that are not in its groups.

    Attributes:
        usual: maps settings to the only value that the kernel supports.
        numbers: settings that must be numbers on the host.
    """

    usual: ClassVar[Mapping[str, Any]]
    numbers: ClassVar[Sequence[str]]

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer

    def hindrance(self, group: Group) -> str | None:
        """Returns, as text, why the kernel cannot step this group; None if nothing prevents the step."""
        for name, value in self.usual.items():
            if group.get(name, value) != value:
                return f"`{name}` is {group[name]}"
        tensors = [name for name in self.numbers if _has_tensor(group[name])]
        return f"`{tensors[0]}` is a tensor" if tensors else None

    @abstractmethod
    def state_names(self, group: Group) -> Sequence[str]:
        """Returns the kinds of state with one value for each element."""

    @abstractmethod
    def begin(self, group: Group, states: States, make_ready: MakeReady) -> Mapping[Row, int]:
        """Prepares the rows' state for their next step.

        Returns:
            For each row a phase, which `step` needs in addition to the group. Rows with different phases are stepped separately.
        """

    def counted(self, rows: Sequence[Row], states: Sequence[dict[str, Any]]) -> Any:
        """Returns the argument of `again` for the next step of these rows; None if `begin` has to prepare this step."""
        return ()

    def again(self, counted: Any) -> int | None:
        """Works like `begin` for the rows of `counted`, if their states hold the same tensors as after their last step.

        Args:
            counted: the result of `counted`.

        Returns:
            The phase of all rows; None, without a change, if `begin` has to prepare the step.
        """
        return 0

    @abstractmethod
    def settings(self, group: Group, phase: int) -> Any:
        """Converts a group's settings and the phase to the argument of `step`."""

    def only_launch(self, launches: Mapping[tuple[Any, ...], PreparedLaunch]) -> PreparedLaunch | None:
        """Returns the launch that `step` does in Triton, with `scalars` of the settings; None if it depends on the settings.

        Args:
            launches: see `Operands`.
        """
        return None

    @abstractmethod
    def step(self, operands: Operands, settings: Any) -> None:
        """Computes the step."""


@dataclass(slots=True)
class _Count:
    """Number of the last step that was counted here, and the version of the tensor `step` after it.

    Rows whose tensors `step` are views of one tensor share one object.
    """

    number: int
    version: int


class AdamWForm(KernelForm):
    """Steps like `torch.optim.AdamW`, or `torch.optim.Adam` without decay. The phase is the number of the step, from 1."""

    usual: ClassVar[Mapping[str, Any]] = {
        "amsgrad": False,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
    }
    numbers = ("lr", "betas", "eps", "weight_decay")

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer)
        # Row → the tensor `step`, and its count.
        self._counts: dict[Row, tuple[torch.Tensor, _Count]] = {}

    def hindrance(self, group: Group) -> str | None:
        found = super().hindrance(group)
        if found is None and group["weight_decay"] != 0 and not group["decoupled_weight_decay"]:
            return "`weight_decay` is added to the gradient"
        return found

    def state_names(self, group: Group) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def begin(self, group: Group, states: States, make_ready: MakeReady) -> Mapping[Row, int]:
        for name in self.state_names(group):
            make_ready(name, states)
        counts = self._counts
        number = self._shared_number(states)
        if number is not None:
            steps = list(map(dict.__getitem__, states.values(), repeat("step")))
            torch._foreach_add_(steps, 1)
            counts.update(zip(states, zip(steps, map(_Count, repeat(number), map(_VERSION, steps)))))
            return dict.fromkeys(states, number)
        numbers = {}
        for row, state in states.items():
            if "step" not in state:
                # On the same device as in torch's own step, so either may compute the next step.
                home = row.tensor.device if group["fused"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=home)
                counts[row] = (state["step"], _Count(0, state["step"]._version))
            step = state["step"]
            known = counts.get(row)
            if known is not None and known[0] is step and known[1].version == step._version:
                numbers[row] = known[1].number + 1
            else:
                # Read the device only if somebody else has written the count: a read makes the host wait for the device.
                numbers[row] = int(step.item()) + 1
        steps = [state["step"] for state in states.values()]
        torch._foreach_add_(steps, 1)
        for (row, number), step in zip(numbers.items(), steps):
            counts[row] = (step, _Count(number, step._version))
        return numbers

    def _shared_number(self, states: States) -> int | None:
        """Returns the number of the next step if all rows share it and nothing else wrote their counts. Runs in C loops."""
        known: list[Any] = list(map(self._counts.get, states))
        if not all(known):
            return None
        tensors, counts = zip(*known)
        found, taken = map(dict.get, states.values(), repeat("step")), set(map(_NUMBER, counts))
        if len(taken) != 1 or not all(map(is_, found, tensors)):
            return None
        return taken.pop() + 1 if list(map(_VERSION, tensors)) == list(map(_COUNTED_VERSION, counts)) else None

    def counted(self, rows: Sequence[Row], states: Sequence[dict[str, Any]]) -> Any:
        following = self._shared_number(dict(zip(rows, states)))
        steps = [] if following is None else [state["step"] for state in states]
        if following is None or len({(step.device, step.dtype, step.shape) for step in steps}) > 1:
            return None
        # A count in one tensor for all rows needs one operation; torch's own step runs one for each parameter.
        joined = torch.stack(steps)
        count = _Count(following - 1, joined._version)
        for row, state, step in zip(rows, states, joined.unbind()):
            state["step"] = step
            self._counts[row] = (step, count)
        return joined, count

    def again(self, counted: Any) -> int | None:
        joined, count = counted
        # All views share one version, so a script's write to any row's `step` changes the version.
        if joined._version != count.version:
            return None
        joined.add_(1)
        count.number, count.version = count.number + 1, joined._version
        return count.number

    def settings(self, group: Group, phase: int) -> AdamW:
        return AdamW(
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=phase,
        )

    def only_launch(self, launches: Mapping[tuple[Any, ...], PreparedLaunch]) -> PreparedLaunch | None:
        return next(iter(launches.values()), None)

    def step(self, operands: Operands, settings: AdamW) -> None:
        adamw(operands, settings)

    def step_in_blocks(self, operands: Operands, settings: AdamW) -> None:
        """Computes the step on moments in 8-bit blocks, and keeps the moments in blocks."""
        adamw_in_blocks(operands, settings)


class SGDForm(KernelForm):
    """Steps like `torch.optim.SGD`. The phase is 1 if the step creates the momentum buffer, else 0."""

    usual: ClassVar[Mapping[str, Any]] = {"maximize": False, "differentiable": False}
    numbers = ("lr", "momentum", "dampening", "weight_decay")

    def state_names(self, group: Group) -> Sequence[str]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def begin(self, group: Group, states: States, make_ready: MakeReady) -> Mapping[Row, int]:
        new = set[Row]().union(*(make_ready(name, states) for name in self.state_names(group)))
        return {row: int(row in new) for row in states}

    def settings(self, group: Group, phase: int) -> SGD:
        return SGD(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            first_step=bool(phase),
        )

    def step(self, operands: Operands, settings: SGD) -> None:
        sgd(operands, settings)


class LionForm(KernelForm):
    """Steps like `lion_pytorch.Lion` (the package lion-pytorch), which does not count its steps. The phase is always 0."""

    usual: ClassVar[Mapping[str, Any]] = {}
    numbers = ("lr", "betas", "weight_decay")

    def state_names(self, group: Group) -> Sequence[str]:
        return ("exp_avg",)

    def begin(self, group: Group, states: States, make_ready: MakeReady) -> Mapping[Row, int]:
        make_ready("exp_avg", states)
        return dict.fromkeys(states, 0)

    def settings(self, group: Group, phase: int) -> Lion:
        return Lion(
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            weight_decay=self._weight_decay(group),
        )

    def step(self, operands: Operands, settings: Lion) -> None:
        lion(operands, settings)

    def _weight_decay(self, group: Group) -> float:
        """Weight decay. With `decoupled_weight_decay`, the group's value divided by the initial lr, to hold at the initial lr."""
        # Releases before 0.2.3 lack this option.
        is_decoupled = getattr(self._optimizer, "decoupled_wd", False)
        return float(group["weight_decay"]) / (cast(Any, self._optimizer)._init_lr if is_decoupled else 1.0)


_FORMS: dict[type[torch.optim.Optimizer], type[KernelForm]] = {
    torch.optim.AdamW: AdamWForm,
    torch.optim.Adam: AdamWForm,
    torch.optim.SGD: SGDForm,
}
_FORMS_BY_NAME: dict[str, type[KernelForm]] = {
    "lion_pytorch.foreach.Lion": LionForm,
    "lion_pytorch.lion_pytorch.Lion": LionForm,
}
"""Optimizers of packages that need not be installed."""


def form_of(optimizer: torch.optim.Optimizer) -> KernelForm | None:
    """Returns the kernel's form of an optimizer; None if no kernel computes its step, for example for a subclass."""
    kind = type(optimizer)
    made = _FORMS.get(kind) or _FORMS_BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if made is None else made(optimizer)


def form_in_blocks_of(optimizer: torch.optim.Optimizer) -> AdamWForm | None:
    """Returns the form for moments in 8-bit blocks of an optimizer; None without one."""
    form = form_of(optimizer)
    return form if isinstance(form, AdamWForm) else None


def _has_tensor(value: Any) -> bool:
    return any(torch.is_tensor(part) for part in (value if isinstance(value, list | tuple) else (value,)))


# ---- Steps of optimizers by flat kernels: one launch for each run of rows instead of many passes over each row ----

_log = logging.getLogger(__name__)

_VERSION = attrgetter("_version")
_NUMBER, _COUNTED_VERSION = attrgetter("number"), attrgetter("version")

_Phase = TypeVar("_Phase", bound=Hashable)


FoundInf = Callable[[], torch.Tensor | None]
"""One float32 element on the training device, above 0 if gradients are not finite. None if they are known to be finite, or if the
step must be computed in any case."""


class FlatState:
    """A tensor for each bucket and kind of state, with the layout of the rank's shard.

    The optimizer's register remains the only source of a row's state. Values in the register, from a checkpoint or the
    optimizer's own step, are moved here when the row is next stepped; missing values start at 0.
    """

    def __init__(self):
        self._flats: dict[Bucket, dict[str, torch.Tensor]] = {}
        self._views: dict[Bucket, dict[str, dict[Row, torch.Tensor]]] = {}

    def of(self, bucket: Bucket, name: str) -> torch.Tensor:
        """Returns (shard_numel,) of the master dtype. Elements of a row are undefined before `make_ready` for the row."""
        flats = self._flats.setdefault(bucket, {})
        if name not in flats:
            flats[name] = bucket.tier.empty(bucket.layout.shard_numel, bucket.precision.master)
        return flats[name]

    def make_ready(self, bucket: Bucket, name: str, states: States) -> set[Row]:
        """Makes each row's `name` in the register a view of the flat tensor; returns the rows without earlier values."""
        views, new = self._views.setdefault(bucket, {}).setdefault(name, {}), set()
        values = list(map(dict.get, states.values(), repeat(name)))
        if all(map(is_not, values, repeat(None))) and all(map(is_, values, map(views.get, states))):
            return set()
        for row, state in states.items():
            value = state.get(name)
            # Check this first: it is true for all rows in all steps except the first.
            if row in views and value is views[row]:
                continue
            if row not in views:
                views[row] = self._view(row, name)
            view = state[name] = views[row]
            if value is None:
                view.zero_()
                new.add(row)
            elif value.data_ptr() != view.data_ptr():
                view.copy_(value)
        return new

    def _view(self, row: Row, name: str) -> torch.Tensor:
        return row.of(self.of(row.slot.bucket, name))

    def of_run(self, bucket: Bucket, name: str, interval: Interval) -> torch.Tensor:
        """Returns the elements `interval` of the shard."""
        return self.of(bucket, name)[interval.start : interval.stop]

    def forget(self, bucket: Bucket) -> None:
        """Drops the tensors; views in the register keep their memory alive."""
        self._flats.pop(bucket, None)
        self._views.pop(bucket, None)


class SmallState(FlatState):
    """State of parameters too small for 8-bit blocks: float32, contiguous, without gaps."""

    def __init__(self):
        super().__init__()
        # (Start in the shard → start in the tensor, number of elements).
        self._layouts: dict[Bucket, tuple[dict[int, int], int]] = {}

    def of(self, bucket: Bucket, name: str) -> torch.Tensor:
        flats = self._flats.setdefault(bucket, {})
        if name not in flats:
            flats[name] = bucket.tier.empty(self._layout(bucket)[1], torch.float32)
        return flats[name]

    def of_run(self, bucket: Bucket, name: str, interval: Interval) -> torch.Tensor:
        start = self._layout(bucket)[0][interval.start]
        return self.of(bucket, name)[start : start + interval.numel]

    def _view(self, row: Row, name: str) -> torch.Tensor:
        return self.of_run(row.slot.bucket, name, row.layout.in_shard).view(row.tensor.shape)

    def _layout(self, bucket: Bucket) -> tuple[dict[int, int], int]:
        if bucket not in self._layouts:
            starts, end = {}, 0
            for row in bucket.rows:
                if not is_in_blocks(row.slot.parameter.numel()):
                    starts[row.layout.in_shard.start] = end
                    end += row.layout.in_shard.numel
            self._layouts[bucket] = starts, end
        return self._layouts[bucket]


class _GroupRead:
    """The values of a group as read by a kernel's form. Each bucket of the group needs the values in each step.

    Args:
        form: the kernel's form of the optimizer.
        group: group of the optimizer.

    Attributes:
        hindrance: see `KernelForm.hindrance`.
        names: see `KernelForm.state_names`; set if there is no hindrance.
    """

    def __init__(self, form: KernelForm, group: Group):
        self._form = form
        self.group = group
        self._values = tuple(group.values())
        # A script may modify a list in place; identity comparison would miss the change.
        self._may_change = any(isinstance(value, list) for name, value in group.items() if name != "params")
        self.hindrance = form.hindrance(group)
        self.names = form.state_names(group) if self.hindrance is None else ()
        self._phase: int | None = None
        self._settings: Any = None

    def is_of(self, group: Group) -> bool:
        """Whether the group still holds the same objects as at the last read. Runs in a C loop."""
        values = self._values
        return not self._may_change and len(group) == len(values) and all(map(is_, group.values(), values))

    def goes_on_from(self, before: "_GroupRead") -> bool:
        """Whether the kernel steps the same states as with what was read before. Settings may differ."""
        return self is before or (self.hindrance is None and self.names == before.names)

    def settings(self, phase: int) -> Any:
        """Returns `KernelForm.settings` of the group; buckets with the same phase share the object."""
        if phase != self._phase:
            self._settings, self._phase = self._form.settings(self.group, phase), phase
        return self._settings


class _Cut(NamedTuple):
    """Slices of a bucket's tensors for one kernel launch, already checked.

    Attributes:
        names: of the states.
        master, copied: the whole tensors, which the bucket may replace.
        weights, states, copy: the slices.
        launches: see `Operands`.
    """

    names: Sequence[str]
    master: torch.Tensor
    copied: torch.Tensor | None
    weights: torch.Tensor
    states: Mapping[str, torch.Tensor]
    copy: torch.Tensor | None
    launches: dict[tuple[Any, ...], Any]


@dataclass(slots=True, eq=False)
class _Stepped:
    """The last step of some buckets, each with all of its rows. The next step repeats this one if all objects are the same.

    Attributes:
        buckets, rows: in order; the rows of each bucket.
        reads: by group, what the kernel has read of it.
        masters, copies: the whole tensors of each bucket, which the bucket may replace; see `_Cut`.
        operands, launches: of each bucket, for each run of its rows; see `KernelForm.only_launch`.
        nothing: an empty gradient, which the operands have between steps.
        tensors: of all rows.
        entries: the values in the rows' states, in order.
        counted: see `KernelForm.counted`.
    """

    buckets: list[Bucket]
    rows: list[Sequence[Row]]
    reads: dict[int, _GroupRead]
    masters: list[torch.Tensor]
    copies: list[torch.Tensor | None]
    operands: list[list[Operands]]
    launches: list[list[PreparedLaunch | None]]
    nothing: torch.Tensor
    tensors: list[torch.Tensor]
    entries: list[Any]
    counted: Any

    def is_of(self, rows_of: Mapping[Bucket, Sequence[Row]]) -> bool:
        """Whether these are the buckets with all of their rows, and lie where they did. Runs in C loops."""
        buckets = self.buckets
        return (
            list(rows_of) == buckets
            and all(map(is_, rows_of.values(), self.rows))
            and all(map(is_, map(_MASTER, buckets), self.masters))
            and all(map(is_, map(_COPY, buckets), self.copies))
        )


_MASTER, _COPY, _DTYPE = attrgetter("master"), attrgetter("copy_to_write"), attrgetter("dtype")
_FIRST, _TENSOR = itemgetter(0), itemgetter(1)
_FLOATS = frozenset(FLOAT_DTYPES)


def _dtypes_of(flats_of: Iterable[Sequence[tuple[Interval, torch.Tensor]]]) -> Iterator[torch.dtype]:
    """Yields the dtype of each bucket's flat gradients, in a loop in C."""
    return map(_DTYPE, map(_TENSOR, map(_FIRST, flats_of)))


class KernelStep(BucketStep):
    """Steps one optimizer's buckets with the optimizer's kernel.

    [Note: steps by kernels]
    The kernel reads and writes a bucket's flat tensors: master, reduced gradient and state, and in the same pass the parameters'
    16-bit copy. The optimizer's register has views of the state under the optimizer's own names. So the register equals, except
    for last digits, the result of the optimizer's own step, and either may compute the next step: saving a checkpoint, changing
    to a setting that the kernel does not support, and removing the engine need no conversion.

    The kernel also multiplies by the clip coefficient, if nothing has read the gradients since the clip (`ClippedGradient`).

    If only the device knows whether the gradients are finite (`FoundInf`), the kernel reads that value on the device and writes
    nothing if they are not. The step count, which the host keeps, is increased in any case.

    Args:
        optimizer: of a class that `form_of` supports.
        found_inf: called in each step.
        otherwise: steps a bucket whose group has a setting that the kernel does not support.
        lasts: masters are kept from step to step, so slices of them may be kept.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        form: KernelForm,
        found_inf: FoundInf,
        otherwise: BucketStep,
        *,
        lasts: bool = True,
    ):
        self._optimizer = optimizer
        self._form = form
        self._found_inf = found_inf
        self._otherwise = otherwise
        self._flat = FlatState()
        self._lasts = lasts
        self._groups: dict[int, _GroupRead] = {}
        self._cuts: dict[Bucket, dict[Interval, _Cut]] = {}
        # By the first bucket: of buckets that were stepped together, and of single ones.
        self._together: dict[Bucket, _Stepped] = {}
        self._alone: dict[Bucket, _Stepped] = {}
        # Multiplier and `found_inf` of the last step, which a kernel's check has seen.
        self._scalars: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        self._said: set[str] = set()
        self._with_copy: set[Bucket] = set()

    def hindrance(self, bucket: Bucket) -> str | None:
        """Returns why the kernel cannot step the bucket with its group's current settings; None if nothing prevents the step."""
        if bucket.precision.master != torch.float32:
            return f"{bucket.precision.master} parameters"
        return self._group(bucket.key.group).hindrance

    def _group(self, index: int) -> _GroupRead:
        group, read = self._optimizer.param_groups[index], self._groups.get(index)
        if read is None or not read.is_of(group):
            read = self._groups[index] = _GroupRead(self._form, group)
        return read

    def step(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        self._step_alone({bucket: rows}, lambda bucket: None)

    def step_each(self, rows_of: Mapping[Bucket, Sequence[Row]], stepped: Callable[[Bucket], None]) -> None:
        first = next(iter(rows_of), None)
        if first is None or self._repeat(self._together.pop(first, None), rows_of, stepped, self._together):
            return
        for bucket, rows in rows_of.items():
            self._step_alone({bucket: rows}, stepped)
        self._note(rows_of, self._together)

    def _step_alone(self, rows_of: Mapping[Bucket, Sequence[Row]], stepped: Callable[[Bucket], None]) -> None:
        """Steps one bucket."""
        ((bucket, rows),) = rows_of.items()
        if not self._repeat(self._alone.pop(bucket, None), rows_of, stepped, self._alone):
            self._step_anew(bucket, rows)
            self._note(rows_of, self._alone)
            stepped(bucket)

    @torch.no_grad()
    def _repeat(
        self,
        last: _Stepped | None,
        rows_of: Mapping[Bucket, Sequence[Row]],
        stepped: Callable[[Bucket], None],
        noted: dict[Bucket, _Stepped],
    ) -> bool:
        """Steps all rows if settings, state, master and the form of the gradients are those of the last step. Runs in C loops.

        Args:
            noted: keeps `last` for the next step, which is lost if this one raises an error.
        """
        if last is None or not last.is_of(rows_of):
            return False
        buckets, reads = last.buckets, {index: self._group(index) for index in last.reads}
        laid, entries = laid_gradients_of(buckets), self._entries(last.tensors)
        if laid is None or not all(read.goes_on_from(last.reads[index]) for index, read in reads.items()):
            return False
        if len(entries) != len(last.entries) or not all(map(is_, entries, last.entries)):
            return False
        flats_of, coefficient = laid
        if not _FLOATS.issuperset(_dtypes_of(flats_of)):
            return False
        # Call this last, because the form counts the step.
        phase = self._form.again(last.counted)
        if phase is None:
            return False
        last.reads, found_inf, multiplier = reads, self._found_inf(), None
        if coefficient is not None:
            multiplier = coefficient.value
            take_coefficients(cast(Any, list(map(GRADIENT_OF, last.tensors))))
        is_as_before = self._scalars[0] is multiplier and self._scalars[1] is found_inf
        runs_kernel = runs_triton(buckets[0].device)
        all_operands = list(chain.from_iterable(last.operands))
        set_all(all_operands, "gradient", map(_TENSOR, chain.from_iterable(flats_of)))
        set_all(all_operands, "multiplier", repeat(multiplier))
        set_all(all_operands, "found_inf", repeat(found_inf))
        set_all(all_operands, "is_as_before", repeat(True))
        set_all(last.operands[0], "is_as_before", repeat(is_as_before))
        for bucket, operands, launches, copy in zip(buckets, last.operands, last.launches, last.copies):
            settings = reads[bucket.key.group].settings(phase)
            for each, launch in zip(operands, launches):
                if launch is not None and is_as_before and runs_kernel:
                    launch(each, settings.scalars)
                else:
                    self._form.step(each, settings)
            # torch does not see a kernel's writes, so increase the versions for readers that check whether a row has changed.
            increment_version(bucket.row_tensors)
            if copy is not None:
                self._with_copy.add(bucket)
            stepped(bucket)
            is_as_before = True
        # The gradients' memory is free for the next forward.
        set_all(all_operands, "gradient", repeat(last.nothing))
        self._scalars = multiplier, found_inf
        noted[buckets[0]] = last
        return True

    def _entries(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        states = map(self._optimizer.state.__getitem__, tensors)
        return list(chain.from_iterable(map(dict.values, states)))

    @staticmethod
    def _is_of_now(cut: _Cut, bucket: Bucket, names: Sequence[str]) -> bool:
        return cut.master is bucket.master and cut.copied is bucket.copy_to_write and cut.names == names

    def _note(self, rows_of: Mapping[Bucket, Sequence[Row]], noted: dict[Bucket, _Stepped]) -> None:
        """Notes a step of some buckets that the next one may repeat."""
        buckets = list(rows_of)
        if not all(rows is bucket.rows for bucket, rows in rows_of.items()):
            return
        if any(self.hindrance(bucket) is not None for bucket in buckets):
            return
        reads = {bucket.key.group: self._group(bucket.key.group) for bucket in buckets}
        operands: list[list[Operands]] = []
        launches: list[list[PreparedLaunch | None]] = []
        nothing = torch.empty(0)
        for bucket in buckets:
            names = reads[bucket.key.group].names
            cuts = [self._cuts.get(bucket, {}).get(interval) for _, interval in bucket.row_runs]
            found = [cut for cut in cuts if cut is not None and self._is_of_now(cut, bucket, names)]
            if not found or len(found) != len(cuts):
                return
            operands.append([self._operands_again(cut, nothing) for cut in found])
            launches.append([self._form.only_launch(cut.launches) for cut in found])
        rows = list(chain.from_iterable(rows_of.values()))
        tensors: list[Any] = list(map(TENSOR_OF, rows))
        counted = self._form.counted(rows, [self._optimizer.state[tensor] for tensor in tensors])
        if counted is not None:
            noted[buckets[0]] = _Stepped(
                buckets=buckets,
                rows=list(rows_of.values()),
                reads=reads,
                masters=[bucket.master for bucket in buckets],
                copies=[bucket.copy_to_write for bucket in buckets],
                operands=operands,
                launches=launches,
                nothing=nothing,
                tensors=tensors,
                entries=self._entries(tensors),
                counted=counted,
            )

    @staticmethod
    def _operands_again(cut: _Cut, gradient: torch.Tensor) -> Operands:
        """Returns what a kernel steps again, once it has a gradient."""
        return Operands(
            weights=cut.weights,
            gradient=gradient,
            states=cut.states,
            copy=cut.copy,
            is_checked=True,
            launches=cut.launches,
        )

    @torch.no_grad()
    def _step_anew(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        hindrance = self.hindrance(bucket)
        if hindrance is not None:
            self._say(hindrance)
            self._otherwise.step(bucket, rows)
            return
        read = self._groups[bucket.key.group]
        self._launch(read, bucket, rows)
        # Increase the versions, as `_repeat` does.
        increment_version(list(map(TENSOR_OF, rows)))
        if bucket.copy_to_write is not None and len(rows) == len(bucket.rows):
            self._with_copy.add(bucket)

    def _launch(self, read: _GroupRead, bucket: Bucket, rows: Sequence[Row]) -> None:
        states_of = dict(zip(rows, map(self._optimizer.state.__getitem__, map(TENSOR_OF, rows))))
        phase_of = self._form.begin(read.group, states_of, partial(self._flat.make_ready, bucket))
        for run, phase, clip in self._runs(rows, phase_of):
            self._form.step(self._operands(bucket, run, read.names, clip), read.settings(phase))

    def _runs(
        self, rows: Sequence[Row], phase_of: Mapping[Row, _Phase]
    ) -> Iterator[tuple[Run, _Phase, Coefficient | None]]:
        """Returns rows to be stepped together: a run, their phase, and the multiplier of their gradients."""
        # Only clipped gradients are worth a call, because this runs for each parameter in each step.
        clips: list[Coefficient | None] = [None] * len(rows)
        gradients: list[Any] = list(map(GRADIENT_OF, map(TENSOR_OF, rows)))
        kinds = set(map(type, gradients))
        if kinds == {ClippedGradient}:
            clips = take_coefficients(gradients)
        elif ClippedGradient in kinds:
            clips = [take_coefficient(row.tensor) if type(row.tensor.grad) is ClippedGradient else None for row in rows]
        del gradients
        for run in runs_of(rows, dict(zip(rows, zip(map(phase_of.__getitem__, rows), clips)))):
            phase, clip = cast("tuple[_Phase, Coefficient | None]", run.phase)
            yield run, phase, clip

    def _operands(self, bucket: Bucket, run: Run, names: Sequence[str], clip: Coefficient | None) -> Operands:
        """Slices a bucket's tensors for a run. The slices are kept: making and checking them costs more than a launch."""
        cuts, interval = self._cuts.setdefault(bucket, {}), run.interval
        cut, master, copied = cuts.get(interval), bucket.master, bucket.copy_to_write
        is_checked = cut is not None and self._is_of_now(cut, bucket, names)
        if cut is None or not is_checked:
            part = slice(interval.start, interval.stop)
            states = {name: self._flat.of_run(bucket, name, interval) for name in names}
            copy = None if copied is None else copied[part]
            cut = _Cut(names, master, copied, master[part], states, copy, launches={})
            # The cache is bounded, because if different rows have gradients in each step, the intervals change as well.
            if self._lasts and len(cuts) < len(bucket.rows):
                cuts[interval] = cut
        return self._operands_of(
            run, cut.weights, cut.states, cut.copy, clip, is_checked=is_checked, launches=cut.launches
        )

    def _operands_of(
        self,
        run: Run,
        weights: torch.Tensor,
        states: Mapping[str, torch.Tensor | Coded],
        copy: torch.Tensor | None,
        clip: Coefficient | None,
        *,
        is_checked: bool = False,
        launches: dict[tuple[Any, ...], Any] | None = None,
    ) -> Operands:
        return Operands(
            weights=weights,
            gradient=run.gradient,
            states=states,
            copy=copy,
            multiplier=None if clip is None else clip.value,
            found_inf=self._found_inf(),
            is_checked=is_checked,
            launches=launches,
        )

    def forget(self, bucket: Bucket) -> None:
        self._flat.forget(bucket)
        self._cuts.pop(bucket, None)
        self._together.clear()
        self._alone.clear()

    def take_written(self) -> set[Bucket]:
        """Returns the buckets whose parameters were written, next to the master, by steps since the last call."""
        written, self._with_copy = self._with_copy, set()
        return written

    def _say(self, hindrance: str) -> None:
        if hindrance not in self._said:
            self._said.add(hindrance)
            _log.warning("hf_zero: %s is stepped by torch: %s.", type(self._optimizer).__name__, hindrance)


class KernelStepInBlocks(KernelStep):
    """A `KernelStep` for buckets whose moments are in 8-bit blocks and stay there.

    Parameters too small for blocks are stepped with float32 moments, neighbors together.

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
        self._small = SmallState()

    def _launch(self, read: _GroupRead, bucket: Bucket, rows: Sequence[Row]) -> None:
        register, blocks = self._optimizer.state, self._blocks[bucket]
        small = {row for row in rows if not is_in_blocks(row.slot.parameter.numel())}

        def make_ready(name: str, states: States) -> set[Row]:
            in_blocks = {row: state for row, state in states.items() if row not in small}
            in_float32 = {row: state for row, state in states.items() if row in small}
            return self._small.make_ready(bucket, name, in_float32) | blocks.make_ready(name, in_blocks)

        number_of = self._form.begin(read.group, {row: register[row.tensor] for row in rows}, make_ready)
        packed, names = blocks.blocks(), read.names
        for run, (number, is_small), clip in self._runs(rows, {row: (number_of[row], row in small) for row in rows}):
            interval, settings = run.interval, read.settings(number)
            part, copy = slice(interval.start, interval.stop), bucket.copy_to_write
            states: dict[str, Any] = (
                {name: self._small.of_run(bucket, name, interval) for name in names}
                if is_small
                else {name: packed[name].cut(interval) for name in names}
            )
            operands = self._operands_of(run, bucket.master[part], states, None if copy is None else copy[part], clip)
            (self._form.step if is_small else self._form.step_in_blocks)(operands, settings)

    def forget(self, bucket: Bucket) -> None:
        super().forget(bucket)
        self._small.forget(bucket)


def kernel_of(optimizer: torch.optim.Optimizer, found_inf: FoundInf, *, lasts: bool = True) -> KernelStep | None:
    """Returns the kernel's step on float32 state; None if no kernel computes the optimizer's step. `lasts`: see `KernelStep`."""
    form = form_of(optimizer)
    return None if form is None else KernelStep(optimizer, form, found_inf, BucketStep(optimizer), lasts=lasts)


# Kernels step buckets with state in the training device's memory, for the optimizers that have a kernel.


class KernelShare:
    """Records which buckets kernels step, and why the optimizers' own steps handle the others."""

    def __init__(self):
        self._kernels: list[KernelStep] = []
        self._mine: set[Bucket] = set()
        self._bucket_count = 0
        self._hindrances: dict[str, None] = {}

    def take(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], kernel: KernelStep | None, *, else_why: str
    ) -> list[Bucket]:
        """Assigns buckets of the optimizer to `kernel` from now on; returns these buckets.

        Offloaded state is stepped on its tier by the optimizer, and does not count.

        Args:
            kernel: None if no kernel computes the optimizer's step; `else_why` is the reason.
        """
        here = [bucket for bucket in buckets if not bucket.tier.is_offloaded]
        self._bucket_count += len(here)
        if kernel is None:
            if here:
                self._leave(else_why)
            return []
        hindrance_of = {bucket: kernel.hindrance(bucket) for bucket in here}
        for hindrance in filter(None, hindrance_of.values()):
            self._leave(f"{type(optimizer).__name__}, {hindrance}")
        mine = [bucket for bucket, hindrance in hindrance_of.items() if hindrance is None]
        self._mine.update(mine)
        self._kernels.append(kernel)
        for bucket in mine:
            step_on_reduced(bucket)
        return mine

    def unwritten(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Returns the buckets whose parameters, in addition to the master, no kernel has written since the last call."""
        written = {bucket for kernel in self._kernels for bucket in kernel.take_written()}
        return list(filterfalse(written.__contains__, buckets))

    def clip_later(self, rows: Sequence[Row], coefficient: torch.Tensor | None) -> list[Row]:
        """Leaves the clipping of gradients to the kernels which read them; returns the rows of all other gradients.

        See `ClippedGradient`.
        """
        if coefficient is None:
            return []
        # If rows are parameters, none has a clipped gradient; see `ClippedGradient`.
        mine = set(filterfalse(ROWS_ARE_PARAMETERS, self._mine))
        if not mine:
            return list(rows)
        left: list[Row] = []
        if not mine.issuperset(map(BUCKET_OF, rows)):
            left = [row for row in rows if row.slot.bucket not in mine]
            rows = [row for row in rows if row.slot.bucket in mine]
        clip_later(list(map(TENSOR_OF, rows)), Coefficient(coefficient))
        return left

    def report(self) -> KernelReport:
        return KernelReport(buckets=len(self._mine), all_buckets=self._bucket_count, hindrances=tuple(self._hindrances))

    def _leave(self, hindrance: str) -> None:
        if hindrance not in self._hindrances:
            self._hindrances[hindrance] = None
            _log.info("hf_zero: buckets are left to the optimizer's own step: %s.", hindrance)


class KernelSteps(StepChoice):
    """Uses kernels for the buckets of optimizers with a kernel, and the optimizers' own steps for all others.

    Moments in 8-bit blocks stay in blocks if a kernel can step them there. See [Note: steps by kernels].

    Args:
        found_inf: whether gradients are not finite; see `FoundInf`.
    """

    def __init__(self, found_inf: FoundInf):
        self._found_inf = found_inf
        self._share = KernelShare()

    def assign(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> list[Assigned]:
        found = [self._in_blocks(optimizer, states), self._at_hand(optimizer, states), self._rounded(optimizer, states)]
        return [assigned for assigned in found if assigned.states]

    def scale_gradients(self, rows: Sequence[Row], coefficient: torch.Tensor | None) -> None:
        super().scale_gradients(self._share.clip_later(rows, coefficient), coefficient)

    def unwritten(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        return self._share.unwritten(buckets)

    def report(self) -> KernelReport:
        return self._share.report()

    def _in_blocks(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> Assigned:
        there = {bucket: state.state for bucket, state in states.items() if not state.master.is_away}
        blocks = {bucket: state for bucket, state in there.items() if isinstance(state, StateInBlocks)}
        form, kernel = form_in_blocks_of(optimizer), None
        if form is not None:
            unpacked = FetchedStep(optimizer, states)
            kernel = KernelStepInBlocks(optimizer, form, self._found_inf, unpacked, blocks)
        why = f"no kernel implements {type(optimizer).__name__} with moments in 8 bits"
        return self._assigned(optimizer, list(blocks), kernel, why)

    def _at_hand(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> Assigned:
        """Assigns buckets whose masters and moments are in memory in full precision."""
        why = f"no kernel implements {type(optimizer).__name__}"
        buckets = [bucket for bucket, state in states.items() if not state.is_away]
        return self._assigned(optimizer, buckets, kernel_of(optimizer, self._found_inf), why)

    def _rounded(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> Assigned:
        """Assigns buckets whose rounded masters only exist in float32 during the step."""
        kernel = kernel_of(optimizer, self._found_inf, lasts=False)
        if kernel is None:
            return Assigned(BucketStep(optimizer), {})
        away = {bucket: state for bucket, state in states.items() if state.master.is_away and state.shard is None}
        return Assigned(kernel, {bucket: state for bucket, state in away.items() if not state.state.is_away})

    def _assigned(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], kernel: KernelStep | None, else_why: str
    ) -> Assigned:
        mine = self._share.take(optimizer, buckets, kernel, else_why=else_why)
        return Assigned(kernel or BucketStep(optimizer), dict.fromkeys(mine))
