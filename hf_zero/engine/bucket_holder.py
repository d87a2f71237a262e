"""State that is stepped a bucket at a time."""

from collections.abc import Sequence
from typing import Any

from .bucket_steps import BucketStep, BucketSteps
from .buckets import Bucket, Row
from .holder import StateHolder


class SteppedByBucket(StateHolder):
    """What holders share that step one bucket after another, each in its own way (`step_with`). Where the state is, another
    class says beside this one."""

    def __init__(self):
        self._steps: list[BucketSteps] = []
        self._parts: list[BucketStep] = []

    def before_forward(self) -> None:
        for steps in self._steps:
            steps.come_last()

    def after_step(self, buckets: Sequence[Bucket]) -> None:
        for steps in self._steps:
            steps.give_back_gradients()
        super().after_step(buckets)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        for part in self._parts:
            part.forget(row.slot.bucket)
        return super().put(row, state)

    def close(self, buckets: Sequence[Bucket]) -> None:
        for steps in self._steps:
            steps.release()

    def _add(self, steps: BucketSteps, part: BucketStep) -> None:
        """Has `steps`, which step each bucket by `part`, follow the engine's own."""
        self._steps.append(steps)
        self._parts.append(part)
