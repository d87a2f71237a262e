"""Begins a bucket's step as soon as its gradient has landed in host memory."""

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future

import torch

from ..buckets.bucket import Bucket
from ..device import Arrival
from ..offload.tiers import StateFiles, Tier
from ..optimizer.bucket_state import BucketState, EarlyReport, Placeholders
from ..optimizer.holder import StepTiming
from .steps_beside import Seen, Stepped, StepsBeside, memory_bytes, try_aside

# Which next steps have been begun while backward goes on, and which of them hold when the script asks for the step.

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
        """Takes note of a bucket's gradient. `may_begin`: the bucket is one of those that are stepped early."""
        if bucket in self._begun:
            # Another backward adds to it, or has come in place of a step.
            del self._begun[bucket]
            self._is_in_vain = True
        # A parameter that this rank did not use keeps its gradient, or gets none, when all ranks have been heard.
        if not may_begin or not all(row.slot.used for row in bucket.rows):
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


# ---- Steps that are taken while backward goes on ----


class Early(StepTiming):
    """Steps a bucket on copies as soon as its gradient has landed; `optimizer.step()` uses the steps that still hold.

    Args:
        tier, files, placeholders: see `StepsBeside`.
        most_bytes: that copies may take. Buckets beyond it, in the order in which gradients arrive, wait for the step.

    Attributes:
        steps: which have been begun.
    """

    steps_early = True

    def __init__(self, tier: Tier, files: StateFiles | None, placeholders: Placeholders, *, most_bytes: int):
        self._beside = StepsBeside(tier, files, placeholders)
        self._left_bytes = most_bytes
        self._bucket_count = 0
        self._hindrance: str | None = None
        self.steps = EarlySteps(self._seen, self._beside.start)

    def admit(self, optimizer: torch.optim.Optimizer, state: BucketState) -> None:
        self._bucket_count += 1
        if not state.bucket.tier.is_apart:
            return
        trial, hindrance = try_aside(optimizer, state)
        if trial is None or hindrance is not None:
            self._hindrance = hindrance
            return
        in_memory = memory_bytes(state, trial)
        self._left_bytes -= in_memory + (0 if state.shard is None else state.shard.nbytes)
        if self._left_bytes >= 0:
            self._beside.add(optimizer, state, in_memory)

    def takes(self, bucket: Bucket) -> bool:
        return bucket in self._beside.doubles

    def landed(self, bucket: Bucket, arrival: Arrival) -> None:
        double = self._beside.doubles.get(bucket)
        self.steps.landed(bucket, arrival, may_begin=double is not None and double.may_begin)

    def commit(self, optimizer: torch.optim.Optimizer) -> Collection[Bucket]:
        mine = set(self._beside.of(optimizer))
        held = self.steps.take(mine.__contains__)
        self._beside.end()
        self._beside.forget_buffers()
        self._beside.commit(held)
        return held.keys()

    def report(self) -> EarlyReport:
        return EarlyReport(
            buckets=len(self._beside.doubles),
            all_buckets=self._bucket_count,
            kept=self.steps.kept,
            forgotten=self.steps.forgotten,
            hindrance=self._hindrance,
        )

    def copy_bytes(self) -> int:
        return self._beside.copy_bytes()

    def file_copy_bytes(self) -> int:
        return self._beside.file_copy_bytes()

    def gradient_bytes(self) -> int:
        return self._beside.scratch_bytes

    def most_beside_bytes(self) -> int:
        return self._beside.most_bytes

    def close(self) -> None:
        self.steps.clear()
        self._beside.close()

    def _seen(self, bucket: Bucket) -> Seen:
        return self._beside.doubles[bucket].seen()
