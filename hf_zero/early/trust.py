"""Which early steps are started during backward, and which of them are still valid in `optimizer.step()`."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from ..buckets.bucket import Bucket
from ..device import Arrival
from .double import Stepped
from .seen import Seen

_STEPS = 20
_MOST_IN_VAIN = 1


class EarlySteps:
    """Starts a bucket's step as soon as its gradient has arrived, on copies to be used or dropped by `optimizer.step()`.

    Hooks, clipping and the script run between the two as usual.

    Args:
        seen: returns the current inputs of a bucket's step.
        start: starts such a step, which waits for the gradient to arrive.

    Attributes:
        trust: whether steps are started at present.
        kept, forgotten: numbers of steps so far that were used and dropped.
    """

    def __init__(self, seen: Callable[[Bucket], Seen], start: Callable[[Bucket, Seen, Arrival], Future[Stepped]]):
        self._seen = seen
        self._start = start
        self._begun: dict[Bucket, tuple[Seen, Future[Stepped] | None]] = {}
        self._is_in_vain = False
        self.kept = self.forgotten = 0
        self.trust = Trust()

    def landed(self, bucket: Bucket, arrival: Arrival, *, may_begin: bool) -> None:
        """Records the arrival of a bucket's gradient. `may_begin`: the bucket may be stepped early."""
        if bucket in self._begun:
            # Another backward adds to the gradient, or replaces a gradient without a step.
            del self._begun[bucket]
            self._is_in_vain = True
        if not may_begin:
            return
        seen = self._seen(bucket)
        self._begun[bucket] = (seen, self._start(bucket, seen, arrival) if self.trust.holds else None)

    def take(self, is_due: Callable[[Bucket], bool]) -> dict[Bucket, Stepped]:
        """Waits for the started steps of due buckets, and returns the valid ones. The others are dropped."""
        mine = [bucket for bucket in self._begun if is_due(bucket)]
        begun = {bucket: self._begun.pop(bucket) for bucket in mine}
        # Get all results first: an error in a step's thread must be raised before anything has changed.
        stepped = {bucket: future.result() for bucket, (_, future) in begun.items() if future is not None}
        current = {bucket for bucket, (seen, _) in begun.items() if seen.equals(self._seen(bucket))}
        held = {bucket: step for bucket, step in stepped.items() if bucket in current}
        self.kept += len(held)
        self.forgotten += len(stepped) - len(held)
        if mine or self._is_in_vain:
            self.trust.record(in_vain=self._is_in_vain or len(current) < len(mine))
        self._is_in_vain = False
        return held

    def clear(self) -> None:
        """Drops all started steps."""
        self._begun.clear()


class Trust:
    """Whether early steps have been useful lately: of the last 20 steps, at most one was in vain or would have been.

    The first step is only observed. Steps are recorded even if none was started, so that early steps resume when a run stops
    clipping.
    """

    def __init__(self):
        self._in_vain: deque[bool] = deque(maxlen=_STEPS)

    @property
    def holds(self) -> bool:
        return bool(self._in_vain) and sum(self._in_vain) <= _MOST_IN_VAIN

    def record(self, *, in_vain: bool) -> None:
        self._in_vain.append(in_vain)
