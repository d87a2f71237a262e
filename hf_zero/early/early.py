"""Steps offloaded buckets on copies of their state while backward runs."""

from collections.abc import Collection

import torch

from ..buckets.bucket import Bucket
from ..device import Arrival
from ..offload.tiers import StateFiles, Tier
from ..optimizer.bucket_state import (
    BucketState,
    EarlyReport,
    Placeholders,
)
from ..optimizer.holder import StepTiming
from .seen import Seen
from .steps_beside import StepsBeside, memory_bytes, try_aside
from .trust import EarlySteps


class Early(StepTiming):
    """Steps a bucket on copies as soon as its gradient has arrived; `optimizer.step()` uses the steps still valid by then.

    Args:
        tier, files, placeholders: see `StepsBeside`.
        most_bytes: limit for copies. Buckets beyond the limit, in the order in which gradients arrive, are not stepped early.

    Attributes:
        steps: the early steps that have been started.
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

    def landed(self, bucket: Bucket, arrival: Arrival, *, all_used: bool) -> None:
        double = self._beside.doubles.get(bucket)
        # If this rank did not use a parameter, only all ranks together can tell whether its gradient is kept or dropped.
        self.steps.landed(bucket, arrival, may_begin=all_used and double is not None and double.may_begin)

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
