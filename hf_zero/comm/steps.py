"""Collectives of several steps, each of which needs the result of the one before.

[Note: the order of steps]
A step can start when the one before has ended, and nobody watches for that moment. It is looked at when the next collective
begins, and when a result is needed. No collective leaves its first step before all older ones are at their last: so on every
rank all further steps start in one order, whichever result it needs first, and all but the last ones run on behind backward.
"""

from collections.abc import Callable

from .transport import Handle

Start = Callable[[], Handle]


class _Steps:
    """One collective: the step that is running, and those that follow."""

    def __init__(self, running: Handle, later: tuple[Start, ...]):
        self._running = running
        self._later = list(later)

    @property
    def is_at_its_last(self) -> bool:
        return not self._later

    def advance(self) -> None:
        """Waits for the running step and starts the next."""
        self._running.finish()
        self._running = self._later.pop(0)()

    def finish(self) -> None:
        self._running.finish()


class StepsInOrder:
    """Starts collectives of several steps so that every rank starts all steps in the same order."""

    def __init__(self):
        self._under_way: list[_Steps] = []

    def begin(self, first: Start, *later: Start) -> Callable[[], None]:
        """Takes those under way one step further, as far as their order lets them, and starts another.

        Returns:
            What waits for its end.
        """
        for steps in self._under_way:
            steps.advance()
            if not steps.is_at_its_last:
                break
        self._forget_those_at_their_last()
        steps = _Steps(first(), later)
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
