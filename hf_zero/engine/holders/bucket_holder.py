"""State that is stepped a bucket at a time."""

from collections.abc import Sequence
from typing import Any

import torch

from ..buckets.bucket import Bucket, Row
from ..state.bucket_steps import BucketStep, BucketSteps
from ..state.holder import StateHolder
from ..state.placeholders import States


class SteppedByBucket(StateHolder):
    """What holders share that step one bucket after another, each in its own way (`step_with`). Where the state is, another
    class says beside this one.

    Args:
        optimizers: that the engine trains with, in its order.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers
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

    def _optimizer_of(self, bucket: Bucket) -> torch.optim.Optimizer:
        return self._optimizers[bucket.key.optimizer]

    def _states_of(self, bucket: Bucket) -> States:
        # Not by the register's own brackets: it makes an entry for whoever asks, and an empty one would look like a step taken.
        register = self._optimizer_of(bucket).state
        return {row: register[row.tensor] for row in bucket.rows if row.tensor in register}

    def _put_earlier(self, optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
        """Takes state that the optimizer had before it came to the engine."""
        for row in bucket.rows:
            if row.tensor in optimizer.state:
                optimizer.state[row.tensor] = self.put(row, optimizer.state[row.tensor])

    def _fill_registers(self, buckets: Sequence[Bucket]) -> None:
        """Has the registers of whole buckets hold values: their rows are the parameters, whose state stays with the optimizer."""
        for bucket in (bucket for bucket in buckets if bucket.whole and bucket.key.optimizer >= 0):
            for row, state in self._states_of(bucket).items():
                for name, value in state.items():
                    state[name] = self.values(row, name, value)

    def _add(self, steps: BucketSteps, part: BucketStep) -> None:
        """Has `steps`, which step each bucket by `part`, follow the engine's own."""
        self._steps.append(steps)
        self._parts.append(part)
