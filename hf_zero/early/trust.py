"""Which early steps are started, and which of them are still valid in `optimizer.step()`.

Which next steps have been begun while backward goes on, and which of them hold when the script asks for the step.
"""

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
    """Begins a bucket's step as soon as its gradient has landed, on copies that `optimizer.step()` uses or drops.

    Hooks, clipping and the script come between, as ever.

    Args:
        seen: what a bucket's step would depend on now.
        start: begins such a step, once the gradient has arrived.

    Attributes:
        trust: whether steps are begun at present.
        kept, forgotten: begun steps so far that were taken over, and that were not.
    """

    def __init__(self, seen: Callable[[Bucket], Seen], start: Callable[[Bucket, Seen, Arrival], Future[Stepped]]):
        self._seen = seen
        self._start = start
        self._begun: dict[Bucket, tuple[Seen, Future[Stepped] | None]] = {}
        self._is_in_vain = False
        self.kept = self.forgotten = 0
        self.trust = Trust()

    def landed(self, bucket: Bucket, arrival: Arrival, *, may_begin: bool) -> None:
        """Takes note of a bucket's gradient. `may_begin`: the bucket may be stepped early."""
        if bucket in self._begun:
            # Another backward adds to it, or has come in place of a step.
            del self._begun[bucket]
            self._is_in_vain = True
        if not may_begin:
            return
        seen = self._seen(bucket)
        self._begun[bucket] = (seen, self._start(bucket, seen, arrival) if self.trust.holds else None)

    def take(self, is_due: Callable[[Bucket], bool]) -> dict[Bucket, Stepped]:
        """Ends the begun steps of the buckets that are due; returns those that hold. The others are forgotten."""
        mine = [bucket for bucket in self._begun if is_due(bucket)]
        begun = {bucket: self._begun.pop(bucket) for bucket in mine}
        # All of them, and first: a step that failed in its thread ends this one before anything has changed.
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
        """Forgets all of them."""
        self._begun.clear()


class Trust:
    """Whether early steps have paid lately: at most one of the last 20 would have been, or was, begun in vain.

    One step is watched first. Steps are recorded whether or not anything was begun, so that trust comes back when a run stops
    clipping.
    """

    def __init__(self):
        self._in_vain: deque[bool] = deque(maxlen=_STEPS)

    @property
    def holds(self) -> bool:
        return bool(self._in_vain) and sum(self._in_vain) <= _MOST_IN_VAIN

    def record(self, *, in_vain: bool) -> None:
        self._in_vain.append(in_vain)
