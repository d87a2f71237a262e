"""When units are unsharded, prefetched and resharded.

[Note: the end of a unit's backward]
Autograd runs ready nodes in the reverse order of their creation in forward, and runs the accumulation of a parameter's gradient
before any other node. A tensor's hook runs just before the node that created the tensor. So when the hook on a unit's output
runs, all nodes of later units have run, and the later units can be dropped. FSDP2 instead puts an autograd node around a unit's
inputs. We do not: if several units share an input (a decoder's encoder states), such a node would change the order in which
autograd sums the input's gradients.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from ..comm.transport import Transport
from ..engine.wire import Wire
from ..hooks.modes import dispatch_modes, hidden_from_modes, without_modes
from ..hooks.tensors import NO_TASK, graph_task, is_in_backward, tensors_in
from ..hooks.weak import WeakMethod
from ..step.common_starts import CommonStarts
from ..step.gathers import Gather
from .agreed_order import AgreedOrder
from .edits import refuse_unseen_edits
from .transforms import is_transformed
from .unit import Unit

_VERSION, _PASSING_BYTES = attrgetter("_version"), attrgetter("passing_bytes")


class Unsharding:
    """Gathers each unit for its forward and its backward, prefetches the next units, and drops units after their use.

    Forwards, and hooks on their outputs in backward, determine when a unit is gathered. A unit that is read outside its own
    forward gets no such hook in backward. The reading rank keeps the unit whole until backward ends, and still joins the
    unit's gathers. So no other rank hangs if only one rank reads a unit.

    Args:
        root: unit of the parameters outside of layers, whole from the model's forward to the end of its backward.
        layers: the other units.
        wire: how units are gathered.
        prefetch: number of units gathered ahead of the one in use.
        reshard_after_forward: False keeps gathered units until the optimizer's step.
        transport: connects all ranks that gather.

    Attributes:
        reshards_after_forward: the argument `reshard_after_forward`.
        peak_bytes: the largest number of bytes that gathered parameters have needed in addition to the shards.
    """

    def __init__(
        self,
        root: Unit,
        layers: Sequence[Unit],
        *,
        wire: Wire,
        prefetch: int,
        reshard_after_forward: bool,
        transport: Transport,
    ):
        self._root = root
        self._wire = wire
        self._kept: set[Unit] = set()
        self.units = [root, *layers]
        self._not_sharded: dict[Unit, None] = {}
        for unit in self.units:
            unit.not_sharded = self._not_sharded
        self._fetches = any(unit.is_fetched for unit in self.units)
        self._prefetch = prefetch
        self.reshards_after_forward = reshard_after_forward
        self._order = order = AgreedOrder(
            [unit.buckets[0].labels[""].holds if unit.buckets else unit.name for unit in self.units],
            transport,
            WeakMethod(self, Unsharding._take_part),
        )
        # The numbers of the units' gathers in a forward and in a backward, and the units by these numbers.
        self._numbers = {unit: order.number(index, backward=False) for index, unit in enumerate(self.units)}
        self._backward_numbers = {unit: order.number(index, backward=True) for index, unit in enumerate(self.units)}
        self._by_number = {number: unit for unit, number in self._numbers.items()}
        self._by_backward_number = {number: unit for unit, number in self._backward_numbers.items()}
        # The unit in use, and the prefetched units.
        self._at: Unit | None = None
        self._ahead: list[Unit] = []
        self._running: list[Unit] = []
        self._versions: dict[Unit, dict[int, int]] = {}
        self._is_backward_open = False
        self._builds_graph = False
        self._backward_follows = False
        self._keeps_all = False
        self._fetching: list[Unit] = []
        # Marks of absent values on an accelerator, and copies of them. On the host, each gather checks its mark.
        absent = [memory.absent for unit in self.units for memory in unit.memories.values()]
        self._marks = [mark for mark in absent if mark.device.type != "cpu"]
        self._copies_of_marks = [mark.clone() for mark in self._marks]
        self.peak_bytes = 0

    def count_starts(self, starts: CommonStarts, transport: Transport) -> None:
        """Makes `starts` count the reductions started by all ranks before their wait for a gather.

        Args:
            starts: counts the starts of reductions.
            transport: connects the ranks that reduce.
        """
        order = self._order
        order.starts = starts
        if transport is not order.transport:
            # Ranks with different parts of a split model may have different numbers of buckets, but all must send equal sizes.
            counts = order.transport.exchange(starts.count, "exchange of the number of buckets")
            starts.count = starts.sure = max(counts)

    @property
    def in_pass(self) -> bool:
        """Whether a forward of some unit, or a backward, is running."""
        return bool(self._running) or is_in_backward()

    # ---- called by the hooks ----

    def before_forward(self, unit: Unit, inputs: Sequence[object] = ()) -> None:
        """Makes `unit` whole for its forward, or for its recomputation inside a backward."""
        tensors = _with_bases(tensors_in(inputs))
        self._versions[unit] = dict(zip(map(id, tensors), map(_VERSION, tensors)))
        if graph_task() != NO_TASK:
            self.before_backward(unit)
            return
        if not self._running:
            self._at = None
            self._backward_follows = torch.is_grad_enabled()
            if not self._backward_follows:
                # In an evaluation. Otherwise only a step would check for edits, and a pure evaluation run has no steps.
                self._refuse_unseen_edits()
        self._running.append(unit)
        self._use(unit, backward=False)

    def after_forward(self, unit: Unit, outputs: object, *, has_returned: bool = False) -> None:
        """Drops `unit` unless its backward comes next, and hooks its outputs to gather the unit again in backward.

        Args:
            has_returned: a layer's forward has ended without an exception. If none of its outputs is a tensor, no hook can
                run in backward, so the unit is kept until backward ends.
        """
        if torch.is_grad_enabled():
            tensors = tensors_in(outputs)
            self._watch(unit, tensors)
            if has_returned and not tensors:
                self._kept.add(unit)
        if graph_task() != NO_TASK:
            return
        running = self._running
        if running and running[-1] is unit:
            running.pop()
        elif unit in running:
            # Also remove units inside this one: after an exception, their own `after_forward` may not have run.
            del running[running.index(unit) :]
        if unit is self._root and outputs is not None and not all(each.holds for each in self.units):
            # Not after an exception, because other ranks without one still need this rank in their gathers. Not if all units are
            # held either, because only one rank may run the model then.
            order = self._order
            order.reach(order.forward_end_with_graph if self._backward_follows else order.forward_end)
        if not self.reshards_after_forward:
            return
        # A property of the whole pass: reentrant checkpointing runs a layer without gradients, and yet a backward follows.
        backward_follows = self._backward_follows
        # The last layer stays, because backward begins with it. Earlier layers are dropped. Otherwise they would be in memory
        # together with the logits, at the peak. They are gathered again during the last layer's backward.
        may_be_last = backward_follows and not self._ahead and self._order.following is None
        if unit is self._root:
            if not backward_follows:
                self._drop_all()
                self._restore_marks()
        elif len(unit.modules) == 1 and not may_be_last:
            # A unit that stays although it was not the last one is dropped when another unit is used. The same holds for units of
            # several layers.
            self._drop([unit])

    @hidden_from_modes
    def before_read(self, unit: Unit) -> None:
        """Makes `unit` whole for code outside its own forward, such as a direct call of a submodule, or a parent's weight read.

        The unit stays whole until backward ends, because no hook can gather it again for the backward of such a read.
        """
        self._reach(unit, backward=is_in_backward())
        self._finish(unit)
        if unit is not self._root:
            self._kept.add(unit)

    @hidden_from_modes
    def before_saved_read(self, unit: Unit) -> None:
        """Makes `unit` whole for a backward node outside all layers, until the next layer's backward."""
        self._reach(unit, backward=True)
        self._finish(unit)

    def before_backward(self, unit: Unit, *, builds_graph: bool = False) -> None:
        """Makes `unit` whole for its backward, and drops layers whose backward has ended.

        Args:
            builds_graph: this backward runs with create_graph. The nodes of a second backward read parameters, and no hook
                gathers them, so all units stay whole until a backward without create_graph has ended.
        """
        if not self._is_backward_open:
            self._is_backward_open = True
            self._builds_graph = False
            self._at = None
        if builds_graph:
            self._builds_graph = self._keeps_all = True
        self._use(unit, backward=True)

    def agree_on_starts(self) -> None:
        """Joins the next agreement of the other ranks, unless a gather comes first."""
        self._order.agree_on_starts()

    def end_gathers(self) -> None:
        """Called after this rank's last gather of a backward. Joins other ranks' gathers until all ranks have finished theirs."""
        if is_transformed():
            return
        self._order.reach(self._order.backward_end)

    def end_backward(self) -> None:
        """Called at the end of a backward."""
        if self._is_backward_open:
            self._is_backward_open = False
            self._keeps_all = self._builds_graph
        self._fetch([])
        if self.reshards_after_forward:
            self._drop_all()

    def recover(self) -> None:
        """Clears the state of a forward or backward after an exception. Called outside of both."""
        self._running.clear()
        if self._is_backward_open:
            self.end_backward()

    # ---- called by the engine ----

    @hidden_from_modes
    def unshard(self, units: Iterable[Unit]) -> None:
        """Makes units whole and exact; all gathers run at the same time."""
        units = list(units)
        if not all(unit.holds for unit in units):
            # Not if all units are held: then nothing is gathered, and one rank may call this without the others.
            self.catch_up()
        for unit in units:
            if not unit.is_sharded and unit.gather is not self._wire.exact:
                # A gather in another form must finish before its memory is used again.
                self._finish(unit)
                unit.reshard(keeps=unit in self._kept)
            self._start(unit, self._wire.exact)
        for unit in units:
            self._finish(unit)
            unit.unseen.leave_to_script()

    def catch_up(self) -> None:
        """Joins gathers prefetched or still needed by other ranks. Called before collectives outside of a pass."""
        self._order.reach(self._order.forward_end)

    def reshard_all(self) -> None:
        """Drops all gathered parameters before a step changes the shards."""
        held = [unit.name for unit in self.units if unit.holds]
        if held:
            raise RuntimeError(
                f"hf_zero: optimizer.step() was called inside `gathered` or `unsharded` (units {', '.join(held[:3])}): the "
                "whole copies would be out of date. Exit the context before the step."
            )
        self._keeps_all = False
        self._order.count_step()
        self._fetch([])
        self._drop_all()
        self._restore_marks()
        # Secondary copies inside a node have the values before the step.
        self._wire.forward.forget()
        for unit in self.units if self._fetches else ():
            # A running fetch has the values before the step, and reads memory written by the step.
            unit.forget_fetch()
        self._refuse_unseen_edits()

    def forget_copies(self, unit: Unit) -> None:
        """Drops copies of a sharded unit's parameters before the shard changes."""
        self._wire.forward.forget()
        unit.forget_fetch()

    @hidden_from_modes
    def release(self, units: Iterable[Unit]) -> None:
        """Drops units gathered by `unshard`. A unit with a running forward is gathered again in the forward's form."""
        units = list(units)
        self._drop([unit for unit in units if unit not in self._running])
        for unit in units:
            if unit in self._running and not unit.holds and unit.gather is not self._wire.forward:
                # The running forward continues with the same values as before. Exact values may have a different dtype or more
                # precision.
                self._finish(unit)
                unit.reshard()
                self._start(unit, self._wire.forward)
                self._finish(unit)

    # ---- implementation ----

    def _use(self, unit: Unit, *, backward: bool) -> None:
        root = self._root
        if self._at is unit and unit is not root and not (unit.is_sharded or unit.is_unsharding):
            # The next layer of the same unit.
            return
        self._at, ahead = unit, self._ahead
        if ahead and ahead[0] is unit:
            del ahead[0]
        elif unit in ahead:
            # Also remove earlier prefetched units, which this rank has skipped.
            del ahead[: ahead.index(unit) + 1]
        if self.reshards_after_forward and unit is not root:
            others = self._not_sharded.keys() - {unit, root}
            if others and (others := others.difference(ahead, self._running)):
                # Release before the gather. Otherwise the new layer would need memory in addition to the finished one.
                self._drop(self._in_order(others) if len(others) > 1 else others)
        # Start this unit's gather before the prefetches, because gathers run in order, and this unit is needed first.
        self._reach(unit, backward=backward)
        self._gather_ahead(backward=backward)
        if self._fetches:
            # Offloaded shards may be slow to read, so fetch them while the gathers before theirs run.
            following = self._order.expected(self._prefetch + 1 - len(ahead))
            self._fetch([self.units[number % len(self.units)] for number in following])
        self._finish(unit)

    def _in_order(self, units: Iterable[Unit]) -> list[Unit]:
        """Sorts units in the order of the schedule, which is the same on all ranks."""
        return sorted(units, key=self._numbers.__getitem__)

    def _reach(self, unit: Unit, *, backward: bool) -> None:
        """Starts a unit's gather, in the agreed order, unless the unit is whole."""
        number = (self._backward_numbers if backward else self._numbers)[unit]
        if unit.is_sharded:
            self._order.reach(number)
            self._start_for(unit, backward=backward)
        else:
            self._order.use(number)

    def _gather_ahead(self, *, backward: bool) -> None:
        """Prefetches units, as long as the next gather is known and of the same pass."""
        order, ahead, prefetch = self._order, self._ahead, self._prefetch
        units = self._by_backward_number if backward else self._by_number
        while len(ahead) < prefetch:
            # First a fast check for the usual case.
            if len(self._not_sharded) - (not self._root.is_sharded) > prefetch and not self._has_room():
                return
            following = order.following
            # None, a number of the other pass, or an end.
            if following is None or (unit := units.get(following)) is None or not unit.is_sharded:
                return
            order.note(following)
            self._start_for(unit, backward=backward)
            ahead.append(unit)

    def _start_for(self, unit: Unit, *, backward: bool) -> None:
        if backward:
            self._start(unit, self._wire.backward)
        elif torch.is_grad_enabled() is self._backward_follows:
            self._start(unit, self._wire.forward)
        else:
            self._start_in_mode_of_pass(unit)

    def _start_in_mode_of_pass(self, unit: Unit) -> None:
        # Reentrant checkpointing runs a layer without gradients, but a rank that skips the layer joins its gather with gradients
        # enabled. Use the mode of the whole pass, so that either all ranks keep a secondary shard or none does.
        with torch.set_grad_enabled(self._backward_follows):
            self._start(unit, self._wire.forward)

    def _take_part(self, number: int) -> None:
        """Joins a gather for other ranks, and restores the unit's state on this rank afterwards."""
        unit = self.units[number % len(self.units)]
        if unit.holds:
            # `gathered` is collective, so the unit is whole on all ranks.
            return
        is_in_use = not unit.is_sharded
        if is_in_use:
            self._finish(unit)
            # Keep the memory, because running code on this rank may use the parameters. The gather writes the same values again.
            unit.reshard(keeps=True)
        self._start_for(unit, backward=number >= len(self.units))
        self._finish(unit)
        if not is_in_use and self.reshards_after_forward:
            unit.reshard(keeps=unit in self._kept)

    def _fetch(self, wanted: list[Unit]) -> None:
        """Starts to fetch the shards of the units in `wanted`, and cancels fetches of other units."""
        for unit in self._fetching:
            if unit.is_sharded and unit not in wanted:
                unit.forget_fetch()
        self._fetching = [unit for unit in wanted if unit.is_sharded]
        for unit in self._fetching:
            unit.start_fetch()

    def _has_room(self) -> bool:
        """Whether one more layer may be prefetched."""
        passing = [unit for unit in self._not_sharded if not (unit.holds or unit is self._root)]
        return len(passing) <= self._prefetch or not self.reshards_after_forward

    def _start(self, unit: Unit, gather: Gather) -> None:
        # Not if this rank has joined the gather for other ranks, and the unit is kept.
        if unit.is_sharded:
            unit.start_unshard(gather)
            # A kept unit also counts. Its state is SHARDED, but its parameters are whole on this rank.
            gathered = sum(map(_PASSING_BYTES, self._not_sharded.keys() | self._kept))
            if gathered > self.peak_bytes:
                self.peak_bytes = gathered

    def _finish(self, unit: Unit) -> None:
        if unit.is_unsharding:
            starts = self._order.starts
            # The dict is empty in a forward, unless other ranks are in a backward.
            if starts.before:
                before = starts.before.get(self._backward_numbers[unit])
                # None if the forward has gathered the unit. Then all ranks have already started the gather.
                if before is not None:
                    starts.keep_promise(*before)
            unit.finish_unshard()

    def _drop(self, units: Iterable[Unit]) -> None:
        if self._keeps_all:
            return
        for unit in units:
            if not (unit.is_sharded or unit.holds):
                if unit.is_unsharding:
                    # The running gather writes to the memory freed by the reshard.
                    self._finish(unit)
                unit.reshard(keeps=unit in self._kept)

    def _drop_all(self) -> None:
        """Drops all units, including kept ones, whose backward has ended or will not run."""
        if self._keeps_all:
            return
        # Emptied first. Otherwise `_drop` would keep these units again.
        kept, self._kept = self._kept, set()
        self._drop(self._in_order(self._not_sharded))
        for unit in kept:
            if unit.is_sharded:
                unit.free()

    def _restore_marks(self) -> None:
        """Overwrites writes to absent values by code that bypasses the guards, such as a kernel of the script."""
        if self._marks:
            torch._foreach_copy_(self._marks, self._copies_of_marks)

    def _refuse_unseen_edits(self) -> None:
        compared = [unit.unseen for unit in self.units if unit.unseen.compared]
        if compared:
            refuse_unseen_edits(compared)

    def _watch(self, unit: Unit, outputs: Iterable[torch.Tensor]) -> None:
        # Skip tensors that the layer only passes through (T5's position bias): another module created them, so their hooks would
        # run at a different time. A tensor that the layer has modified in place has a new node in this layer.
        versions = self._versions.pop(unit, {})

        def announce(_gradient: torch.Tensor) -> None:
            if dispatch_modes():
                with without_modes():
                    return announce(_gradient)
            self.before_backward(unit, builds_graph=torch.is_grad_enabled())

        # An in-place operation on a view replaces the view's node in the graph, while the node of its base stays.
        for tensor in _with_bases(outputs):
            if versions.get(id(tensor)) != tensor._version:
                tensor.register_hook(announce)


def _with_bases(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors with requires_grad, and such bases of views among them."""
    found = []
    for tensor in tensors:
        if tensor.requires_grad:
            found.append(tensor)
            base = tensor._base
            if base is not None and base.requires_grad:
                found.append(base)
    return found
