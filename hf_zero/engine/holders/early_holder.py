"""Steps of state in host memory that are taken while backward goes on."""

from collections.abc import Sequence

import torch

from ...device import Arrival
from ...offload.tier import Tier
from ..buckets.bucket import Bucket
from ..report_tables import EarlyReport
from .copies_holder import SteppedOnCopies
from .early_steps import EarlySteps
from .step_copies import Seen, look


class SteppedEarly(SteppedOnCopies):
    """What has been taken over has no gradient any more when the optimizer's step runs over the rest.

    Args:
        most_bytes: that the copies may take. Buckets beyond it, in the order in which gradients arrive, wait for the step.

    Attributes:
        early: which steps have been begun.
    """

    steps_early = True

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], tier: Tier, *, most_bytes: int):
        super().__init__(optimizers, tier)
        self._left_bytes = most_bytes
        self._bucket_count = 0
        self.early = EarlySteps(self._look, self._start_step)

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        super().step_with(optimizer, buckets)
        self._bucket_count += len(buckets)

    def landed(self, bucket: Bucket, arrival: Arrival) -> None:
        self.early.landed(bucket, arrival, may_begin=bucket in self.shadows)

    def early_report(self) -> EarlyReport:
        return EarlyReport(
            buckets=len(self.shadows),
            all_buckets=self._bucket_count,
            kept=self.early.kept,
            forgotten=self.early.forgotten,
            hindrance=self.hindrance,
        )

    def close(self, buckets: Sequence[Bucket]) -> None:
        self.early.clear()
        super().close(buckets)

    def _admits(self, copy_bytes: int) -> bool:
        self._left_bytes -= copy_bytes
        return self._left_bytes >= 0

    def _look(self, bucket: Bucket) -> Seen:
        return look(bucket, self._optimizer_of(bucket))

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        held = self.early.take(lambda bucket: self._optimizer_of(bucket) is optimizer)
        for bucket, stepped in held.items():
            self.shadows[bucket].take_over(stepped)
            for row in bucket.rows:
                row.tensor.grad = None
