"""Buckets of parameters that are reduced together, their slots and this rank's rows."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat, takewhile
from operator import attrgetter, eq, is_, is_not
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ..comm.ledger import Label
from ..comm.transport import DataParallelGroup
from ..device import Arrival
from ..hooks.guards import look_only
from ..hooks.tensors import set_all
from ..hooks.weak import WeakMethod
from ..layout.buckets import BucketLayout, RowLayout, rows_of_shard
from ..layout.intervals import Interval
from ..offload.shards import Region
from ..offload.tiers import Tier
from .memory import ParameterMemory, clear_padding
from .precision import Precision, forget_loaded, wanted_dtype
from .sharded import (
    ClippedGradient,
    Coefficient,
    GradientState,
    ShardedGradient,
    ShardedGradientError,
    allow_norms,
    coefficient_of_all,
    plain_gradient,
    refuse_norms,
    taken_gradients,
)

# ---- All views of a flat tensor in one call of torch ----


class FlatViews:
    """Cuts flat tensors of one layout into views. Views made one by one in Python cost the host five times as much.

    Args:
        parts: interval of the flat tensor and shape of each view, in the order of the intervals, which do not overlap.
    """

    def __init__(self, parts: Iterable[tuple[Interval, Sequence[int]]]):
        # Of all pieces, gaps included.
        self._sizes: list[int] = []
        self._places: list[int] = []
        # Pieces are 1-D already. A view of these would be an operation for nothing, and most parameters are vectors.
        self._shaped: list[int] = []
        self._shapes: list[Sequence[int]] = []
        self._end = end = 0
        for number, (interval, shape) in enumerate(parts):
            if interval.start > end:
                self._sizes.append(interval.start - end)
            self._places.append(len(self._sizes))
            self._sizes.append(interval.numel)
            if len(shape) != 1:
                self._shaped.append(number)
                self._shapes.append(shape)
            self._end = end = max(end, interval.stop)
        self._gaps = sorted(set(range(len(self._sizes))) - set(self._places))

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the views of a 1-D tensor, each in its shape, row-major."""
        tail = flat.numel() - self._end
        pieces = flat.split_with_sizes([*self._sizes, tail] if tail else self._sizes)
        found = list(map(pieces.__getitem__, self._places))
        _replace(found, self._shaped, map(torch.Tensor.view, map(found.__getitem__, self._shaped), self._shapes))
        return found

    def fill(self, flat: torch.Tensor, values: Sequence[torch.Tensor], factor: float) -> None:
        """Writes `values` times `factor` into the views of a 1-D tensor, and zeros between and after them.

        Args:
            values: one for each view, in their shapes and order, of the dtype of `flat`, and in other memory.
        """
        if not all(map(torch.Tensor.is_contiguous, values)):
            values = [value.contiguous() for value in values]
        parts = list(values)
        _replace(parts, self._shaped, map(torch.Tensor.view, map(values.__getitem__, self._shaped), repeat(-1)))
        if self._gaps:
            parts = self._with_zeros_between(parts, flat)
        filled = flat if self._end == flat.numel() else flat[: self._end]
        # Two operations for any number of parts: a copy each would cost the host more than the device computes.
        if len(parts) == 1:
            torch.mul(parts[0], factor, out=filled)
        else:
            torch.cat(parts, out=filled)
            if factor != 1.0:
                filled.mul_(factor)
        if filled is not flat:
            flat[self._end :].zero_()

    def _with_zeros_between(self, parts: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [self._sizes[place] for place in self._gaps]
        zeros = torch.zeros(max(sizes), dtype=flat.dtype, device=flat.device)
        joined = [zeros] * len(self._sizes)
        _replace(joined, self._places, parts)
        _replace(joined, self._gaps, (zeros[:size] for size in sizes))
        return joined


def _replace(values: list[torch.Tensor], places: Iterable[int], by: Iterable[torch.Tensor]) -> None:
    """Replaces elements of a list, in a loop in C."""
    deque(map(values.__setitem__, places, by), maxlen=0)


# ---- Buckets: parameters as views of one flat buffer, and this rank's rows of it ----

# Of all parameters in each step, so in loops in C.
GRADIENT_OF, TENSOR_OF, BUCKET_OF = attrgetter("grad"), attrgetter("tensor"), attrgetter("slot.bucket")
_STATE, _VERSION, _KIND = attrgetter("state"), attrgetter("_version"), attrgetter("dtype")
_SLOT_OF, _PARAMETER_OF = attrgetter("slot"), attrgetter("slot.parameter")
_SLOT_VERSION, _FOLLOWED_VERSION = attrgetter("version"), attrgetter("slot.version")


def have_gradients(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether `grad` of all these is set."""
    return all(map(is_not, map(GRADIENT_OF, tensors), repeat(None)))


class BucketKey(NamedTuple):
    """The properties that all parameters of a bucket share.

    Attributes:
        trained: the parameters take gradients.
        dtype: in the model, before `param_dtype`.
        gathered_dtype: stage 3 casts to this dtype in a gather; None without a cast.
        optimizer: index of their optimizer, in the order given to the engine; -1 without one.
        group: index in that optimizer's `param_groups`; -1 without one.
        is_expert: split over more ranks than the rest of the model, so that fewer ranks share the state.
        is_split: split by tensor or expert parallelism, with a quantised wire. A block with elements of both kinds would round
            the replicated ones differently on each rank of a copy.
        stays: kept in `dtype`, whatever `param_dtype` and `rounding` say.
        is_packed: packed weights, and what their modules hold beside them: cast and rounded by nobody, and sent as bytes.
    """

    trained: bool
    dtype: torch.dtype
    gathered_dtype: torch.dtype | None
    optimizer: int
    group: int
    is_expert: bool = False
    is_split: bool = False
    stays: bool = False
    is_packed: bool = False


class LaidGradients(NamedTuple):
    """Gradients of all rows of a bucket as a reduction has left them: views of one flat tensor.

    Attributes:
        views: by row.
        addresses: of the views, which a script may give other memory (`.data`).
        flats: the fewest flat views that hold them all, each with its interval of the shard.
    """

    views: list[torch.Tensor]
    addresses: list[int]
    flats: list[tuple[Interval, torch.Tensor]]


@dataclass(eq=False)
class ParameterSlot:
    """A parameter in its bucket, and the state of its gradient in the running backward.

    Attributes:
        number: index among the slots of the bucket.
        view: the parameter's elements of the bucket's flat buffer, in its shape.
        arrived: a gradient has been put in the bucket's open buffer.
        used: a gradient arrived on this rank at any time in the pass; once the pass has ended, on any rank.
        used_elsewhere: on another rank, and not on this one.
        continues: the arriving gradient adds to one that was reduced earlier and not zeroed since.
        version: autograd's count of in-place edits of the parameter when the master last followed it.
        row: this rank's part of the parameter, where it owns one.
    """

    name: str
    number: int
    parameter: nn.Parameter
    interval: Interval
    bucket: "Bucket" = field(repr=False)
    view: torch.Tensor = field(repr=False)
    sharded_gradient: ShardedGradient = field(repr=False)
    arrived: bool = False
    used: bool = False
    used_elsewhere: bool = False
    continues: bool = False
    version: int = 0
    row: "Row | None" = field(default=None, repr=False)

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this slot of a flat buffer of the bucket's layout, in the parameter's shape, row-major."""
        return _part(flat, self.interval, self.parameter.shape)


def _part(flat: torch.Tensor, interval: Interval, shape: Sequence[int]) -> torch.Tensor:
    return flat[interval.start : interval.stop].view(shape)


@dataclass(eq=False)
class Row:
    """The part of one parameter that this rank owns.

    Attributes:
        tensor: what the optimizer updates, of the master dtype: 1-D, or in the parameter's shape where it may not be cut.
            The parameter itself where a rank owns it whole and keeps no separate master.
    """

    slot: ParameterSlot
    layout: RowLayout
    tensor: nn.Parameter

    @property
    def is_parameter(self) -> bool:
        return self.tensor is self.slot.parameter

    @property
    def has_gradient(self) -> bool:
        """Whether the next step has a gradient for this row."""
        # model.zero_grad() takes the `ShardedGradient` away; optimizer.zero_grad() takes the row's own gradient away.
        tensor, parameter = self.tensor, self.slot.parameter
        return tensor.grad is not None and (tensor is parameter or parameter.grad is not None)

    @property
    def is_zeroed(self) -> bool:
        """Whether the script has zeroed the gradient since the last step, and no backward has come since."""
        sharded_gradient = self.slot.sharded_gradient
        is_held = self.tensor.grad is not None or self.slot.parameter.grad is not sharded_gradient
        return not is_held and sharded_gradient.state is GradientState.ZEROED

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns this row of a flat tensor of the shard's layout, in the shape of `tensor`."""
        return _part(shard, self.layout.in_shard, self.tensor.shape)


def rows_with_gradient(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows with a gradient for the next step, once their gradients have arrived."""
    rows = list(rows)
    with look_only():
        if not (have_gradients(map(TENSOR_OF, rows)) and have_gradients(map(_PARAMETER_OF, rows))):
            owned = [(row, row.tensor, row.slot.parameter) for row in rows]
            # As `has_gradient` does: each parameter comes here in each step.
            rows = [row for row, tensor, p in owned if tensor.grad is not None and (tensor is p or p.grad is not None)]
    # In any order: these are waits for this rank's own copies, in which no other rank takes part.
    for bucket in set(map(BUCKET_OF, rows)):
        bucket.await_gradient()
    return rows


class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        key: the properties that all of its parameters share.
        group: the ranks that share its state and take its steps together.
        memory: where the parameters lie: whole at stages 0 to 2, a shard and what is gathered to it at stage 3.
        flat: the parameters, (numel,) of the param dtype; every parameter that is whole is a view of it.
        own: this rank's shard of `flat`, (shard_numel,); without memory where it is in a file.
        master: (shard_numel,) of the master dtype; `own` itself without a separate master.
        slots, rows: all parameters of the bucket, and this rank's parts of them; no rows where nothing is trained.
        own_parts: where this rank's elements of a parameter lie in the parameter and in the shard, of frozen ones, too.
        trained: the parameters take gradients; False for a bucket of frozen ones, which only stage 3 has.
        share: what one rank's gradient counts for in the mean of the group's: 1 / their number.
        rows_are_parameters: this rank's rows are the parameters themselves.
        tier: where master, reduced gradient and optimizer state live.
        arrival: marks the end of the copy of the reduced gradient to the rows; see `await_gradient`.
        is_away: the master is in a file, or there for the step only; `master` and the rows then have its shape and no memory.
        gradient_dtype: of the reduced gradient that waits in the rows for the step.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        precision: Precision,
        memory: ParameterMemory,
        *,
        group: DataParallelGroup,
        rows_are_parameters: bool,
        tier: Tier,
    ):
        self.layout = layout
        self.key = cast(BucketKey, layout.key)
        self.precision = precision
        self.memory = memory
        self.group = group
        self.share = 1.0 / group.groups.world_size
        self.rows_are_parameters = rows_are_parameters
        self.tier = tier
        self.arrival = Arrival()
        self.is_away = False
        self._labels: dict[str, Label] = {}
        self._laid: LaidGradients | None = None
        self.gradient_dtype = precision.master
        self.trained = parameters[0].requires_grad
        self.device = memory.flat.device
        self.flat = memory.flat
        self.own_interval = layout.shard(group.groups.shard_rank)
        self.slots = [
            ParameterSlot(
                name=slot.name,
                number=number,
                parameter=parameter,
                interval=slot.interval,
                bucket=self,
                view=_part(self.flat, slot.interval, parameter.shape),
                sharded_gradient=ShardedGradient(slot.name, parameter),
            )
            for number, (slot, parameter) in enumerate(zip(layout.slots, parameters, strict=True))
        ]
        self.master = tier.empty(layout.shard_numel, precision.master) if precision.has_master else self.own
        slot_of = {slot.name: slot for slot in self.slots}
        self.own_parts = {slot_of[part.name]: part for part in rows_of_shard(layout, group.groups.shard_rank)}
        # Before the parameters are adopted below: the rows are views of the master, and receive each parameter's digits with
        # the adoption.
        self.rows = self._make_rows() if self.trained else []
        memory.clear_padding(layout)
        if precision.has_master:
            clear_padding(self.master, layout, self.own_interval)
        for slot in self.slots:
            self._adopt_with_master(slot)
        # Last: the views above are made while `flat` has memory, and torch makes no view of a storage without memory.
        memory.end_filling()

    @property
    def name(self) -> str:
        return f"bucket {self.layout.index}"

    @property
    def own(self) -> torch.Tensor:
        return self.memory.own

    def step_on_reduced(self) -> None:
        """Leaves the reduced gradient in bfloat16 if the sum arrives so. The bucket's kernel reads that dtype.

        Sums with further gradients are taken in the master dtype all the same. float16 would lose unscaled gradients.
        """
        if self.precision.reduced == torch.bfloat16 and not self.tier.is_apart:
            self.gradient_dtype = torch.bfloat16
            for row in self.rows:
                # torch lets a parameter have gradients of its own dtype alone, unless told otherwise.
                row.tensor.grad_dtype = None

    @property
    def gradient_bytes(self) -> int:
        """Counts bytes of this rank's shard of the reduced gradient."""
        return self.layout.shard_numel * self.precision.master.itemsize

    @property
    def has_second_copy(self) -> bool:
        """Whether master and parameters are two copies, each of which has to follow the other."""
        return self.precision.has_master and not self.memory.is_master

    @property
    def keeps_master(self) -> bool:
        """Whether both copies last from step to step."""
        return self.precision.keeps_master and not self.memory.is_master

    @property
    def copy_to_write(self) -> torch.Tensor | None:
        """Returns the parameters' shard, (shard_numel,), if a step may write it beside the master; None otherwise."""
        return self.memory.writable_own if self.keeps_master else None

    @cached_property
    def contents(self) -> str:
        """Names the innermost module with all of its parameters, or the first and the last of them."""
        names = [slot.name for slot in self.slots]
        if len(names) == 1:
            return names[0]
        parts = [name.split(".") for name in names]
        shared = list(takewhile(lambda at: len(set(at)) == 1, zip(*parts)))
        return ".".join(at[0] for at in shared) or f"{names[0]} to {names[-1]}"

    def label(self, kind: str) -> Label:
        """Labels a collective that moves this bucket."""
        if kind not in self._labels:
            self._labels[kind] = Label(kind=kind, subject=self.name, channel=self.layout.index, holds=self.contents)
        return self._labels[kind]

    @cached_property
    def slot_views(self) -> FlatViews:
        """Cuts flat buffers of this layout into all slots, as `ParameterSlot.view_of` cuts one."""
        return FlatViews((slot.interval, slot.parameter.shape) for slot in self.slots)

    @cached_property
    def row_views(self) -> FlatViews:
        """Cuts flat tensors of the shard's layout into all rows, as `Row.of` cuts one."""
        return FlatViews((row.layout.in_shard, row.tensor.shape) for row in self.rows)

    def adopt(self, slot: ParameterSlot) -> None:
        """Copies this rank's part of a parameter into the slot, and makes the parameter a view of the slot."""
        parameter = slot.parameter
        with torch.no_grad():
            self.memory.store(slot.view, slot.interval, parameter)
        # The parameter becomes a view: backward, the optimizer and the gathers then share memory without copies.
        self.memory.set_data(parameter, slot.view)
        # A new stand-in, since the parameter may have another dtype now; the row behind it stays.
        self.__dict__.pop("stand_ins", None)
        before, slot.sharded_gradient = slot.sharded_gradient, ShardedGradient(slot.name, parameter)
        slot.sharded_gradient.shard, slot.sharded_gradient.await_shard = before.shard, before.await_shard
        # The copy above is no edit by the script.
        slot.version = parameter._version

    def holds(self, slot: ParameterSlot) -> bool:
        """Whether the parameter still lives in its slot."""
        return self.memory.is_view(slot.parameter, slot.view)

    def is_exact_view(self, slot: ParameterSlot) -> bool:
        """Whether the parameter also has the shape and strides of its slot, which a script may change by `p.data`."""
        parameter, view = slot.parameter, slot.view
        return self.holds(slot) and (parameter.shape, parameter.stride()) == (view.shape, view.stride())

    @property
    def holds_all(self) -> bool:
        """Whether all parameters are views of their slots, by a quick look; False may be wrong."""
        return self.memory.are_views(*self._with_elements)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Returns the slots' parameters, in slot order."""
        return [slot.parameter for slot in self.slots]

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """Returns the slots' views, in slot order."""
        return [slot.view for slot in self.slots]

    @cached_property
    def stand_ins(self) -> list[ShardedGradient]:
        """Returns the slots' stand-ins of gradients, in slot order; `adopt` makes others."""
        return [slot.sharded_gradient for slot in self.slots]

    @cached_property
    def _slot_starts(self) -> list[int]:
        return [slot.interval.start * self.precision.reduce.itemsize for slot in self.slots]

    def are_in_slots(self, flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether tensors, one for each slot, begin where the slots of a flat gradient buffer do."""
        addresses = map(flat.data_ptr().__add__, self._slot_starts)
        return all(map(eq, map(torch.Tensor.data_ptr, tensors), addresses))

    @cached_property
    def row_tensors(self) -> list[nn.Parameter]:
        """Returns the rows' tensors, in their order."""
        return [row.tensor for row in self.rows]

    @cached_property
    def row_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that the rows are parts of, in their order."""
        return [row.slot.parameter for row in self.rows]

    @cached_property
    def row_runs(self) -> list[tuple[int, Interval]]:
        """Returns the intervals of the shard in which rows follow each other without a gap, each with its first row's index."""
        found: list[tuple[int, Interval]] = []
        for number, row in enumerate(self.rows):
            part = row.layout.in_shard
            if found and found[-1][1].stop == part.start:
                first, before = found[-1]
                found[-1] = first, Interval(before.start, part.stop)
            else:
                found.append((number, part))
        return found

    def flat_gradients(self) -> list[tuple[Interval, torch.Tensor]] | None:
        """Returns the rows' gradients as the fewest flat views; None if they do not lie as the rows do, or have a class.

        Clipped gradients whose coefficients a kernel multiplies count as plain ones.
        """
        laid = self.laid_gradients()
        if laid is not None and laid[1] is None:
            return laid[0]
        gradients: Any = list(map(GRADIENT_OF, self.row_tensors))
        kinds = set(map(type, gradients))
        if kinds == {ClippedGradient}:
            gradients = taken_gradients(gradients)
        elif kinds != {torch.Tensor}:
            return None
        if gradients is None or len(set(map(_KIND, gradients))) != 1:
            return None
        base = gradients[0].data_ptr() - self.rows[0].layout.in_shard.start * gradients[0].itemsize
        starts = map(gradients[0].itemsize.__mul__, self._row_starts)
        if not all(map(eq, map(torch.Tensor.data_ptr, gradients), map(base.__add__, starts))):
            return None
        if not all(map(torch.Tensor.is_contiguous, gradients)):
            return None
        found = []
        for number, interval in self.row_runs:
            first = gradients[number]
            memory, nbytes = first.untyped_storage(), interval.numel * first.itemsize
            # Addresses that touch are not enough: two allocations may touch, and torch refuses a view that leaves its storage.
            if first.data_ptr() + nbytes > memory.data_ptr() + memory.nbytes():
                return None
            found.append((interval, first.as_strided((interval.numel,), (1,))))
        return found

    def lay_gradients(self, flat: torch.Tensor) -> None:
        """Makes the gradients of all rows views of `flat`, (shard_numel,)."""
        views = self.row_views.of(flat)
        with look_only():
            set_all(self.row_tensors, "grad", views)
        if views:
            flats = [(interval, flat[interval.start : interval.stop]) for _, interval in self.row_runs]
            self._laid = LaidGradients(views, list(map(torch.Tensor.data_ptr, views)), flats)

    def laid_gradients(self) -> tuple[list[tuple[Interval, torch.Tensor]], Coefficient | None] | None:
        """Returns the rows' gradients as `flat_gradients` does, and the clip coefficient that nobody has multiplied in or taken.

        None unless the gradients are as `lay_gradients` has left them: this is a quick look.
        """
        laid = self._laid
        if laid is None:
            return None
        found = coefficient_of_all(list(map(GRADIENT_OF, self.row_tensors)), laid.views)
        if found is None or list(map(torch.Tensor.data_ptr, laid.views)) != laid.addresses:
            return None
        return laid.flats, found[0]

    def forget_laid(self) -> None:
        """Gives up the references to the gradients that `lay_gradients` has made, whose memory is about to be freed."""
        self._laid = None

    @cached_property
    def _row_starts(self) -> list[int]:
        return [row.layout.in_shard.start for row in self.rows]

    @property
    def _is_as_backward_left_it(self) -> bool:
        """Whether each gradient waits for its first step as a backward has left it. False may be wrong."""
        if not have_gradients(self.row_tensors):
            return False
        gradients = map(GRADIENT_OF, self.parameters)
        if self.rows_are_parameters:
            return {torch.Tensor}.issuperset(map(type, gradients))
        return all(map(is_, gradients, self.stand_ins)) and GradientState.SPENT not in map(_STATE, self.stand_ins)

    @cached_property
    def _with_elements(self) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        slots = [slot for slot in self.slots if slot.interval.numel > 0]
        return [slot.parameter for slot in slots], [slot.view for slot in slots]

    @property
    def row_writes(self) -> int:
        """Returns autograd's count of in-place writes to the rows, which share one count."""
        return self.rows[0].tensor._version if self.rows else 0

    @property
    def edited_rows(self) -> list[Row]:
        """Returns the rows whose parameter a script has written to in place since the master last followed."""
        if all(map(eq, map(_VERSION, self.row_parameters), map(_FOLLOWED_VERSION, self.rows))):
            return []
        return [row for row in self.rows if row.slot.parameter._version != row.slot.version]

    def follow_edits(self) -> None:
        """Copies parameters that a script has written to in place (load_state_dict, say) into the master."""
        if self.is_away:
            # Seen when the master is back.
            return
        if not self.has_second_copy:
            # Noted all the same: else each later step would take the same edit for a new one.
            set_all(map(_SLOT_OF, self.rows), "version", map(_VERSION, self.row_parameters))
            return
        edited = self.edited_rows
        if edited:
            self._follow(edited, self.memory.read_own())
        for row in edited:
            row.slot.version = row.slot.parameter._version

    def begin_step(self) -> None:
        """Takes edits over and prepares the rows' gradients: none without a gradient on any rank, zeros for a zeroed one.

        Raises:
            ShardedGradientError: no backward has come since the last step, which has given its gradients back; or the script
                has set a gradient by hand, which no rank would step with.
        """
        # Before any gradient is looked at: the copy to the rows may be under way.
        self.await_gradient()
        with look_only():
            if self._is_as_backward_left_it:
                self.follow_edits()
                return
            for slot in self.slots:
                gradient = slot.parameter.grad
                if gradient is slot.sharded_gradient:
                    if slot.sharded_gradient.state is GradientState.SPENT:
                        slot.sharded_gradient.refuse_if_spent()
                # Any stand-in passes: `adopt` makes a new one and leaves the former in `grad`, and `model.to(...)` puts a moved
                # one there.
                elif not (self.rows_are_parameters or gradient is None or isinstance(gradient, ShardedGradient)):
                    raise ShardedGradientError(
                        f"hf_zero: `grad` of {slot.name!r} was set by hand, and the step is taken with what backward "
                        "has reduced. Let a backward compute the gradient, or train at `stage: 0`, where `grad` is "
                        "the reduced gradient."
                    )
            # Before the step: else it starts from the master as it was, and undoes the script's edit.
            self.follow_edits()
            for row in self.rows:
                tensor, parameter = row.tensor, row.slot.parameter
                # As `has_gradient` does: each parameter comes here in each step.
                if tensor.grad is None or (tensor is not parameter and parameter.grad is None):
                    # An optimizer skips rows without a gradient, but steps zeroed ones (weight decay, momentum), as
                    # under DDP.
                    tensor.grad = torch.zeros_like(tensor) if row.is_zeroed else None

    def await_gradient(self) -> None:
        """Waits until the rows have their reduced gradient. Call before reading or writing gradient values."""
        arrival, self.arrival = self.arrival, Arrival()
        arrival.wait()

    def end_step(self) -> list[ParameterSlot]:
        """Frees the reduced gradients; `p.grad` stays until the script zeroes it. Returns the slots that were stepped.

        Autograd counts the step as a write to these parameters: a backward through a graph from before the step then raises,
        as under DDP. Without the count it would silently compute with the new values.
        """
        stepped = []
        self.forget_laid()
        with look_only():
            set_all(self.row_tensors, "grad", repeat(None))
            for slot in self.slots:
                sharded = slot.sharded_gradient
                if slot.parameter.grad is sharded:
                    # As `become` does: each parameter comes here in each step.
                    sharded.state, sharded.pending = GradientState.SPENT, None
                elif slot.parameter.grad is not None or sharded.state is GradientState.ZEROED:
                    slot.parameter.grad = None
                else:
                    continue
                stepped.append(slot)
                # Not an edit of the script's, which the master would follow.
                slot.version += 1
            increment_version([slot.parameter for slot in stepped])
        return stepped

    def drop_gradients(self) -> None:
        # A copy that is under way would write to memory that the allocator has given to another tensor.
        self.await_gradient()
        self.forget_laid()
        with look_only():
            set_all(self.row_tensors, "grad", repeat(None))
            set_all(self.parameters, "grad", repeat(None))

    def _follow(self, edited: Sequence[Row], values: torch.Tensor) -> None:
        # What still shows its master rounded has not been edited, and keeps the digits that it does not show: a script that
        # clamps weights at each step would otherwise undo every update smaller than a step of bfloat16, or of a block.
        shown = self.master
        if self.precision.weights is not None:
            # A copy even where dtype and device are the same: `weights` rounds in place, and would round the master itself.
            shown = self.master.to(values, copy=True)
            self.precision.weights(shown)
        for row in edited:
            master, own = row.of(self.master), row.of(values)
            is_as_shown = own == row.of(shown).to(own)
            master.copy_(torch.where(is_as_shown, master.to(own.device), own.to(master.dtype)))

    def follow_values(self) -> None:
        """Copies edited parameters into the master, by their values: all that are not the rounded master."""
        # One that is away follows by `follow_edits` when it is back.
        if self.is_away:
            return
        if self.has_second_copy:
            # Held against the exact master, not its blocks as in `_follow`: inside `gathered` parameters show the master
            # exactly.
            values = self.memory.read_own()
            for row in self.rows:
                master = row.of(self.master)
                own = row.of(values).to(master.device)
                master.copy_(torch.where(own == master.to(own.dtype), master, own.to(master.dtype)))
        for slot in self.slots:
            slot.version = slot.parameter._version

    def write_back(self) -> None:
        """Copies the updated master into this rank's shard of the parameters."""
        if self.has_second_copy and not self.is_away:
            self.memory.write_own(self.master, self.tier.h2d)

    def rest(self, master: Region | None) -> None:
        """Moves the shard to its tier. `master`: the master's place in a file, in the parameters' own digits."""
        self.memory.rest(master)
        if not self.precision.has_master:
            self.master = self.own

    def fetch(self, master: torch.Tensor) -> None:
        """Makes `master`, (shard_numel,), the master in memory again."""
        self._set_master(master)
        self.is_away = False

    def exchange_master(self, master: torch.Tensor) -> None:
        """Makes `master`, (shard_numel,), the master. The former tensor belongs to the caller from now on."""
        if not self.precision.has_master:
            self.memory.exchange_own(master)
        self._set_master(master)

    def store(self, placeholder: torch.Tensor) -> None:
        """Leaves the master to a file. `placeholder`: a 0-d tensor of its dtype."""
        # Expanded, not empty: rows are cut out of the master by their place in the shard, and keep their shapes for the
        # optimizer.
        self._set_master(placeholder.expand(self.layout.shard_numel))
        self.is_away = True

    def _set_master(self, master: torch.Tensor) -> None:
        self.master = master
        for row in self.rows:
            # By `data`: the optimizer holds these very tensors in its groups and its state.
            row.tensor.data = row.of(master)

    def _adopt_with_master(self, slot: ParameterSlot) -> None:
        # Kept before `adopt`, which replaces the data: the master takes all digits of a model that was loaded in
        # float32.
        as_loaded = slot.parameter.detach()
        is_wanted_so = wanted_dtype(slot.parameter) == self.precision.kept
        self.adopt(slot)
        if self.precision.casts and self.trained:
            # Inside `gathered` the parameter has another dtype than in a pass, and what stands for its gradient has one.
            slot.parameter.grad_dtype = None
        forget_loaded(slot.parameter)
        row = slot.row
        if row is not None and self.precision.has_master:
            # A model in fp32 trained in bf16 keeps its full digits in the master; one loaded in bf16 has no more.
            cut = row.layout.in_parameter
            values = row.of(self.own) if is_wanted_so else as_loaded.reshape(-1)[cut.start : cut.stop]
            row.of(self.master).view(-1).copy_(values.reshape(-1))

    def _make_rows(self) -> list[Row]:
        # By `data`: its count of writes begins anew, and parameters that are gathered beside the rows do not count there.
        master = self.master.data
        rows = []
        for slot, layout in self.own_parts.items():
            shape = slot.parameter.shape if self.layout.intact else (layout.in_shard.numel,)
            # An intact row keeps the parameter's shape: optimizers that compute with rows and columns of a matrix would see a
            # vector.
            tensor = slot.parameter if self.rows_are_parameters else nn.Parameter(_part(master, layout.in_shard, shape))
            slot.sharded_gradient.shard, slot.sharded_gradient.await_shard = (
                tensor,
                WeakMethod(self, Bucket.await_gradient),
            )
            slot.row = Row(slot=slot, layout=layout, tensor=tensor)
            rows.append(slot.row)
        return rows


# ---- The same for all buckets of a step at once, in loops in C over all of their slots or rows ----

_ROW_TENSORS, _PARAMETERS, _ROW_PARAMETERS = map(attrgetter, ("row_tensors", "parameters", "row_parameters"))
_STAND_INS, _SLOTS, _ROWS = map(attrgetter, ("stand_ins", "slots", "rows"))


def _all(buckets: Iterable[Bucket], kind: Callable[[Bucket], Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(map(kind, buckets)))


def refuse_norms_of(buckets: Iterable[Bucket]) -> None:
    """Makes a norm of a row's gradient raise, if the row is a part of a parameter."""
    gradients = list(map(GRADIENT_OF, _all(_with_parts(buckets), _ROW_TENSORS)))
    # Plain tensors only: the guard replaces the class, and a clipped gradient would lose the class that multiplies by
    # its coefficient.
    is_plain = {torch.Tensor}.issuperset(map(type, gradients))
    refuse_norms(gradients if is_plain else [each for each in gradients if type(each) is torch.Tensor])


def allow_norms_of(buckets: Iterable[Bucket]) -> None:
    """Allows the norms again: the present caller knows that rows are parts."""
    allow_norms(list(map(GRADIENT_OF, _all(_with_parts(buckets), _ROW_TENSORS))))


def _with_parts(buckets: Iterable[Bucket]) -> list[Bucket]:
    return [bucket for bucket in buckets if not bucket.rows_are_parameters]


def begin_step_of(buckets: Sequence[Bucket]) -> None:
    """Calls `begin_step` of all buckets, if there is something to do."""
    for bucket in buckets:
        bucket.await_gradient()
    if not any(bucket.rows_are_parameters or bucket.is_away for bucket in buckets):
        with look_only():
            stand_ins = _all(buckets, _STAND_INS)
            versions = map(_VERSION, _all(buckets, _ROW_PARAMETERS))
            if (
                have_gradients(_all(buckets, _ROW_TENSORS))
                and all(map(is_, map(GRADIENT_OF, _all(buckets, _PARAMETERS)), stand_ins))
                and GradientState.SPENT not in map(_STATE, stand_ins)
                and all(map(eq, versions, map(_FOLLOWED_VERSION, _all(buckets, _ROWS))))
            ):
                return
    for bucket in buckets:
        bucket.begin_step()


def end_step_of(buckets: Iterable[Bucket]) -> dict[Bucket, list[ParameterSlot]]:
    """Calls `end_step` of buckets whose rows are parts of parameters; returns the slots that were stepped.

    Rows that are the parameters keep `grad` until the script zeroes it, as under DDP. Then nothing else refers to its memory.
    """
    set_all(buckets, "_laid", repeat(None))
    buckets = _with_parts(buckets)
    with look_only():
        parameters, stand_ins = _all(buckets, _PARAMETERS), _all(buckets, _STAND_INS)
        if not all(map(is_, map(GRADIENT_OF, parameters), stand_ins)):
            return {bucket: bucket.end_step() for bucket in buckets}
        # As `end_step` does.
        set_all(_all(buckets, _ROW_TENSORS), "grad", repeat(None))
        set_all(stand_ins, "state", repeat(GradientState.SPENT))
        set_all(stand_ins, "pending", repeat(None))
        slots = _all(buckets, _SLOTS)
        set_all(slots, "version", list(map((1).__add__, map(_SLOT_VERSION, slots))))
        increment_version(parameters)
    return dict(zip(buckets, map(_SLOTS, buckets)))


# ---- Neighbouring rows as one flat tensor: one kernel launch for many parameters ----


@dataclass(eq=False, slots=True)
class Run:
    """Rows of one bucket that follow each other without a gap, and so do their gradients.

    Padding ends a run: its memory has no gradient, and on an accelerator nobody has written there.

    Attributes:
        phase: a value that all rows share.
        interval: of the rank's shard.
        gradient: (interval.numel,), a view of the rows' gradients, or a copy of one that is not dense.
    """

    phase: Hashable
    interval: Interval
    gradient: torch.Tensor


_PLACE = attrgetter("slot.bucket.layout.index", "layout.in_shard.start")
_INDEX = attrgetter("layout.index")


def runs_of(rows: Iterable[Row], phase_of: Mapping[Row, Hashable] | None = None) -> list[Run]:
    """Joins rows that all have gradients into the fewest runs, in the order of buckets and rows.

    Args:
        phase_of: rows of different phases do not share a run. None: one phase for all.
    """
    # A caller whose kernel multiplies a clipped gradient by its coefficient must take the coefficients before this call.
    rows = list(rows)
    phases = {None} if phase_of is None else set(phase_of.values())
    buckets = sorted(set(map(BUCKET_OF, rows)), key=_INDEX)
    if len(phases) == 1 and len(rows) == sum(map(len, map(_ROWS, buckets))):
        (phase,) = phases
        flats = [bucket.flat_gradients() for bucket in buckets]
        if all(map(is_not, flats, repeat(None))):
            # In nearly all steps, without a loop over rows in Python.
            return [Run(phase, interval, gradient) for flat in flats for interval, gradient in flat or ()]
    return _runs_row_by_row(rows, phase_of)


def _runs_row_by_row(rows: Iterable[Row], phase_of: Mapping[Row, Hashable] | None) -> list[Run]:
    # Each parameter comes here in each step, so Python calls no function a row.
    ordered = sorted(rows, key=_PLACE)
    held: list[Any] = [row.tensor.grad for row in ordered]
    gradients = [each if type(each) is torch.Tensor else plain_gradient(each) for each in held]
    if not all(map(torch.Tensor.is_contiguous, gradients)):
        gradients = [gradient.contiguous() for gradient in gradients]
    phases = repeat(None) if phase_of is None else [phase_of[row] for row in ordered]
    found: list[Run] = []
    bucket: Bucket | None = None
    phase: Hashable = None
    dtype: torch.dtype | None = None
    first, start, stop, end, memory_end = None, 0, 0, 0, 0
    for row, gradient, address, own_phase in zip(ordered, gradients, map(torch.Tensor.data_ptr, gradients), phases):
        part, here = row.layout.in_shard, row.slot.bucket
        if (
            first is not None
            and here is bucket
            and part.start == stop
            and address == end
            and gradient.dtype == dtype
            # Addresses that touch are not enough: two allocations may touch, and torch refuses a view that leaves its storage.
            and address + gradient.nbytes <= memory_end
            and own_phase == phase
        ):
            stop, end = part.stop, address + gradient.nbytes
            continue
        if first is not None:
            found.append(_run(phase, start, stop, first))
        first, bucket, phase, dtype = gradient, here, own_phase, gradient.dtype
        (start, stop), end = part, address + gradient.nbytes
        memory = gradient.untyped_storage()
        memory_end = memory.data_ptr() + memory.nbytes()
    if first is not None:
        found.append(_run(phase, start, stop, first))
    return found


def _run(phase: Hashable, start: int, stop: int, first: torch.Tensor) -> Run:
    return Run(phase, Interval(start, stop), first.as_strided((stop - start,), (1,)))
