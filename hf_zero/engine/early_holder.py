"""Steps of state in host memory that are taken while backward goes on."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from ..device import Arrival
from .buckets import Bucket
from .copies_holder import SteppedOnCopies
from .reports import EarlyReport
from .shadow import Seen, Stepped, look
from .trust import Trust


class SteppedEarly(SteppedOnCopies):
    """Steps a bucket as soon as its gradient has landed, on copies that `optimizer.step()` takes over or forgets.

    Hooks, clipping and the script come between, as ever. What has been taken over has no gradient any more when the step runs
    over the rest.

    Args:
        most_bytes: that the copies may take. Buckets beyond it, in the order in which gradients arrive, wait for the step.

    Attributes:
        trust: whether steps are taken early at present.
    """

    steps_early = True

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], threads: int, *, most_bytes: int):
        super().__init__(optimizers, threads)
        self._left_bytes = most_bytes
        self._begun: dict[Bucket, tuple[Seen, Future[Stepped] | None]] = {}
        self._bucket_count = self._kept = self._forgotten = 0
        self._is_in_vain = False
        self.trust = Trust()

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        super().step_with(optimizer, buckets)
        self._bucket_count += len(buckets)

    def landed(self, bucket: Bucket, arrival: Arrival) -> None:
        if bucket in self._begun:
            # Another backward adds to it, or has come in place of a step.
            del self._begun[bucket]
            self._is_in_vain = True
        # A parameter that this rank did not use keeps its gradient, or gets none, when all ranks have been heard.
        if bucket not in self.shadows or not all(row.slot.used for row in bucket.rows):
            return
        seen = look(bucket, self._optimizer_of(bucket))
        self._begun[bucket] = (seen, self._start_step(bucket, seen, arrival) if self.trust.holds else None)

    def early_report(self) -> EarlyReport:
        return EarlyReport(
            buckets=len(self.shadows),
            all_buckets=self._bucket_count,
            kept=self._kept,
            forgotten=self._forgotten,
            hindrance=self.hindrance,
        )

    def close(self, buckets: Sequence[Bucket]) -> None:
        self._begun.clear()
        super().close(buckets)

    def _admits(self, copy_bytes: int) -> bool:
        self._left_bytes -= copy_bytes
        return self._left_bytes >= 0

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        mine = [bucket for bucket in self._begun if self._optimizer_of(bucket) is optimizer]
        begun = {bucket: self._begun.pop(bucket) for bucket in mine}
        # All of them, and first: a step that failed in its thread ends this one before anything has changed.
        stepped = {bucket: future.result() for bucket, (_, future) in begun.items() if future is not None}
        current = {bucket for bucket, (seen, _) in begun.items() if seen.equals(look(bucket, optimizer))}
        for bucket in current & stepped.keys():
            self.shadows[bucket].take_over(stepped[bucket])
            for row in bucket.rows:
                row.tensor.grad = None
        self._kept += len(current & stepped.keys())
        self._forgotten += len(stepped.keys() - current)
        if mine or self._is_in_vain:
            self.trust.record(in_vain=self._is_in_vain or len(current) < len(mine))
        self._is_in_vain = False
