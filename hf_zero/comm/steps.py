"""Collectives of several steps, each of which needs the result of the one before.

[Note: the order of steps]
A step can start when the one before has ended, and nobody watches for that moment. It is looked at when the next collective
begins, and when a result is needed. No collective leaves its first step before all older ones are at their last: so on every
rank all further steps start in one order, whichever result it needs first, and all but the last ones run on behind backward.

On an accelerator a later step waits for the one before in a queue beside the one that computes. Waited for in the computing
queue, the first step of one bucket would hold up the backward of the next.
"""

from collections.abc import Callable

from ..device import SideQueue
from .transport import Handle

Start = Callable[[], Handle]


class _Steps:
    """One collective: the step that is running, and those that follow.

    Args:
        queue: in which later steps wait for the one before; None is the queue that computes.
    """

    def __init__(self, first: Start, later: tuple[Start, ...], queue: SideQueue | None):
        # A wait in a side queue orders no other queue. Memory that the first step works on must not be given out again to the
        # computing queue before that one waits too, so `finish` lets the memory go.
        self._first: Start | None = first
        self._running = first()
        self._later = list(later)
        self._queue = queue

    @property
    def is_at_its_last(self) -> bool:
        return not self._later

    def advance(self) -> None:
        """Waits for the running step and starts the next."""
        if self._queue is None:
            self._running.finish()
            self._running = self._later.pop(0)()
            return
        with self._queue.aside():
            self._running.finish(is_exposed=False)
            self._running = self._later.pop(0)()

    def finish(self) -> None:
        self._running.finish()
        self._first = None


class StepsInOrder:
    """Starts collectives of several steps so that every rank starts all steps in the same order."""

    def __init__(self):
        self._under_way: list[_Steps] = []

    def begin(self, first: Start, *later: Start, queue: SideQueue | None = None) -> Callable[[], None]:
        """Takes those under way one step further, as far as their order lets them, and starts another.

        Args:
            queue: in which each of `later` waits for the step before; None is the queue that computes.

        Returns:
            What waits for its end.
        """
        for steps in self._under_way:
            steps.advance()
            if not steps.is_at_its_last:
                break
        self._forget_those_at_their_last()
        steps = _Steps(first, later, queue)
        if later:
            self._under_way.append(steps)
        return lambda: self._finish(steps)

    def _finish(self, steps: _Steps) -> None:
        if steps in self._under_way:
            for older in self._under_way[: self._under_way.index(steps) + 1]:
                while not older.is_at_its_last:
                    older.advance()
            self._forget_those_at_their_last()
        steps.finish()

    def _forget_those_at_their_last(self) -> None:
        self._under_way = [steps for steps in self._under_way if not steps.is_at_its_last]
