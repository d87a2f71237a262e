"""Collectives of several steps, each of which needs the result of the step before."""

from collections.abc import Callable

from ..queues import SideQueue
from .transport import Handle

# [Note: the order of steps] A step may start when the previous step has ended, but nobody is notified of this moment. So the
# engine advances the steps when the next collective begins, and when a result is needed. No collective leaves its first step
# before all older ones are at their last step. So on every rank all later steps start in the same order, whichever result the
# rank needs first, and all steps except the last run in parallel with backward.
#
# On an accelerator, a later step waits for the previous one in a side queue. In the computing queue, this wait would delay the
# backward of the next bucket until the first step has ended.

Start = Callable[[], Handle]


class Steps:
    """A collective of several steps: the running step, and the later ones.

    Args:
        order: keeps the order of all collectives of several steps.
        queue: the side queue in which later steps wait for the previous step; None is the computing queue.
    """

    def __init__(self, order: "StepsInOrder", first: Start, later: tuple[Start, ...], queue: SideQueue | None):
        self._order = order
        # A wait in a side queue does not order the computing queue. The memory of the first step must not be reallocated to the
        # computing queue before that queue waits, too, so this reference keeps the memory until `finish`.
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
        # Wait in the side queue: the computing queue must not stop here, in the middle of backward.
        with self._queue.in_parallel():
            self._running.finish(is_exposed=False)
            self._running = self._later.pop(0)()

    def start_last(self) -> None:
        """Waits for all steps except the last, and starts the last."""
        self._order.reach_last(self)

    def finish(self) -> None:
        """Waits for the end of the last step."""
        self._order.reach_last(self)
        self._running.finish()
        self._first = None


class StepsInOrder:
    """Starts the steps of all collectives in the same order on every rank.

    Attributes:
        may_advance: whether `begin` may wait for running steps.
    """

    def __init__(self):
        self._under_way: list[Steps] = []
        self.may_advance = True

    def begin(self, first: Start, *later: Start, queue: SideQueue | None = None) -> Steps:
        """Starts another collective, and advances the running ones by one step, as far as their order allows.

        Args:
            queue: the side queue in which each of `later` waits for the previous step; None is the computing queue.
        """
        for steps in self._under_way if self.may_advance else ():
            steps.advance()
            if not steps.is_at_its_last:
                break
        self._forget_those_at_their_last()
        steps = Steps(self, first, later, queue)
        if later:
            self._under_way.append(steps)
        return steps

    def reach_last(self, steps: Steps) -> None:
        """Starts the last step of a collective, and of all older ones."""
        if steps in self._under_way:
            for older in self._under_way[: self._under_way.index(steps) + 1]:
                while not older.is_at_its_last:
                    older.advance()
            self._forget_those_at_their_last()

    def _forget_those_at_their_last(self) -> None:
        self._under_way = [steps for steps in self._under_way if not steps.is_at_its_last]
