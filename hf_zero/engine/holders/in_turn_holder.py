"""State in memory that is brought to full digits, stepped and put back, a bucket at a time."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from ...comm.local import LocalTransport
from ..buckets.bucket import Bucket
from ..state.bucket_steps import BucketStep, BucketSteps, InTurn
from ..state.holder import InMemory
from .bucket_holder import SteppedByBucket


class SteppedInTurn(SteppedByBucket, InMemory):
    """What is kept in fewer digits than it is stepped with has all of them for the moment of its bucket's step.

    Args:
        optimizers: that the engine trains with, in its order.
        step_of: makes what steps an optimizer's buckets.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        step_of: Callable[[torch.optim.Optimizer], BucketStep],
    ):
        super().__init__(optimizers)
        self._step_of = step_of

    @abstractmethod
    def _passes(self, bucket: Bucket) -> bool:
        """Whether the bucket is stepped so; the optimizer's own step takes the others."""

    @abstractmethod
    def _bring(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        """Called before the bucket's step."""

    @abstractmethod
    def _put_back(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        """Called after it. Rows that have been stepped still have their gradients."""

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        # No disk can fail under one rank alone, so none has to wait for a word from the others.
        mine, step = {bucket: bucket for bucket in buckets if self._passes(bucket)}, self._step_of(optimizer)
        steps = BucketSteps(
            optimizer, mine, InTurn(), step=step, transport=LocalTransport(), bring=self._bring, put=self._put_back
        )
        self._add(steps, step)
