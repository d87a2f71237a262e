"""When units are unsharded, prefetched and resharded.

[Note: the end of a unit's backward]
Autograd runs the nodes that are ready in the reverse of the order in which forward made them, and accumulates a parameter's
gradient before any other node. A tensor's hook runs when the node that made the tensor is about to run. So once the hook
on a unit's output runs, every node of the units that came after it in forward has run, and those units can go. No node of
ours is put around a unit's inputs to learn that: it would sum the gradients of an input that several units share (a
decoder's encoder states) in another order than plain autograd does.
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

# ---- The order in which all ranks start gathers, whichever layers each of them runs ----
#
# [Note: layers that some ranks skip]
# A gather needs every rank, and ranks run different layers: LayerDrop draws other numbers on each, a batch has no images, an
# expert gets no tokens. So ranks start the gathers of one agreed order, and a rank that runs a later layer first takes part in
# those before it. The order is learnt: a gather that always follows another is started without a word. Elsewhere, and at the end
# of each forward and backward, ranks tell one another which layer they need, and all gather the earliest of these. No rank leaves
# a forward or a backward while another one needs a layer there.
#
# Reductions must not stand in the way; see [Note: waits for reductions].

_ALL_BITS = 0xFFFFFFFF

_MOST_UNSURE = 64
"""Passes in which all ranks must go the same way before they do so without a word, after they have often gone other ways."""


class AgreedOrder:
    """The order in which all ranks start gathers. See [Note: layers that some ranks skip].

    A gather is a number: the unit's in a forward; the unit's behind all of these in a backward. The last numbers are ends: of a
    forward without a backward, of one with a backward, and of a backward. One more is no gather: a rank asks for starts alone.

    Args:
        names: of the units, in their order.
        transport: between all ranks that gather.
        take_part: takes part in a gather that other ranks may need.

    Attributes:
        transport: the same.
        starts: counts the reductions that all ranks have started.
    """

    def __init__(self, names: Sequence[str], transport: Transport, take_part: Callable[[int], None]):
        units = self._units = len(names)
        # With the layer's name, for errors that tell where a rank waits.
        needed = ["" if number >= 2 * units else names[number % units] for number in range(2 * units + 4)]
        self._labels = [Label(kind="agreement on the next layer", subject="this pass", holds=name) for name in needed]
        self.transport = transport
        self._take_part = take_part
        self._first_end = 2 * units
        self.forward_end, self.forward_end_with_graph, self.backward_end = range(self._first_end, self._first_end + 3)
        self._only_starts = self._first_end + 3
        self._steps = 0
        self.starts = CommonStarts(0)
        # Alike on all ranks: these change in agreements, and as gathers are started.
        self._last = self._end = self.backward_end
        self._since_end: list[int] = []
        # How many of these the checksum has.
        self._summed = 0
        self._checksum = 0
        self._next: dict[int, int] = {}
        self._unanimous: dict[int, tuple[int, int]] = {}
        self._unsure: dict[int, int] = {}
        self._learnt: tuple[list[int], list[int]] = ([], [])
        self._place: dict[int, int] = {}
        # Of this rank.
        self._used: set[int] = set()
        self._own_last = self._last

    def number(self, unit: int, *, backward: bool) -> int:
        """Returns the number of a unit's gather."""
        return unit + self._units if backward else unit

    @property
    def following(self) -> int | None:
        """The gather that comes next on all ranks; None if that is not known."""
        following = self._next.get(self._last)
        # On a way that no backward has gone before, ranks agree on each layer; see [Note: waits for reductions].
        return None if following is not None and following >= self._units and self.starts.is_new_way else following

    def expected(self, count: int) -> list[int]:
        """Returns up to `count` gathers that come next on all ranks."""
        found: list[int] = []
        number: int | None = self._last
        while len(found) < count and (number := self._next.get(cast(int, number))) is not None:
            found.append(number)
        return found

    def use(self, number: int) -> None:
        """Notes that this rank computes with a unit, which this pass may have gathered before."""
        if number in self._since_end:
            self._used.add(number)
            self._own_last = number

    def reach(self, number: int) -> None:
        """Goes on to a gather, which the caller starts, or to an end. Takes part in all gathers before that."""
        if self.following == number:
            # Nearly always: as below, for a gather that is expected.
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
                # The rank goes on with the expected gather, as the others do. The next agreement ends the expectation for all.
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
        """Goes on to the gather that is `following`. The caller starts it, and may not compute with it."""
        self.starts.note(number, is_backward=number >= self._units)
        self._last = number
        self._since_end.append(number)

    def count_step(self) -> None:
        """Notes that an optimizer step begins."""
        self._sum_up()
        self._steps += 1

    def _sum_up(self) -> None:
        """Adds the gathers that were noted since the last call to the checksum."""
        noted = self._since_end[self._summed :]
        if noted:
            # With the step: a rank that gathers the right layers a step too early is found, too.
            self._checksum = zlib.crc32(array("Q", [self._steps, *noted]).tobytes(), self._checksum)
            self._summed = len(self._since_end)

    def _agree(self, number: int, strayed: int | None) -> int:
        """Tells the other ranks which gather or end this rank needs, and returns the one that is next on all.

        Args:
            strayed: the gather behind which all expected another one than this rank needed.
        """
        count = len(self._labels)
        # Three flags a number: needed now, used since the last end, strayed from behind it. The maximum over ranks is an "or".
        said = bytearray(3 * count)
        said[number] = 1
        for each in self._used:
            said[count + each] = 1
        if strayed is not None:
            said[2 * count + strayed] = 1
        said += self.starts.say(is_backward=self._is_of_backward(number))
        # With its complement: the largest of both add up to more, byte by byte, unless all ranks have the same.
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
        # All ranks have heard the same and have learnt the same order: each chooses the same gather.
        chosen = min(needed, key=self._rank_of)
        if chosen >= self._first_end:
            self._reach_end(chosen, heard[count : 2 * count])
            return chosen
        if chosen not in self._place:
            self._learn_place(chosen, self._before(number, chosen) if len(needed) > 1 else self._last)
        self._learn_next(chosen, is_unanimous=len(needed) == 1)
        return chosen

    def _rank_of(self, number: int) -> tuple[int, int, int]:
        """Sorts gathers: forward before backward, in the order learnt, and others behind; then the ends."""
        if number >= self._first_end:
            return number, 0, 0
        kind = number // self._units
        return kind, self._place.get(number, len(self._learnt[kind])), self._as_declared(number)

    def _as_declared(self, number: int) -> int:
        return -number if number >= self._units else number

    def _before(self, number: int, chosen: int) -> int:
        """Returns the latest of the gathers behind which ranks need `chosen`. Collective."""
        everyone = self.transport.exchange((number, self._own_last), "exchange of a layer's index in the order")
        return max(
            (before for needed, before in everyone if needed == chosen), key=lambda each: self._place.get(each, -1)
        )

    def _learn_place(self, number: int, before: int) -> None:
        """Puts a gather that nobody has needed before into the order."""
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
                # An evaluation between forward and backward, or a second forward, is not what comes each time.
                return
        elif (last >= self._units) != is_backward or self._place[last] >= self._place[chosen]:
            # Each way round in circles has an agreement.
            return
        before, times = self._unanimous.get(last, (chosen, 0))
        times = (times if before == chosen else 0) + 1 if is_unanimous else 0
        self._unanimous[last] = chosen, times
        if times > self._unsure.get(last, 0):
            self._next[last] = chosen

    def _doubt(self, number: int) -> None:
        """Has ranks agree behind this gather, or end: once, and longer each time that they have gone other ways."""
        if self._next.pop(number, None) is not None:
            # Once an evaluation has gone another way, training soon gathers ahead again.
            self._unsure[number] = min(4 * self._unsure[number] or 1, _MOST_UNSURE) if number in self._unsure else 0
            self._unanimous.pop(number, None)

    def _reach_end(self, end: int, used: Sequence[int]) -> None:
        # What no rank has used is not gathered again without a word.
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
    """Gathers each unit for its forward and its backward, the next ones ahead of time, and drops those done with.

    Which unit is gathered when depends on forwards, and on outputs that announce a backward. What a rank reads besides, which
    nothing announces in the backward, it keeps in memory until that has ended, and takes part in the unit's gathers as if it had
    been dropped: so a read by one rank alone leaves no other rank waiting later.

    Args:
        root: parameters that no layer has, whole from the model's forward to the end of its backward.
        layers: the other units.
        wire: how they are gathered.
        prefetch: units gathered ahead of the one in use.
        reshard_after_forward: False keeps what has been gathered until the optimizer's step.
        transport: between all ranks that gather.

    Attributes:
        reshards_after_forward: the same.
        peak_bytes: the most that gathered parameters have taken beyond the shards.
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
        # The unit in use, and those that were gathered before their use.
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
        """Has the reductions counted that all ranks have started before they wait for a gather.

        Args:
            transport: of the ranks that reduce.
        """
        order = self._order
        order.starts, starts.agree = starts, WeakMethod(order, AgreedOrder.agree_on_starts)
        if transport is not order.transport:
            # Ranks with other parts of a split model may have other buckets, and all ranks send as many bytes.
            counts = order.transport.exchange(starts.count, "exchange of the number of buckets")
            starts.count = starts.sure = max(counts)

    @property
    def in_pass(self) -> bool:
        """Whether some unit's forward is running, or a backward."""
        return bool(self._running) or is_in_backward()

    # ---- what the hooks call ----

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
                # No step may ever come.
                self._refuse_unseen_edits()
        self._running.append(unit)
        self._use(unit, backward=False)

    def after_forward(self, unit: Unit, outputs: object, *, has_returned: bool = False) -> None:
        """Drops `unit` unless its backward comes next, and has its outputs announce that backward.

        Args:
            has_returned: a layer's forward has ended without an exception. If none of its outputs is a tensor, nothing can
                announce the backward, and the unit is kept until then.
        """
        if torch.is_grad_enabled():
            tensors = tensors_in(outputs)
            self._watch(unit, tensors)
            if has_returned and not tensors:
                self._kept.add(unit)
        if is_in_backward():
            return
        if unit in self._running:
            # An exception in a forward leaves out the units inside it.
            del self._running[self._running.index(unit) :]
        if unit is self._root and outputs is not None and not all(each.holds for each in self.units):
            # Not behind an exception, which other ranks may not have: they would wait for this rank's gathers all the same.
            # Nor inside `unsharded`, where a rank may run the model alone.
            order = self._order
            order.reach(order.forward_end_with_graph if self._backward_follows else order.forward_end)
        if not self.reshards_after_forward:
            return
        # Of the whole pass: reentrant checkpointing runs a layer without gradients, and its backward comes nevertheless.
        backward_follows = self._backward_follows
        # Backward begins with the last layer, which stays. Those before it would lie beside the logits, where memory peaks, and
        # are gathered again while the last one's backward runs.
        may_be_last = backward_follows and not self._ahead and self._order.following is None
        if unit is self._root:
            if not backward_follows:
                self._drop_all()
        elif len(unit.modules) == 1 and not may_be_last:
            # What stays although it was not the last goes when another comes, as units of several layers do.
            self._drop([unit])

    @hidden_from_modes
    def before_read(self, unit: Unit) -> None:
        """Makes `unit` whole for code outside its own forward: a submodule called by itself, a weight read by a parent.

        It stays in memory until the end of the backward, which nothing announces for such a read.
        """
        self._reach(unit, backward=is_in_backward())
        self._finish(unit)
        if unit is not self._root:
            self._kept.add(unit)

    @hidden_from_modes
    def before_saved_read(self, unit: Unit) -> None:
        """Makes `unit` whole for a backward node outside of any layer, until the next layer's backward."""
        self._reach(unit, backward=True)
        self._finish(unit)

    def before_backward(self, unit: Unit, *, builds_graph: bool = False) -> None:
        """Makes `unit` whole for its backward, and drops the layers whose backward has ended.

        Args:
            builds_graph: this backward is itself differentiated (create_graph). The nodes of the second backward read the
                parameters and nothing announces those, so all stays whole until a backward without it has ended.
        """
        if not self._is_backward_open:
            self._is_backward_open = True
            self._builds_graph = False
            self._at = None
        self._builds_graph |= builds_graph
        self._keeps_all |= builds_graph
        self._use(unit, backward=True)

    def end_gathers(self) -> None:
        """This rank's backward gathers nothing more; returns when that is so on all ranks. Before reductions are waited for."""
        if is_transformed():
            return
        self._order.reach(self._order.backward_end)

    def end_backward(self) -> None:
        """A backward pass is over."""
        if self._is_backward_open:
            self._is_backward_open = False
            self._keeps_all = self._builds_graph
        self._fetch([])
        if self.reshards_after_forward:
            self._drop_all()

    def recover(self) -> None:
        """Forgets a forward or backward that an exception has ended. Called outside of both."""
        self._running.clear()
        if self._is_backward_open:
            self.end_backward()

    # ---- what the engine calls ----

    @hidden_from_modes
    def unshard(self, units: Iterable[Unit]) -> None:
        """Makes units whole and exact, all gathers at once."""
        units = list(units)
        if not all(unit.holds for unit in units):
            # One rank alone may read what all hold.
            self.catch_up()
        for unit in units:
            if not unit.is_sharded and unit.gather is not self._wire.exact:
                # Last: everything that can run beside the wait has been started.
                self._finish(unit)
                unit.reshard(keeps=unit in self._kept)
            self._start(unit, self._wire.exact)
        for unit in units:
            self._finish(unit)
            unit.unseen.leave_to_script()

    def catch_up(self) -> None:
        """Takes part in gathers that other ranks have started ahead or still need, before collectives outside of a pass."""
        self._order.reach(self._order.forward_end)

    def reshard_all(self) -> None:
        """Drops all gathered parameters, which a step is about to make stale."""
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
        # Copies inside a node are of the values before the step.
        self._wire.forward.forget()
        for unit in self.units if self._fetches else ():
            # A fetch under way has the values before the step, and reads memory that the step writes.
            unit.forget_fetch()
        self._refuse_unseen_edits()

    def forget_copies(self, unit: Unit) -> None:
        """Drops copies of a sharded unit's parameters outside of the shard, which is about to change."""
        self._wire.forward.forget()
        unit.forget_fetch()

    @hidden_from_modes
    def release(self, units: Iterable[Unit]) -> None:
        """Drops units that were made whole for a look. Units with a running forward return to its form."""
        units = list(units)
        self._drop([unit for unit in units if unit not in self._running])
        for unit in units:
            if unit in self._running and not unit.holds and unit.gather is not self._wire.forward:
                # A forward is running on these parameters, and goes on with the values that it has begun with.
                # Exact ones may be of another dtype than the forward, or have digits that it does not.
                self._finish(unit)
                unit.reshard()
                self._start(unit, self._wire.forward)
                self._finish(unit)

    # ---- how ----

    def _use(self, unit: Unit, *, backward: bool) -> None:
        root = self._root
        if self._at is unit and unit is not root and unit.state is UnitState.UNSHARDED:
            # The next layer of the same unit.
            return
        self._at, ahead = unit, self._ahead
        if unit in ahead:
            # Those before it were passed over.
            del ahead[: ahead.index(unit) + 1]
        if self.reshards_after_forward and unit is not root:
            others = self._not_sharded.keys() - {unit, root}
            if others and (others := others.difference(ahead, self._running)):
                # Release before gather: else the new layer's memory comes on top of the one that is done.
                self._drop(self._in_order(others))
        # This unit's gather first, the prefetches behind: the link serves them in order, and this one is waited for.
        self._reach(unit, backward=backward)
        while len(ahead) < self._prefetch and self._has_room():
            if not self._gather_expected(backward=backward):
                break
        if self._fetches:
            # What a gather takes its shard from may itself be slow: it is read while the gathers before it run.
            following = self._order.expected(self._prefetch + 1 - len(ahead))
            self._fetch([self.units[number % len(self.units)] for number in following])
        self._finish(unit)

    def _in_order(self, units: Iterable[Unit]) -> list[Unit]:
        """Sorts units as the schedule has them, which is the same order on all ranks."""
        return sorted(units, key=self._numbers.__getitem__)

    def _reach(self, unit: Unit, *, backward: bool) -> None:
        """Starts a unit's gather, in the order of all ranks, unless the unit is whole."""
        number = self._order.number(self._numbers[unit], backward=backward)
        if unit.is_sharded:
            self._order.reach(number)
            self._start_for(unit, backward=backward)
        else:
            self._order.use(number)

    def _gather_expected(self, *, backward: bool) -> bool:
        """Starts the gather that comes next on all ranks, ahead of its use; returns whether there is one."""
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
        # Reentrant checkpointing runs a layer without gradients, which a rank that skips the layer does not: both must keep the
        # part that `comm.secondary_shard` asks for, or none.
        with torch.set_grad_enabled(self._backward_follows):
            self._start(unit, self._wire.forward)

    def _take_part(self, number: int) -> None:
        """Takes part in a gather that other ranks may need, and leaves the unit as it is on this rank."""
        unit = self.units[number % len(self.units)]
        if unit.holds:
            # Whole on all ranks, which `gathered` has brought together.
            return
        is_in_use = not unit.is_sharded
        if is_in_use:
            self._finish(unit)
            # Kept: this rank's code may hold the parameters just now, and finds the same values there behind the gather.
            unit.reshard(keeps=True)
        self._start_for(unit, backward=number >= len(self.units))
        self._finish(unit)
        if not is_in_use and self.reshards_after_forward:
            unit.reshard(keeps=unit in self._kept)

    def _fetch(self, wanted: list[Unit]) -> None:
        """Begins to fetch the shards of units that are wanted next, and gives up those that no longer are."""
        for unit in self._fetching:
            if unit.is_sharded and unit not in wanted:
                unit.forget_fetch()
        self._fetching = [unit for unit in wanted if unit.is_sharded]
        for unit in self._fetching:
            unit.start_fetch()

    def _has_room(self) -> bool:
        """Whether one more layer may be gathered ahead of its use."""
        if len(self._not_sharded) - (self._root in self._not_sharded) <= self._prefetch:
            # Nearly always, without a look at each.
            return True
        passing = [unit for unit in self._not_sharded if not (unit.holds or unit is self._root)]
        return len(passing) <= self._prefetch or not self.reshards_after_forward

    def _start(self, unit: Unit, gather: Gather) -> None:
        if unit.is_sharded:
            unit.start_unshard(gather)
            # A kept unit counts, although its state is sharded: this rank has its parameters whole.
            gathered = sum(map(_PASSING_BYTES, self._not_sharded.keys() | self._kept))
            if gathered > self.peak_bytes:
                self.peak_bytes = gathered

    def _finish(self, unit: Unit) -> None:
        if unit.state is UnitState.UNSHARDING:
            starts = self._order.starts
            # In a forward, the dict is empty.
            if starts.before:
                before = starts.before.get(self._order.number(self._numbers[unit], backward=True))
                # None if the forward has gathered the unit: all ranks have started that gather.
                if before is not None:
                    starts.keep_promise(*before)
            unit.finish_unshard()

    def _drop(self, units: Iterable[Unit]) -> None:
        for unit in () if self._keeps_all else units:
            if not unit.is_sharded and not unit.holds:
                if unit.state is UnitState.UNSHARDING:
                    # The gather under way writes to the memory that the reshard gives back.
                    self._finish(unit)
                unit.reshard(keeps=unit in self._kept)

    def _drop_all(self) -> None:
        """Drops also kept units, whose backward will not come."""
        if self._keeps_all:
            return
        # Emptied first: `_drop` would keep these once more.
        kept, self._kept = self._kept, set()
        self._drop(self._in_order(self._not_sharded))
        for unit in kept:
            if unit.is_sharded:
                unit.let_go()

    def _refuse_unseen_edits(self) -> None:
        refuse_unseen_edits([unit.unseen for unit in self.units if unit.unseen.compared])

    def _watch(self, unit: Unit, outputs: Iterable[torch.Tensor]) -> None:
        # A tensor handed through (T5's position bias) is made elsewhere: its hook would run at another time. One that the
        # layer has written into is made here.
        versions = self._versions.pop(unit, {})

        def announce(_gradient: torch.Tensor) -> None:
            if dispatch_modes():
                with without_modes():
                    return announce(_gradient)
            self.before_backward(unit, builds_graph=torch.is_grad_enabled())

        # An in-place operation on a view takes the view's own node out of the graph, and its base's stays.
        for tensor in _with_bases(outputs):
            if versions.get(id(tensor)) != tensor._version:
                tensor.register_hook(announce)


def _with_bases(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that take gradients, and the bases of views."""
    found = []
    for tensor in tensors:
        if tensor.requires_grad:
            found.append(tensor)
            base = tensor._base
            if base is not None and base.requires_grad:
                found.append(base)
    return found
