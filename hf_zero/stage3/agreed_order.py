"""The order in which all ranks start gathers, whichever layers each of them runs."""

import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from typing import cast

import torch

from ..comm.transport import Transport
from ..comm.waits import Label
from ..step.common_starts import CommonStarts

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
        self._learned: tuple[list[int], list[int]] = ([], [])
        self._position: dict[int, int] = {}
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
        said = bytearray(count) + bytes(map(self._used.__contains__, range(count))) + bytes(count)
        said[number] = 1
        if strayed is not None:
            said[2 * count + strayed] = 1
        said += self.starts.say(is_backward=self._is_of_backward(number))
        # The checksum and its complement. Their maxima over the ranks add up to all ones only if all checksums are equal.
        self._sum_up()
        said += self._checksum.to_bytes(4, "little") + (self._checksum ^ _ALL_BITS).to_bytes(4, "little")
        heard = self.transport.agree_max(torch.frombuffer(said, dtype=torch.uint8), self._labels[number]).tolist()
        if int.from_bytes(heard[-8:-4], "little") + int.from_bytes(heard[-4:], "little") != _ALL_BITS:
            raise RuntimeError(
                "hf_zero: one rank ran a layer after other ranks had stepped, so layers were gathered from two steps. "
                "Call layers outside of the model's forward on all ranks, or inside `with hf_zero.gathered(model):`."
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
        if chosen not in self._position:
            self._learn_position(chosen, self._before(number, chosen) if len(needed) > 1 else self._last)
        self._learn_next(chosen, is_unanimous=len(needed) == 1)
        return chosen

    def _rank_of(self, number: int) -> tuple[int, int, int]:
        """Sort key of gathers: forward before backward, learned gathers in their order, then other gathers; ends come last."""
        if number >= self._first_end:
            return number, 0, 0
        kind = number // self._units
        return kind, self._position.get(number, len(self._learned[kind])), self._as_declared(number)

    def _as_declared(self, number: int) -> int:
        return -number if number >= self._units else number

    def _before(self, number: int, chosen: int) -> int:
        """Returns the latest of the gathers after which ranks need `chosen`. Collective."""
        everyone = self.transport.exchange((number, self._own_last), "exchange of a layer's index in the order")
        return max(
            (before for needed, before in everyone if needed == chosen), key=lambda each: self._position.get(each, -1)
        )

    def _learn_position(self, number: int, before: int) -> None:
        """Inserts a new gather into the learned order."""
        kind = number // self._units
        learned = self._learned[kind]
        position = self._position[before] + 1 if before in self._position and before // self._units == kind else 0
        while position < len(learned) and self._as_declared(learned[position]) < self._as_declared(number):
            position += 1
        learned.insert(position, number)
        self._position.update((each, index) for index, each in enumerate(learned))

    def _learn_next(self, chosen: int, *, is_unanimous: bool) -> None:
        last = self._last
        is_backward = chosen >= self._units
        if last >= self._first_end:
            if (last == self.forward_end_with_graph) != is_backward:
                # An evaluation between forward and backward, or a second forward, does not happen in each step.
                return
        elif (last >= self._units) != is_backward or self._position[last] >= self._position[chosen]:
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
            # Agree only once at first, so training soon prefetches again after an evaluation with a different order.
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
