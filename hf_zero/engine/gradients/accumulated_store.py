"""Stage 1: whole gradients are kept while micro-batches accumulate, and at no other time."""

from collections.abc import Callable

import torch

from ...buckets.bucket import Bucket, ParameterSlot
from .sharded_store import PooledGradients, UnshardedGradients
from .store import GradientStore


class AccumulatedGradients(GradientStore):
    """Chooses for each bucket, from step to step.

    A bucket in which micro-batches have accumulated is reduced where their gradients are. The others pass through the pool, as
    they do at stage 2: without accumulation a rank never has all gradients at a time.

    Args:
        whole: keeps a buffer for each bucket.
        passing: takes buffers from a pool.
    """

    def __init__(self, whole: UnshardedGradients, passing: PooledGradients):
        self._whole = whole
        self._passing = passing
        # Where micro-batches have accumulated.
        self._store_of: dict[Bucket, UnshardedGradients | PooledGradients] = {}

    def held_bytes(self) -> dict[str, int]:
        whole, passing = self._whole.held_bytes(), self._passing.held_bytes()
        return {kind: nbytes + passing[kind] for kind, nbytes in whole.items()}

    def start_passed_over_by(self, start: Callable[[Bucket], bool | None]) -> None:
        self._passing.start_passed_over_by(start)

    def release(self, bucket: Bucket) -> None:
        self._store_of.pop(bucket, None)
        self._whole.release(bucket)
        self._passing.release(bucket)

    def hold(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        if self._whole.accumulates(slot, gradient):
            self._store_of[slot.bucket] = self._whole
            self._whole.hold(slot, gradient)

    def put(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        self._store_of.get(slot.bucket, self._passing).put(slot, gradient)

    def put_small(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        self._store_of.get(slot.bucket, self._passing).put_small(slot, gradient)

    def put_late(self, slot: ParameterSlot, gradient: torch.Tensor) -> None:
        self._store_of.get(slot.bucket, self._passing).put_late(slot, gradient)

    def finish_slot(self, slot: ParameterSlot) -> None:
        self._store_of.get(slot.bucket, self._passing).finish_slot(slot)

    def start(self, bucket: Bucket) -> None:
        self._store_of.get(bucket, self._passing).start(bucket)

    def start_again(self, bucket: Bucket) -> None:
        self._store_of.get(bucket, self._passing).start_again(bucket)

    def finish_all(self) -> None:
        self._whole.finish_all()
        self._passing.finish_all()

    def end_pass(self) -> None:
        # Both reduce by the same means, whose pass ends once.
        self._passing.end_pass()

    def discard_open(self) -> None:
        self._whole.discard_open()
        self._passing.discard_open()
