"""Slots of parameters in buckets, and the parts of parameters in each rank's shard."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .dealing import aligned, deal, group
from .intervals import Interval, uncovered

# ---- Slots of parameters in buckets ----

SLOT_ALIGN_NUMEL = 16
"""Slots start at multiples of this. torch's fused CPU AdamW computes other last digits in the tail of n % 16 elements, so a
parameter may only be cut where the vector loop over the whole parameter would cut it."""

SHARD_ALIGN_NUMEL = 128
"""Shards are multiples of this. With a smaller alignment, GPU kernels fall back to scalar loads."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Alignment in elements of the start of a slot, and of the size of a shard."""

    slot_numel: int = SLOT_ALIGN_NUMEL
    shard_numel: int = SHARD_ALIGN_NUMEL

    def and_also(self, other: "Alignment") -> "Alignment":
        """Returns the smallest alignment to satisfy both."""
        return Alignment(
            slot_numel=math.lcm(self.slot_numel, other.slot_numel),
            shard_numel=math.lcm(self.shard_numel, other.shard_numel),
        )


USUAL_ALIGNMENT = Alignment()
"""Alignment of buckets without quantized blocks."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """A parameter, as the layout sees it.

    Parameters with different `key`s (dtype, optimizer and group) never share a bucket. An `intact` parameter is not cut: it lies
    in the shard of one rank. `shards` is set if fewer ranks share the parameter; it is the same for all parameters of a key.
    """

    name: str
    numel: int
    key: Hashable
    intact: bool = False
    shards: int | None = None


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The interval of one parameter in its bucket, in elements."""

    name: str
    interval: Interval


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Parameters whose gradients are reduced together: their slots in order, and the padded size.

    `numel` is a multiple of the number of shards times their alignment, so all shards have the same size. `oversize` marks a
    bucket that contains a parameter larger than the bucket size. In an `intact` bucket no shard boundary cuts a slot.
    """

    index: int
    key: Hashable
    slots: tuple[Slot, ...]
    numel: int
    shards: int
    oversize: bool = False
    intact: bool = False

    @cached_property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    @cached_property
    def padding(self) -> list[Interval]:
        """The intervals of the bucket without a parameter."""
        return uncovered(Interval(0, self.numel), [slot.interval for slot in self.slots])

    def shard(self, rank: int) -> Interval:
        """The elements of the bucket owned by `rank` of the shard group."""
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)


class _OpenBucket:
    """A bucket while parameters of one key are added."""

    def __init__(self, key: Hashable, align: Alignment):
        self.key = key
        self._align = align
        self.slots: list[Slot] = []
        self.end = 0
        self.last_arrival = 0

    def takes(self, numel: int, bucket_numel: int) -> bool:
        # An empty bucket accepts any parameter. Otherwise a parameter larger than the bucket size would get no bucket.
        return not self.slots or aligned(self.end, self._align.slot_numel) + numel <= bucket_numel

    def add(self, spec: ParameterSpec, arrival: int) -> None:
        start = aligned(self.end, self._align.slot_numel)
        self.end = start + spec.numel
        self.slots.append(Slot(name=spec.name, interval=Interval(start, self.end)))
        self.last_arrival = arrival

    def close(self, bucket_numel: int, shards: int) -> BucketLayout:
        return BucketLayout(
            index=self.last_arrival,
            key=self.key,
            slots=tuple(self.slots),
            numel=aligned(self.end, shards * self._align.shard_numel),
            shards=shards,
            oversize=self.end > bucket_numel,
        )


def plan_buckets(
    parameters: Sequence[ParameterSpec],
    *,
    bucket_numel: int,
    shards: int,
    first_index: int = 0,
    align: Alignment = USUAL_ALIGNMENT,
) -> tuple[BucketLayout, ...]:
    """Assigns parameters to buckets in the order in which their gradients arrive, the reverse of registration.

    Each key fills its own buckets, so groups that alternate through a model (weights with decay, biases without) do not end each
    other's buckets early. A parameter larger than `bucket_numel` gets its own bucket; an intact one shares it with parameters
    that fill the other shards. Buckets are numbered by the arrival of their last gradient, the order in which they can be
    reduced.

    Args:
        parameters: in registration order, each tied parameter once.
        bucket_numel: target size of a bucket in elements.
        shards: number of ranks in the shard group, unless a parameter specifies its own.
        first_index: number of the first bucket.
        align: alignment of slots and shards.
    """
    arriving: dict[tuple[bool, Hashable], list[tuple[int, ParameterSpec]]] = {}
    for arrival, spec in enumerate(reversed(parameters)):
        # Intact parameters get their own buckets: a bucket is either dealt to shards in whole parameters or cut anywhere.
        arriving.setdefault((spec.intact, spec.key), []).append((arrival, spec))
    buckets = [
        bucket
        for (intact, _), specs in arriving.items()
        for bucket in (_dealt if intact else _in_a_row)(specs, bucket_numel, specs[0][1].shards or shards, align)
    ]
    # A bucket is complete when its last gradient has arrived. All ranks must reduce buckets in this same order.
    buckets.sort(key=lambda bucket: bucket.index)
    return tuple(replace(bucket, index=index) for index, bucket in enumerate(buckets, start=first_index))


def _in_a_row(
    specs: Sequence[tuple[int, ParameterSpec]], bucket_numel: int, shards: int, align: Alignment
) -> Iterator[BucketLayout]:
    """Yields buckets of one key, which shards may cut anywhere; `index` is the arrival of the last gradient."""
    bucket = _OpenBucket(specs[0][1].key, align)
    for arrival, spec in specs:
        if not bucket.takes(spec.numel, bucket_numel):
            yield bucket.close(bucket_numel, shards)
            bucket = _OpenBucket(spec.key, align)
        bucket.add(spec, arrival)
    yield bucket.close(bucket_numel, shards)


def _dealt(
    specs: Sequence[tuple[int, ParameterSpec]], bucket_numel: int, shards: int, align: Alignment
) -> Iterator[BucketLayout]:
    """Yields buckets of intact parameters of one key."""
    for indices in group([spec.numel for _, spec in specs], bucket_numel=bucket_numel, shards=shards):
        mine = [specs[index][1] for index in indices]
        places = deal([spec.numel for spec in mine], shards=shards, align_numel=align.slot_numel)
        end = max(start + spec.numel for (_, start), spec in zip(places, mine))
        shard_numel = aligned(end, align.shard_numel)
        slots = [
            Slot(name=spec.name, interval=Interval(0, spec.numel).shift(shard * shard_numel + start))
            for (shard, start), spec in zip(places, mine)
        ]
        yield BucketLayout(
            # Indices are ascending, so the last index belongs to the gradient completing the bucket.
            index=specs[indices[-1]][0],
            key=mine[0].key,
            # Sorted by position, because flat views of a bucket are made in the order of the slots.
            slots=tuple(sorted(slots, key=lambda slot: slot.interval)),
            numel=shard_numel * shards,
            shards=shards,
            oversize=max(spec.numel for spec in mine) > bucket_numel,
            intact=True,
        )


# ---- The rows of a shard: the unit of the optimizer, the tiers and the checkpoints ----


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The part of one parameter in the shard of one rank.

    `in_parameter` is the interval in the parameter, in row-major order; `in_shard` is the same elements in the shard.
    """

    name: str
    in_parameter: Interval
    in_shard: Interval


def rows_of_shard(bucket: BucketLayout, rank: int) -> tuple[RowLayout, ...]:
    """The parts of parameters in the shard of `rank`, in slot order. Over all ranks, each element appears exactly once."""
    shard = bucket.shard(rank)
    rows = []
    for slot in bucket.slots:
        common = slot.interval.intersect(shard)
        if common is not None:
            in_parameter, in_shard = common.shift(-slot.interval.start), common.shift(-shard.start)
            rows.append(RowLayout(name=slot.name, in_parameter=in_parameter, in_shard=in_shard))
    return tuple(rows)
