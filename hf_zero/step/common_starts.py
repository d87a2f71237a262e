"""Stage 3: the reductions that all ranks have started, which a rank may wait for in the middle of its backward."""

from collections.abc import Callable

from ..comm.transport import Transport

# [Note: waits for reductions]
# In a backward of stage 3, a rank waits for the gather of its next layer, and for its oldest reduction when it needs another
# buffer. Both need all ranks. If one rank waits for a reduction that a second rank has not started, and the second rank waits for
# the first one in a gather, both hang. Ranks that use different parameters of one layer are enough for this. So a rank waits only
# for reductions that each rank starts before it waits for any gather that this rank has not reached. Otherwise the buffers grow.
#
# A *way* is the history of gathers since the last backward, which is the same on all ranks. After the first backward of a way,
# ranks exchange how many reductions each of them had started before each gather. The minimum is a promise: from then on, every
# rank on the same way starts that many reductions before it waits, with zeros for missing gradients. On a way without promises,
# ranks agree on each layer, and each rank sends the number of reductions that it has started. A rank that needs a buffer joins
# this agreement early, and asks the other ranks to start the reduction that it has to wait for.

_WANTED = 2
"""Sent for the last reduction that a rank wants to wait for; for other reductions, 0 if it has started them and 1 if not."""
_MOST_WAYS = 1 << 16
"""Promises are forgotten when there are more: a model that goes another way in each step adds one for each of its layers."""


class CommonStarts:
    """Counts the reductions that all ranks have started. See [Note: waits for reductions].

    Args:
        count: number of trained buckets. 0 if nothing is reduced.

    Attributes:
        sure: this rank may wait for the first `sure` buckets. All, if no layers are gathered in a backward.
        started: buckets of this pass that this rank has started.
        has_steps: a reduction may take several steps, the last of which ranks wait for, too.
        before: of gathers in this backward, the way and `sure` before each of them.
        start_up_to: starts the first buckets that have not started, up to a number and up to their last steps.
        agree: takes part in the next agreement, if that comes before any gather.
    """

    def __init__(self, count: int):
        self.count = count
        self.sure = count
        self.started = 0
        self.has_steps = False
        self.before: dict[int, tuple[int, int]] = {}
        self.start_up_to: Callable[[int], None] = lambda number: None
        self._own_count = count
        self.agree: Callable[[], None] | None = None
        self._wanted = 0
        self._promised: dict[int, int] = {}
        # The way since the last backward, and without the forward that is running.
        self._way = self._way_before = 0
        self._has_ended = True
        self._ways: list[int] = []
        self._last_ways: list[int] = []
        self._started: dict[int, int] = {}
        # Ways of passes that have not reduced.
        self._silent: set[int] = set()

    @property
    def is_new_way(self) -> bool:
        """Whether no backward has gone this way yet. The same on all ranks."""
        return self.count > 0 and self._way not in self._promised and self._way not in self._silent

    def note(self, number: int, *, is_backward: bool) -> None:
        """Adds a gather to the way of all ranks."""
        if self._has_ended:
            self._begin()
        way = self._way
        if is_backward:
            self.before[number] = way, self.sure
            self._ways.append(way)
        # As in `_go`.
        self._way = way = hash((way, number))
        promised = self._promised.get(way, 0)
        if promised > self.sure:
            self.sure = promised

    def end_forward(self, number: int, *, with_graph: bool) -> None:
        """Adds the end of a forward to the way. No backward follows a forward without a graph, so the way leaves it out."""
        if self._has_ended:
            self._begin()
        if with_graph:
            self._go(number)
            self._way_before = self._way
        else:
            self._way = self._way_before
            self.sure = self._promised.get(self._way, 0)

    def end_backward(self) -> None:
        """From here to the end of the pass, no rank waits for a gather, so this rank may wait for all reductions."""
        self._last_ways = [*self._ways, self._way]
        self._ways.clear()
        self.before.clear()
        self._way = self._way_before = 0
        self._has_ended, self.sure = True, self.count

    def _begin(self) -> None:
        """Begins a way after the end of a backward."""
        self._has_ended, self.sure = False, self._promised.get(self._way, 0)
        self._silent.update(self._last_ways)
        self._last_ways.clear()
        self._started.clear()

    def keep_promise(self, way: int, sure: int) -> None:
        """Called in a backward before this rank waits for a gather.

        Args:
            way, sure: those before the gather, from `before`.
        """
        if self.started < sure or self.has_steps:
            self.start_up_to(sure)
        if way not in self._promised:
            self._started.setdefault(way, self.started)

    def ask(self, number: int) -> bool:
        """Asks all ranks to promise the first `number` reductions, which this rank has started. Returns whether they have."""
        if self.agree is not None:
            self._wanted = number
            self.agree()
            self._wanted = 0
        return number <= self.sure

    def say(self, *, is_backward: bool) -> bytes:
        """Returns what this rank sends in an agreement; the maximum of all ranks goes to `hear`."""
        started = 0
        # Not in a forward: the reductions of its backward have not begun.
        if is_backward:
            self.keep_promise(self._way, self.sure)
            # Ranks with another part of a split model may have more buckets.
            started = self.started if self.started < self._own_count else self.count
        said = bytearray(started) + b"\1" * (self.count - started)
        if self._wanted:
            said[self._wanted - 1] = _WANTED
        return bytes(said)

    def hear(self, said: bytes) -> None:
        """Takes what all ranks have sent in an agreement."""
        common = said.rfind(_WANTED) + 1 or said.find(1)
        self.sure = max(self.sure, common if common >= 0 else self.count)

    def learn(self, transport: Transport) -> None:
        """Ends a pass that has reduced, on all ranks: promises what they have started on a way that is new."""
        ways, self._last_ways = self._last_ways, []
        self._silent.difference_update(ways)
        if any(way not in self._promised for way in ways):
            started, counts = 0, []
            for way in ways:
                started = max(started, self._started.get(way, 0))
                counts.append(started)
            everyone = transport.exchange(counts, "exchange of the reductions that ranks start before each layer")
            if len(self._promised) > _MOST_WAYS:
                self._promised.clear()
            self._promised.update(zip(ways, map(min, *everyone)))

    def _go(self, number: int) -> None:
        # The same on all ranks: hashes of numbers do not depend on the process.
        way = self._way = hash((self._way, number))
        promised = self._promised.get(way, 0)
        if promised > self.sure:
            self.sure = promised
