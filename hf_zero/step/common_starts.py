"""Stage 3: reductions started by all ranks, for which a rank may wait in the middle of its backward."""

from ..comm.transport import Transport
from .step_context import StepContext

# [Note: waits for reductions]
# In a backward of stage 3, a rank waits for the gather of its next layer, and for its oldest reduction when it needs another
# buffer. Both need all ranks. Suppose that rank A waits for a reduction that rank B has not started, and B waits for A in a
# gather. Then both hang. This can happen if ranks use different parameters of one layer. So a rank waits for a reduction only if
# every rank starts this reduction before waiting for a gather that this rank has not reached. If that is not certain, the rank
# allocates another buffer instead.
#
# A *way* is the history of gathers since the last backward, which is the same on all ranks. After the first backward of a way,
# ranks exchange the number of reductions that each of them had started before each gather. The minimum is a promise: from then
# on, every rank on this way starts that many reductions before waiting for the gather, with zeros for missing gradients. On a
# way without promises, ranks agree on each layer, and send the number of started reductions in the agreement. A rank that needs
# a buffer joins this agreement early, and asks the other ranks to start the reduction that the buffer waits for.
#
# A rank may run another forward while others are in their backward. Before the first gather of a backward, no rank knows this, so
# no promise holds there. After that gather, a rank in a forward keeps promises as well, and adds its own gradients in a second
# reduction.

_WANTED = 2
"""Sent for the last reduction that a rank wants to wait for. For the other reductions: 0 if started, 1 if not."""
_MOST_WAYS = 1 << 16
"""All promises are dropped when their number exceeds this limit. A model with a new way in each step adds one per layer."""


class CommonStarts:
    """Counts the reductions started by all ranks. See [Note: waits for reductions].

    Args:
        count: number of trained buckets. 0 if nothing is reduced.
        step: the training step; None if nothing is reduced.

    Attributes:
        sure: this rank may wait for the first `sure` buckets. All buckets, if no layers are gathered in a backward.
        started: number of buckets that this rank has started in this pass.
        has_steps: a reduction may have several steps. Ranks also wait for the last step.
        before: maps each gather in this backward to the way and `sure` before it.
    """

    def __init__(self, count: int, step: StepContext | None = None):
        self.count = count
        self._step = step
        self.sure = count
        self.started = 0
        self.has_steps = False
        self.before: dict[int, tuple[int, int]] = {}
        self._own_count = count
        self._wanted = 0
        self._promised: dict[int, int] = {}
        # The way since the last backward, with and without the running forward.
        self._way = self._way_before = 0
        self._has_ended = True
        self._ways: list[int] = []
        self._last_ways: list[int] = []
        self._started: dict[int, int] = {}
        # Ways of passes without reductions.
        self._silent: set[int] = set()

    @property
    def is_new_way(self) -> bool:
        """Whether no backward on this way has ended yet. The same on all ranks."""
        return self.count > 0 and self._way not in self._promised and self._way not in self._silent

    def note(self, number: int, *, is_backward: bool) -> None:
        """Adds a gather to the way of all ranks."""
        if self._has_ended:
            self._begin()
        if not is_backward:
            # No promise is made for a way that ends in a forward.
            self._way = hash((self._way, number))
            return
        way = self._way
        self.before[number] = way, self.sure
        self._ways.append(way)
        # Equal on all ranks, because hashes of integers do not depend on the process.
        self._way = way = hash((way, number))
        promised = self._promised.get(way, 0)
        if promised > self.sure:
            self.sure = promised

    def end_forward(self, number: int, *, with_graph: bool) -> None:
        """Adds the end of a forward to the way. Drops a forward without a graph from the way, since no backward follows."""
        if self._has_ended:
            self._begin()
        if with_graph:
            self._way_before = hash((self._way, number))
        self._way = self._way_before
        if not self._ways:
            self.sure = 0

    def end_backward(self) -> None:
        """Called after the last gather of a backward. No rank waits for a gather, so this rank may wait for all reductions."""
        self._last_ways = [*self._ways, self._way]
        self._ways.clear()
        self.before.clear()
        self._way = self._way_before = 0
        self._has_ended, self.sure = True, self.count

    def _begin(self) -> None:
        """Begins a way after the end of a backward."""
        self._has_ended, self.sure = False, 0
        self._silent.update(self._last_ways)
        self._last_ways.clear()
        self._started.clear()

    def keep_promise(self, way: int, sure: int) -> None:
        """Called in a backward before this rank waits for a gather.

        Args:
            way: the way before the gather, from `before`.
            sure: `sure` before the gather, from `before`.
        """
        if self._step is not None and (self.started < sure or self.has_steps):
            self._step.start_up_to(sure)
        if way not in self._promised:
            self._started.setdefault(way, self.started)

    def ask(self, number: int) -> bool:
        """Asks all ranks to start the first `number` reductions, as this rank has; returns whether all ranks have agreed."""
        if self._step is not None:
            self._wanted = number
            self._step.agree_on_starts()
            self._wanted = 0
        return number <= self.sure

    def say(self, *, is_backward: bool) -> bytes:
        """Returns this rank's bytes of an agreement. Pass the elementwise maximum over all ranks to `hear`."""
        started = 0
        # In a forward, reductions have only begun if others are in a backward, and have gathered a layer or asked for a start.
        if is_backward or self._ways or (self.sure and not self._has_ended):
            self.keep_promise(self._way, self.sure)
            # `count` may be larger than this rank's number: ranks with a different part of a split model may have more buckets.
            started = self.started if self.started < self._own_count else self.count
        said = bytearray(started) + b"\1" * (self.count - started)
        if self._wanted:
            said[self._wanted - 1] = _WANTED
        return bytes(said)

    def hear(self, said: bytes) -> None:
        """Updates `sure` from the elementwise maximum over all ranks' bytes of an agreement."""
        common = said.rfind(_WANTED) + 1 or said.find(1)
        self.sure = max(self.sure, common if common >= 0 else self.count)

    def learn(self, transport: Transport) -> None:
        """Ends a reducing pass. On a new way, the ranks exchange their started reductions and make promises. Collective then."""
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
