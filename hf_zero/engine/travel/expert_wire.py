"""The wire of a model whose experts are split over more ranks than the rest: each bucket goes between the ranks that share it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import torch

from ...buckets.bucket import Bucket
from ...buckets.rows import KindsOf, Read, StateRow
from ...comm.transport import Handle
from .gathers import Gather
from .reductions import Reduction
from .wire import Wire


def wire_with_experts(usual: Wire, experts: Wire) -> Wire:
    """One wire of two; formats and alignment of shards are those of `usual`, and each is to be asked for its own."""
    return replace(
        usual,
        reduction=_ReductionByKind(usual.reduction, experts.reduction),
        gather=_GatherByKind(usual.gather, experts.gather),
        forward=_GatherByKind(usual.forward, experts.forward),
        backward=_GatherByKind(usual.backward, experts.backward),
        exact=_GatherByKind(usual.exact, experts.exact),
    )


class _ReductionByKind(Reduction):
    def __init__(self, usual: Reduction, experts: Reduction):
        self._usual = usual
        self._experts = experts
        self.adds_in_wider = usual.adds_in_wider

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        return (self._experts if bucket.key.is_expert else self._usual).start(bucket, flat, out)

    def end_pass(self) -> None:
        self._usual.end_pass()
        self._experts.end_pass()

    @property
    def held_bytes(self) -> int:
        return self._usual.held_bytes + self._experts.held_bytes

    @property
    def error(self) -> float | None:
        return max((each.error for each in (self._usual, self._experts) if each.error is not None), default=None)

    def rows(self) -> Iterator[StateRow]:
        return chain(self._usual.rows(), self._experts.rows())

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        held = list(buckets)
        self._usual.fill([bucket for bucket in held if not bucket.key.is_expert], read, kinds_of)
        self._experts.fill([bucket for bucket in held if bucket.key.is_expert], read, kinds_of)


class _GatherByKind(Gather):
    def __init__(self, usual: Gather, experts: Gather):
        self._usual = usual
        self._experts = experts
        self.is_exact = usual.is_exact

    def start(self, bucket: Bucket) -> Handle:
        return (self._experts if bucket.key.is_expert else self._usual).start(bucket)

    @property
    def held_bytes(self) -> int:
        return self._usual.held_bytes + self._experts.held_bytes

    def forget(self) -> None:
        self._usual.forget()
        self._experts.forget()
