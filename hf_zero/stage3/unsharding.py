"""When units are unsharded, prefetched and resharded.

[Note: the end of a unit's backward]
Autograd runs ready nodes in the reverse order of their creation in forward, and runs the accumulation of a parameter's gradient
before any other node. A tensor's hook runs just before the node that created the tensor. So when the hook on a unit's output
runs, all nodes of later units have run, and the later units can be dropped. FSDP2 instead puts an autograd node around a unit's
inputs. We do not: if several units share an input (a decoder's encoder states), such a node would change the order in which
autograd sums the input's gradients.
"""

import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import cast

import torch

from ..comm.ledger import Label
from ..comm.transport import Transport
from ..hooks.modes import dispatch_modes, hidden_from_modes, without_modes
from ..hooks.tensors import is_in_backward, tensors_in
from ..hooks.weak import WeakMethod
from ..step.collectives import Gather, Wire
from ..step.common_starts import CommonStarts
from .unit import Unit, UnitState, is_transformed, refuse_unseen_edits

# ---- The order in which all ranks start gathers, even if they run different layers ----
#
# [Note: layers that some ranks skip]
# A gather needs every rank, but ranks may run different layers: LayerDrop draws different numbers on each rank, a batch has no
# images, an expert gets no tokens. So all ranks start gathers in one agreed order. A rank that runs a later layer first joins the
# gathers before it. The order is learned: if one gather always follows another, ranks start it without communication. In all
# other cases, and at the end of each forward and backward, the ranks exchange which layer they need, and all of them gather the
# earliest of these layers. No rank leaves a forward or backward while another rank still needs a layer.
#
# Reductions must not block this; see [Note: waits for reductions].

_ALL_BITS = 0xFFFFFFFF

_MOST_UNSURE = 64
"""Maximum number of passes in which all ranks must agree on a next gather before they start it without communication."""


class AgreedOrder:
    """The order in which all ranks start gathers. See [Note: layers that some ranks skip].

    Each gather has a number: in a forward the unit's index, in a backward the unit's index plus the number of units. The next
    three numbers are ends: of a forward without a backward, of a forward with a backward, and of a backward. The last number
    means that a rank needs no gather, and asks only for starts of reductions.

    Args:
        names: the units' names, in their order.
        transport: connects all ranks that gather.
        take_part: joins a gather that other ranks may need.

    Attributes:
        transport: the same.
        starts: counts the reductions that all ranks have started.
    """

    def __init__(self, names: Sequence[str], transport: Transport, take_part: Callable[[int], None]):
        units = self._units = len(names)
        # With the layer's name, for errors about waiting ranks.
        needed = ["" if number >= 2 * units else names[number % units] for number in range(2 * units + 4)]
        self._labels = [Label(kind="agreement on the next layer", subject="this pass", holds=name) for name in needed]
        self.transport = transport
        self._take_part = take_part
        self._first_end = 2 * units
        self.forward_end, self.forward_end_with_graph, self.backward_end = range(self._first_end, self._first_end + 3)
        self._only_starts = self._first_end + 3
        self._steps = 0
        self.starts = CommonStarts(0)
        # Equal on all ranks, because these attributes change only in agreements and at starts of gathers.
        self._last = self._end = self.backward_end
        self._since_end: list[int] = []
        # The number of these gathers in the checksum.
        self._summed = 0
        self._checksum = 0
        self._next: dict[int, int] = {}
        self._unanimous: dict[int, tuple[int, int]] = {}
        self._unsure: dict[int, int] = {}
        self._learnt: tuple[list[int], list[int]] = ([], [])
        self._place: dict[int, int] = {}
        # Different on each rank.
        self._used: set[int] = set()
        self._own_last = self._last

    def number(self, unit: int, *, backward: bool) -> int:
        """Returns the number of a unit's gather."""
        return unit + self._units if backward else unit

    @property
    def following(self) -> int | None:
        """The next gather on all ranks; None if it is not known."""
        following = self._next.get(self._last)
        # If this is the first backward on its way, ranks agree on each layer; see [Note: waits for reductions].
        return None if following is not None and following >= self._units and self.starts.is_new_way else following

    def expected(self, count: int) -> list[int]:
        """Returns up to `count` next gathers, equal on all ranks."""
        found: list[int] = []
        number: int | None = self._last
        while len(found) < count and (number := self._next.get(cast(int, number))) is not None:
            found.append(number)
        return found

    def use(self, number: int) -> None:
        """Notes the use of a unit on this rank, if this pass has gathered the unit before."""
        if number in self._since_end:
            self._used.add(number)
            self._own_last = number

    def reach(self, number: int) -> None:
        """Advances to a gather, which the caller then starts, or to an end. Joins all gathers before it."""
        if self.following == number:
            # Fast path for the usual case: the expected gather, handled as below.
            self.note(number)
            self._used.add(number)
            self._own_last = number
            return
        strayed = None
        while True:
            following = self.following
            if following is None:
                following = self._agree(number, strayed)
                strayed = None
                if following == self._only_starts:
                    continue
            elif following != number and strayed is None:
                # This rank joins the expected gather, as the other ranks do. The next agreement drops the expectation.
                strayed = self._last
            if following < self._first_end:
                self.note(following)
            if following == number:
                break
            if following < self._first_end:
                self._take_part(following)
        self.use(number)

    def _is_of_backward(self, number: int) -> bool:
        return self._units <= number < self._first_end or number >= self.backward_end

    def agree_on_starts(self) -> None:
        """Joins the next agreement of the other ranks. No gather follows such an agreement."""
        if self.following is None:
            self._agree(self._only_starts, None)

    def note(self, number: int) -> None:
        """Advances to the gather `following`, which the caller then starts. This rank may not use the unit."""
        self.starts.note(number, is_backward=number >= self._units)
        self._last = number
        self._since_end.append(number)

    def count_step(self) -> None:
        """Counts an optimizer step. Called before the step."""
        self._sum_up()
        self._steps += 1

    def _sum_up(self) -> None:
        """Adds the gathers noted since the last call to the checksum."""
        noted = self._since_end[self._summed :]
        if noted:
            # Includes the step, to detect a rank with the right layers one step too early.
            self._checksum = zlib.crc32(array("Q", [self._steps, *noted]).tobytes(), self._checksum)
            self._summed = len(self._since_end)

    def _agree(self, number: int, strayed: int | None) -> int:
        """Exchanges which gather or end each rank needs; returns the next one, the same on all ranks.

        Args:
            strayed: the gather after which all ranks expected a gather that this rank did not need.
        """
        count = len(self._labels)
        # Three flags per number: needed now, used since the last end, wrong expectation after it. The maximum is a logical "or".
        said = bytearray(3 * count)
        said[number] = 1
        for each in self._used:
            said[count + each] = 1
        if strayed is not None:
            said[2 * count + strayed] = 1
        said += self.starts.say(is_backward=self._is_of_backward(number))
        # The checksum and its complement. Their maxima over the ranks add up to all ones only if all checksums are equal.
        self._sum_up()
        said += self._checksum.to_bytes(4, "little") + (self._checksum ^ _ALL_BITS).to_bytes(4, "little")
        heard = self.transport.agree_max(torch.frombuffer(said, dtype=torch.uint8), self._labels[number]).tolist()
        if int.from_bytes(heard[-8:-4], "little") + int.from_bytes(heard[-4:], "little") != _ALL_BITS:
            raise RuntimeError(
                "hf_zero: a rank has run a layer by itself while others had stepped already, so layers were gathered from two "
                "steps. Call layers outside of the model's forward on all ranks, or inside `with hf_zero.gathered(model):`."
            )
        self.starts.hear(bytes(heard[3 * count : -8]))
        for each in compress(range(count), heard[2 * count :]):
            self._doubt(each)
        needed = list(compress(range(self._only_starts), heard))
        if heard[self._only_starts]:
            return self._only_starts
        # All ranks have received the same flags and have learned the same order, so all choose the same gather.
        chosen = min(needed, key=self._rank_of)
        if chosen >= self._first_end:
            self._reach_end(chosen, heard[count : 2 * count])
            return chosen
        if chosen not in self._place:
            self._learn_place(chosen, self._before(number, chosen) if len(needed) > 1 else self._last)
        self._learn_next(chosen, is_unanimous=len(needed) == 1)
        return chosen

    def _rank_of(self, number: int) -> tuple[int, int, int]:
        """Sort key of gathers: forward before backward, learned gathers in their order, then other gathers; ends come last."""
        if number >= self._first_end:
            return number, 0, 0
        kind = number // self._units
        return kind, self._place.get(number, len(self._learnt[kind])), self._as_declared(number)

    def _as_declared(self, number: int) -> int:
        return -number if number >= self._units else number

    def _before(self, number: int, chosen: int) -> int:
        """Returns the latest of the gathers after which ranks need `chosen`. Collective."""
        everyone = self.transport.exchange((number, self._own_last), "exchange of a layer's index in the order")
        return max(
            (before for needed, before in everyone if needed == chosen), key=lambda each: self._place.get(each, -1)
        )

    def _learn_place(self, number: int, before: int) -> None:
        """Inserts a new gather into the learned order."""
        kind = number // self._units
        learnt = self._learnt[kind]
        place = self._place[before] + 1 if before in self._place and before // self._units == kind else 0
        while place < len(learnt) and self._as_declared(learnt[place]) < self._as_declared(number):
            place += 1
        learnt.insert(place, number)
        self._place.update((each, index) for index, each in enumerate(learnt))

    def _learn_next(self, chosen: int, *, is_unanimous: bool) -> None:
        last = self._last
        is_backward = chosen >= self._units
        if last >= self._first_end:
            if (last == self.forward_end_with_graph) != is_backward:
                # An evaluation between forward and backward, or a second forward, does not happen in each step.
                return
        elif (last >= self._units) != is_backward or self._place[last] >= self._place[chosen]:
            # Expect only later gathers. Otherwise a cycle could have no agreement.
            return
        before, times = self._unanimous.get(last, (chosen, 0))
        times = (times if before == chosen else 0) + 1 if is_unanimous else 0
        self._unanimous[last] = chosen, times
        if times > self._unsure.get(last, 0):
            self._next[last] = chosen

    def _doubt(self, number: int) -> None:
        """Makes ranks agree on the gather after this one again: at first once, then longer after each wrong expectation."""
        if self._next.pop(number, None) is not None:
            # At first only once: after an evaluation with a different order, training soon prefetches again.
            self._unsure[number] = min(4 * self._unsure[number] or 1, _MOST_UNSURE) if number in self._unsure else 0
            self._unanimous.pop(number, None)

    def _reach_end(self, end: int, used: Sequence[int]) -> None:
        # Do not expect a gather again if no rank has used the unit.
        if not all(map(used.__getitem__, self._since_end)):
            before, was_used = self._end, 1
            for number in self._since_end:
                if was_used and not used[number]:
                    self._doubt(before)
                before, was_used = number, used[number]
        if end == self.backward_end:
            self.starts.end_backward()
        else:
            self.starts.end_forward(end, with_graph=end == self.forward_end_with_graph)
        self._last = self._end = self._own_last = end
        self._since_end.clear()
        self._summed = 0
        self._used.clear()


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
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        self._order = AgreedOrder(
            [unit.buckets[0].label("").holds if unit.buckets else unit.name for unit in self.units],
            transport,
            WeakMethod(self, Unsharding._take_part),
        )
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
        self.peak_bytes = 0

    def count_starts(self, starts: CommonStarts, transport: Transport) -> None:
        """Makes `starts` count the reductions started by all ranks before their wait for a gather.

        Args:
            starts: counts the starts of reductions.
            transport: connects the ranks that reduce.
        """
        order = self._order
        order.starts, starts.agree = starts, WeakMethod(order, AgreedOrder.agree_on_starts)
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
        if is_in_backward():
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
        if is_in_backward():
            return
        if unit in self._running:
            # Also remove units inside this one: after an exception, their own `after_forward` may not have run.
            del self._running[self._running.index(unit) :]
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
        self._builds_graph |= builds_graph
        self._keeps_all |= builds_graph
        self._use(unit, backward=True)

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
                f"hf_zero: optimizer.step() inside `gathered` or `unsharded` (units {', '.join(held[:3])}): the whole copies "
                "would be out of date. Leave the context before the step."
            )
        self._keeps_all = False
        self._order.count_step()
        self._fetch([])
        self._drop_all()
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
        if self._at is unit and unit is not root and unit.state is UnitState.UNSHARDED:
            # The next layer of the same unit.
            return
        self._at, ahead = unit, self._ahead
        if unit in ahead:
            # Also remove earlier prefetched units, which this rank has skipped.
            del ahead[: ahead.index(unit) + 1]
        if self.reshards_after_forward and unit is not root:
            others = self._not_sharded.keys() - {unit, root}
            if others and (others := others.difference(ahead, self._running)):
                # Release before the gather. Otherwise the new layer would need memory in addition to the finished one.
                self._drop(self._in_order(others))
        # Start this unit's gather before the prefetches, because gathers run in order, and this unit is needed first.
        self._reach(unit, backward=backward)
        while len(ahead) < self._prefetch and self._has_room():
            if not self._gather_expected(backward=backward):
                break
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
        number = self._order.number(self._numbers[unit], backward=backward)
        if unit.is_sharded:
            self._order.reach(number)
            self._start_for(unit, backward=backward)
        else:
            self._order.use(number)

    def _gather_expected(self, *, backward: bool) -> bool:
        """Prefetches the next unit, if the next gather is known and of the same pass; returns whether a gather was started."""
        order, count = self._order, len(self.units)
        following = order.following
        if following is None or (following >= count) is not backward:
            return False
        unit = self.units[following % count]
        if not unit.is_sharded:
            return False
        order.note(following)
        self._start_for(unit, backward=backward)
        self._ahead.append(unit)
        return True

    def _start_for(self, unit: Unit, *, backward: bool) -> None:
        if backward:
            self._start(unit, self._wire.backward)
            return
        if torch.is_grad_enabled() is self._backward_follows:
            self._start(unit, self._wire.forward)
            return
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
        if len(self._not_sharded) - (self._root in self._not_sharded) <= self._prefetch:
            # Fast path for the usual case.
            return True
        passing = [unit for unit in self._not_sharded if not (unit.holds or unit is self._root)]
        return len(passing) <= self._prefetch or not self.reshards_after_forward

    def _start(self, unit: Unit, gather: Gather) -> None:
        if unit.is_sharded:
            unit.start_unshard(gather)
            # A kept unit also counts. Its state is SHARDED, but its parameters are whole on this rank.
            gathered = sum(map(_PASSING_BYTES, self._not_sharded.keys() | self._kept))
            if gathered > self.peak_bytes:
                self.peak_bytes = gathered

    def _finish(self, unit: Unit) -> None:
        if unit.state is UnitState.UNSHARDING:
            starts = self._order.starts
            # The dict is empty in a forward.
            if starts.before:
                before = starts.before.get(self._order.number(self._numbers[unit], backward=True))
                # None if the forward has gathered the unit. Then all ranks have already started the gather.
                if before is not None:
                    starts.keep_promise(*before)
            unit.finish_unshard()

    def _drop(self, units: Iterable[Unit]) -> None:
        for unit in () if self._keeps_all else units:
            if not unit.is_sharded and not unit.holds:
                if unit.state is UnitState.UNSHARDING:
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
                unit.let_go()

    def _refuse_unseen_edits(self) -> None:
        refuse_unseen_edits([unit.unseen for unit in self.units if unit.unseen.compared])

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
