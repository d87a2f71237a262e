"""Buckets: parameters in one flat buffer, which are reduced together, and this rank's shard of the buffer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from operator import attrgetter, eq
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..comm.transport import DataParallelGroup
from ..comm.waits import Labels
from ..hooks.tensors import set_all
from ..hooks.weak import WeakMethod
from ..layout.buckets import BucketLayout, RowLayout, rows_of_shard
from ..layout.intervals import Interval
from ..offload.shards import Region
from ..offload.tiers import Tier
from ..queues import LatestArrival
from .flat_views import FlatViews
from .memory import ParameterMemory, clear_padding
from .precision import Precision
from .sharded_gradient import GradientState, ShardedGradient
from .unread_weights import forget_loaded, wanted_dtype

# Called for all parameters in each step, so the loops run in C.
TENSOR_OF, SLOT_OF, PARAMETER_OF = attrgetter("tensor"), attrgetter("slot"), attrgetter("slot.parameter")
BUCKET_OF, FOLLOWED_VERSION = attrgetter("slot.bucket"), attrgetter("slot.version")
ROWS_OF, _VERSION = attrgetter("rows"), attrgetter("_version")


class BucketKey(NamedTuple):
    """Properties shared by all parameters of a bucket.

    Attributes:
        trained: whether the parameters require gradients.
        dtype: dtype in the model, before `param_dtype` is applied.
        gathered_dtype: dtype to which stage 3 casts in a gather; None without a cast.
        optimizer: index of the parameters' optimizer in the order given to the engine; -1 without one.
        group: index in this optimizer's `param_groups`; -1 without one.
        is_expert: split over more ranks than the remaining model, so fewer ranks share the state.
        is_split: split by tensor or expert parallelism with a quantized wire. If one quantization block mixed split and
            replicated elements, the ranks of a copy would round the replicated ones differently.
        stays: kept in `dtype`, regardless of `param_dtype` and `rounding`.
        is_packed: packed weights and their modules' further tensors: never cast or rounded, and sent as bytes.
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


@dataclass(eq=False)
class ParameterSlot:
    """A parameter in its bucket, and the state of its gradient in the current backward.

    Attributes:
        number: index among the slots of the bucket.
        view: the parameter's elements of the bucket's flat buffer, in the parameter's shape.
        arrived: whether a gradient is in the bucket's open buffer.
        used: whether a gradient arrived on this rank during the pass; after the pass, on any rank.
        used_elsewhere: whether a gradient arrived only on other ranks.
        continues: whether the arriving gradient adds to one reduced earlier and not zeroed since.
        version: the parameter's autograd version counter when the master last followed the parameter.
        row: this rank's part of the parameter; None without one.
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
        """Returns this slot's part of a flat buffer with the bucket's layout, in the parameter's shape, row-major."""
        return part_of(flat, self.interval, self.parameter.shape)


def part_of(flat: torch.Tensor, interval: Interval, shape: Sequence[int]) -> torch.Tensor:
    return flat[interval.start : interval.stop].view(shape)


@dataclass(eq=False)
class Row:
    """This rank's part of one parameter.

    Attributes:
        tensor: the tensor updated by the optimizer, in the master dtype: 1-D, or in the parameter's shape if the parameter
            must not be cut. The parameter itself if one rank owns the whole parameter and keeps no separate master.
    """

    slot: ParameterSlot
    layout: RowLayout
    tensor: nn.Parameter

    @property
    def is_parameter(self) -> bool:
        return self.tensor is self.slot.parameter

    @property
    def has_gradient(self) -> bool:
        """Whether the next step has a gradient for this shard."""
        # model.zero_grad() removes the `ShardedGradient`; optimizer.zero_grad() removes the shard tensor's gradient.
        tensor, parameter = self.tensor, self.slot.parameter
        return tensor.grad is not None and (tensor is parameter or parameter.grad is not None)

    @property
    def is_zeroed(self) -> bool:
        """Whether the script has zeroed the gradient since the last step, with no backward since."""
        sharded_gradient = self.slot.sharded_gradient
        is_held = self.tensor.grad is not None or self.slot.parameter.grad is not sharded_gradient
        return not is_held and sharded_gradient.state is GradientState.ZEROED

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns this shard's part of a flat tensor with the layout of the rank's shard, in the shape of `tensor`."""
        return part_of(shard, self.layout.in_shard, self.tensor.shape)


class LaidGradients(NamedTuple):
    """Gradients of all shards of a bucket, as views of one flat tensor written by a reduction.

    Attributes:
        views: one per shard tensor.
        addresses: the views' addresses, to notice if a script assigns new memory (`.data`).
        flats: the fewest flat views covering all gradients, each with its interval of the rank's shard.
    """

    views: list[torch.Tensor]
    addresses: list[int]
    flats: list[tuple[Interval, torch.Tensor]]


class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        key: the properties shared by all its parameters.
        group: the ranks that share its state and step together.
        memory: storage of the parameters: whole at stages 0 to 2; at stage 3 a shard and the gathered parameters.
        flat: the parameters, (numel,) of the param dtype; each whole parameter is a view of `flat`.
        own: this rank's shard of `flat`, (shard_numel,); without memory if offloaded to a file.
        master: (shard_numel,) of the master dtype; `own` itself without a separate master.
        slots, rows: all parameters of the bucket, and this rank's parts of them; no rows if frozen.
        own_parts: the position of this rank's elements of each parameter, also frozen ones, in the parameter and in the shard.
        trained: whether the parameters require gradients; buckets of frozen parameters exist only at stage 3.
        share: weight of one rank's gradient in the group's mean: 1 / number of ranks.
        rows_are_parameters: whether this rank's rows are the parameters themselves.
        tier: the memory tier of master, reduced gradient and optimizer state.
        is_away: whether the master is in a file, or in memory only for the step. `master` and the rows then have a shape but
            no memory.
        arrival: the end of the copy of the reduced gradient to the rows. Wait before reading or writing gradient values.
        gradient_dtype: dtype of the reduced gradient stored in the rows until the step.
        laid: the rows' gradients as left by the last reduction; see `laid_gradients_of`.
        labels: names its collectives, by kind.
        has_second_copy: whether master and parameters are two copies. Each copy must then follow changes of the other.
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
        self.is_away = False
        self.arrival = LatestArrival()
        self.laid: LaidGradients | None = None
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
                view=part_of(self.flat, slot.interval, parameter.shape),
                sharded_gradient=ShardedGradient(slot.name, parameter),
            )
            for number, (slot, parameter) in enumerate(zip(layout.slots, parameters, strict=True))
        ]
        self.labels = Labels(subject=self.name, channel=layout.index, holds=self._contents())
        self.has_second_copy = precision.has_master and not memory.is_master
        self.master = tier.empty(layout.shard_numel, precision.master) if precision.has_master else self.own
        slot_of = {slot.name: slot for slot in self.slots}
        self.own_parts = {slot_of[part.name]: part for part in rows_of_shard(layout, group.groups.shard_rank)}
        # Before the parameters are adopted below: the rows are views of the master, and `_adopt_with_master` fills them with
        # each parameter's values.
        self.rows = self._make_rows() if self.trained else []
        memory.clear_padding(layout)
        if precision.has_master:
            clear_padding(self.master, layout, self.own_interval)
        for slot in self.slots:
            self._adopt_with_master(slot)
        # Last, because the views above need a `flat` with memory: torch cannot create views of a storage without memory.
        memory.end_filling()

    @property
    def name(self) -> str:
        return f"bucket {self.layout.index}"

    @property
    def own(self) -> torch.Tensor:
        return self.memory.own

    @property
    def keeps_master(self) -> bool:
        """Whether both copies persist between steps."""
        return self.precision.keeps_master and not self.memory.is_master

    @property
    def copy_to_write(self) -> torch.Tensor | None:
        """Returns the parameters' shard, (shard_numel,), if a step may write parameters and master; None otherwise."""
        return self.memory.writable_own if self.precision.keeps_master and not self.memory.is_master else None

    def _contents(self) -> str:
        """Names the innermost module containing all parameters, or the first and last parameter."""
        names = [slot.name for slot in self.slots]
        if len(names) == 1:
            return names[0]
        parts = [name.split(".") for name in names]
        shared = list(takewhile(lambda at: len(set(at)) == 1, zip(*parts)))
        return ".".join(at[0] for at in shared) or f"{names[0]} to {names[-1]}"

    @cached_property
    def slot_views(self) -> FlatViews:
        """Splits flat buffers of this layout into all slots, like `ParameterSlot.view_of` for one."""
        return FlatViews((slot.interval, slot.parameter.shape) for slot in self.slots)

    @cached_property
    def row_views(self) -> FlatViews:
        """Splits flat tensors of the shard's layout into all rows, like `Row.of` for one."""
        return FlatViews((row.layout.in_shard, row.tensor.shape) for row in self.rows)

    def adopt(self, slot: ParameterSlot) -> None:
        """Copies this rank's part of a parameter into the slot, and makes the parameter a view of the slot."""
        parameter = slot.parameter
        with torch.no_grad():
            self.memory.store(slot.view, slot.interval, parameter)
        # As a view, the parameter shares memory with backward, the optimizer and the gathers, without copies.
        self.memory.set_data(parameter, slot.view)
        # A new stand-in, because the parameter may have a new dtype; the shard tensor is kept.
        before, slot.sharded_gradient = slot.sharded_gradient, ShardedGradient(slot.name, parameter)
        slot.sharded_gradient.take_shard_of(before)
        for cached in ("stand_ins", "held"):
            self.__dict__.pop(cached, None)
        # Take the version after the copy above, which is not an edit by the script.
        slot.version = parameter._version

    def holds(self, slot: ParameterSlot) -> bool:
        """Whether the parameter's memory is still its slot."""
        return self.memory.is_view(slot.parameter, slot.view)

    def is_exact_view(self, slot: ParameterSlot) -> bool:
        """Whether the parameter also has its slot's shape and strides; a script may change both through `p.data`."""
        parameter, view = slot.parameter, slot.view
        return self.holds(slot) and (parameter.shape, parameter.stride()) == (view.shape, view.stride())

    @property
    def holds_all(self) -> bool:
        """Whether all parameters are views of their slots. A fast check: False may be wrong."""
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
        """Returns the slots' gradient stand-ins, in slot order; `adopt` replaces them."""
        return [slot.sharded_gradient for slot in self.slots]

    @cached_property
    def held(self) -> tuple[list[Any], list[str], list[Any]]:
        """Returns the arguments of a loop of `setattr` for `hold_gradients`: objects, names of attributes, values."""
        stand_ins, count = self.stand_ins, len(self.slots)
        names = ["state"] * count + ["pending"] * count + ["grad"] * count
        values = [GradientState.HELD] * count + [None] * count + stand_ins
        return [*stand_ins, *stand_ins, *self.parameters], names, values

    @cached_property
    def slot_starts(self) -> list[int]:
        """Returns the slots' first bytes in a flat gradient buffer."""
        return [slot.interval.start * self.precision.reduce.itemsize for slot in self.slots]

    @cached_property
    def row_tensors(self) -> list[nn.Parameter]:
        """Returns the rows' tensors, in row order."""
        return [row.tensor for row in self.rows]

    @cached_property
    def row_parameters(self) -> list[nn.Parameter]:
        """Returns the rows' parameters, in row order."""
        return [row.slot.parameter for row in self.rows]

    @cached_property
    def row_runs(self) -> list[tuple[int, Interval]]:
        """Returns the intervals of the shard in which rows are contiguous, each with its first row's index."""
        found: list[tuple[int, Interval]] = []
        for number, row in enumerate(self.rows):
            part = row.layout.in_shard
            if found and found[-1][1].stop == part.start:
                first, before = found[-1]
                found[-1] = first, Interval(before.start, part.stop)
            else:
                found.append((number, part))
        return found

    @cached_property
    def only_run(self) -> Interval | None:
        """The interval of the only run, if the run is the whole shard."""
        whole = Interval(0, self.layout.shard_numel)
        return whole if [part for _, part in self.row_runs] == [whole] else None

    @cached_property
    def row_starts(self) -> list[int]:
        """Returns the rows' first elements in the shard."""
        return [row.layout.in_shard.start for row in self.rows]

    @cached_property
    def _with_elements(self) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        slots = [slot for slot in self.slots if slot.interval.numel > 0]
        return [slot.parameter for slot in slots], [slot.view for slot in slots]

    @property
    def row_writes(self) -> int:
        """Returns autograd's version counter shared by the rows."""
        return self.rows[0].tensor._version if self.rows else 0

    @property
    def edited_rows(self) -> list[Row]:
        """Returns the rows whose parameter a script has written to in place since the master last followed."""
        if all(map(eq, map(_VERSION, self.row_parameters), map(FOLLOWED_VERSION, self.rows))):
            return []
        return [row for row in self.rows if row.slot.parameter._version != row.slot.version]

    def follow_edits(self) -> None:
        """Copies parameters edited in place by a script (for example by load_state_dict) into the master."""
        if self.is_away:
            # The edits are found once the master is back in memory.
            return
        if not self.has_second_copy:
            # Store the versions anyway: otherwise each later step would mistake the same edit for a new one.
            set_all(map(SLOT_OF, self.rows), "version", map(_VERSION, self.row_parameters))
            return
        edited = self.edited_rows
        if edited:
            self._follow(edited, self.memory.read_own())
        for row in edited:
            row.slot.version = row.slot.parameter._version

    def _follow(self, edited: Sequence[Row], values: torch.Tensor) -> None:
        # A value that still equals its rounded master was not edited and keeps the master's hidden digits. Otherwise a script
        # that clamps weights at each step would undo every update smaller than the rounding step of bfloat16 or of a block.
        shown = self.master
        if self.precision.weights is not None:
            # Always a copy, because `weights` rounds in place and must not round the master itself.
            shown = self.master.to(values, copy=True)
            self.precision.weights(shown)
        for row in edited:
            master, own = row.of(self.master), row.of(values)
            is_as_shown = own == row.of(shown).to(own)
            master.copy_(torch.where(is_as_shown, master.to(own.device), own.to(master.dtype)))

    def follow_values(self) -> None:
        """Copies edited parameters into the master. Compares values: any difference from the rounded master is an edit."""
        # An offloaded master follows by `follow_edits` once back in memory.
        if self.is_away:
            return
        if self.has_second_copy:
            # Compared with the exact master instead of its rounded blocks as in `_follow`, because inside `gathered`
            # parameters show the master exactly.
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

    def move_to_tier(self, master: Region | None) -> None:
        """Moves the shard to its tier. `master`: the master's region in a file, if its dtype is the parameters' own."""
        self.memory.move_to_tier(master)
        self.has_second_copy = self.precision.has_master and not self.memory.is_master
        if not self.precision.has_master:
            self.master = self.own

    def fetch(self, master: torch.Tensor) -> None:
        """Sets `master`, (shard_numel,), as the master in memory."""
        self._set_master(master)
        self.is_away = False

    def store(self, placeholder: torch.Tensor) -> None:
        """Leaves the master to a file. `placeholder`: a 0-d tensor of the master's dtype."""
        # Expanded instead of empty, because rows are slices of the master and must keep their shapes for the optimizer.
        self._set_master(placeholder.expand(self.layout.shard_numel))
        self.is_away = True

    def _set_master(self, master: torch.Tensor) -> None:
        self.master = master
        for row in self.rows:
            # Assign `data`, because the optimizer's groups and state refer to these tensor objects.
            row.tensor.data = row.of(master)

    def _adopt_with_master(self, slot: ParameterSlot) -> None:
        # Kept before `adopt` replaces the data: the master needs all digits of a model loaded in float32.
        as_loaded = slot.parameter.detach()
        is_wanted_so = wanted_dtype(slot.parameter) == self.precision.kept
        self.adopt(slot)
        if self.precision.casts and self.trained:
            # Inside `gathered` the parameter has a dtype different from that in a pass, but its gradient's stand-in has only
            # one.
            slot.parameter.grad_dtype = None
        forget_loaded(slot.parameter)
        row = slot.row
        if row is not None and self.precision.has_master:
            # The master keeps the full digits of an fp32 model trained in bf16; a model loaded in bf16 has no more digits.
            cut = row.layout.in_parameter
            values = row.of(self.own) if is_wanted_so else as_loaded.reshape(-1)[cut.start : cut.stop]
            row.of(self.master).view(-1).copy_(values.reshape(-1))

    def _make_rows(self) -> list[Row]:
        # `data` has its own version counter, which gathers into the parameters next to the rows do not increment.
        master = self.master.data
        rows = []
        for slot, layout in self.own_parts.items():
            shape = slot.parameter.shape if self.layout.intact else (layout.in_shard.numel,)
            # An intact row keeps the parameter's shape, because optimizers for matrices need rows and columns instead of a
            # vector.
            tensor = (
                slot.parameter if self.rows_are_parameters else nn.Parameter(part_of(master, layout.in_shard, shape))
            )
            slot.sharded_gradient.shard, slot.sharded_gradient.part = tensor, slice(*layout.in_parameter)
            slot.sharded_gradient.await_shard = WeakMethod(self.arrival, LatestArrival.wait)
            slot.row = Row(slot=slot, layout=layout, tensor=tensor)
            rows.append(slot.row)
        return rows
