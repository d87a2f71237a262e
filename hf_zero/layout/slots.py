"""Which parameter lies where in which bucket."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .intervals import Interval, uncovered

SLOT_ALIGN_NUMEL = 16
"""Slots start at multiples of this: torch's fused CPU AdamW gives other last digits in the tail of n % 16 elements, so an
interval must cut a parameter where the whole parameter's vector loop would."""

SHARD_ALIGN_NUMEL = 128
"""Shards are multiples of this: a GPU kernel falls back to scalar loads on anything less aligned."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What the layout needs to know of one parameter.

    `key` holds everything that may not be mixed in one bucket: dtype, optimizer and group.
    """

    name: str
    numel: int
    key: Hashable


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter's place in its bucket, in elements."""

    name: str
    interval: Interval


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Parameters whose gradients are reduced together: their slots in order, and the padded size.

    `numel` is a multiple of the number of shards times `SHARD_ALIGN_NUMEL`, so that every rank's shard is equal. `oversize`
    marks a bucket of one parameter that is larger than a bucket should be.
    """

    index: int
    key: Hashable
    slots: tuple[Slot, ...]
    numel: int
    shards: int
    oversize: bool = False

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    @property
    def padding(self) -> list[Interval]:
        """Runs of the bucket that belong to no parameter."""
        return uncovered(Interval(0, self.numel), [slot.interval for slot in self.slots])

    def shard(self, rank: int) -> Interval:
        """The elements of the bucket that `rank` of the shard group owns."""
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)


def _align(value: int, to: int) -> int:
    return math.ceil(value / to) * to


class _OpenBucket:
    """A bucket that still takes parameters of its key."""

    def __init__(self, key: Hashable):
        self.key = key
        self.slots: list[Slot] = []
        self.end = 0

    def takes(self, numel: int, bucket_numel: int) -> bool:
        return not self.slots or _align(self.end, SLOT_ALIGN_NUMEL) + numel <= bucket_numel

    def add(self, spec: ParameterSpec) -> None:
        start = _align(self.end, SLOT_ALIGN_NUMEL)
        self.end = start + spec.numel
        self.slots.append(Slot(name=spec.name, interval=Interval(start, self.end)))


def plan_buckets(
    parameters: Sequence[ParameterSpec], *, bucket_numel: int, shards: int, first_index: int = 0
) -> tuple[BucketLayout, ...]:
    """Lays parameters out in buckets, in the order their gradients arrive: the reverse of registration.

    Each key fills its own buckets side by side, so that groups which alternate through a model (weights with decay,
    biases without) do not cut each other short. A parameter larger than `bucket_numel` has a bucket of its own. Buckets
    are numbered by the arrival of their last gradient: the order in which they can be reduced.

    Args:
        parameters: in registration order, tied ones once.
        bucket_numel: elements a bucket should not pass.
        shards: ranks in the shard group.
        first_index: number of the first bucket.
    """
    open_buckets: dict[Hashable, _OpenBucket] = {}
    arrival_of: dict[str, int] = {}
    closed: list[_OpenBucket] = []
    for arrival, spec in enumerate(reversed(parameters)):
        bucket = open_buckets.setdefault(spec.key, _OpenBucket(spec.key))
        if not bucket.takes(spec.numel, bucket_numel):
            closed.append(bucket)
            bucket = open_buckets[spec.key] = _OpenBucket(spec.key)
        bucket.add(spec)
        arrival_of[spec.name] = arrival
    closed.extend(open_buckets.values())
    closed.sort(key=lambda bucket: arrival_of[bucket.slots[-1].name])
    granule = shards * SHARD_ALIGN_NUMEL
    return tuple(
        BucketLayout(
            index=index,
            key=bucket.key,
            slots=tuple(bucket.slots),
            numel=_align(bucket.end, granule),
            shards=shards,
            oversize=bucket.end > bucket_numel,
        )
        for index, bucket in enumerate(closed, start=first_index)
    )
