"""Slots of parameters in buckets, and the parts of parameters in each rank's shard."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .dealing import aligned, deal, group
from .intervals import Interval, uncovered

# ---- Slots of parameters in buckets ----

SLOT_ALIGN_NUMEL = 16
"""Slots start at multiples of this: torch's fused CPU AdamW gives other last digits in the tail of n % 16 elements, so an
interval must cut a parameter where the whole parameter's vector loop would."""

SHARD_ALIGN_NUMEL = 128
"""Shards are multiples of this: a GPU kernel falls back to scalar loads on anything less aligned."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Units in elements: of the start of a slot, and of the size of a shard."""

    slot_numel: int = SLOT_ALIGN_NUMEL
    shard_numel: int = SHARD_ALIGN_NUMEL

    def and_also(self, other: "Alignment") -> "Alignment":
        """Combines two alignments into the smallest that suits both."""
        return Alignment(
            slot_numel=math.lcm(self.slot_numel, other.slot_numel),
            shard_numel=math.lcm(self.shard_numel, other.shard_numel),
        )


USUAL_ALIGNMENT = Alignment()
"""Where nothing lies in blocks."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Describes a parameter to the layout.

    `key` holds everything that may not be mixed in one bucket: dtype, optimizer and group. `intact` parameters are not cut:
    each lies in one rank's shard. `shards` is set where fewer ranks share the parameter; it is the same for all of a key.
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

    `numel` is a multiple of the number of shards times their alignment, so that every rank's shard is equal. `oversize`
    marks a bucket with a parameter that is larger than a bucket should be. In an `intact` one no shard cuts a slot.
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
        """Returns the runs of the bucket that belong to no parameter."""
        return uncovered(Interval(0, self.numel), [slot.interval for slot in self.slots])

    def shard(self, rank: int) -> Interval:
        """Returns the elements of the bucket that `rank` of the shard group owns."""
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)


class _OpenBucket:
    """A bucket that is being filled with parameters of its key, one behind the other."""

    def __init__(self, key: Hashable, align: Alignment):
        self.key = key
        self._align = align
        self.slots: list[Slot] = []
        self.end = 0
        self.last_arrival = 0

    def takes(self, numel: int, bucket_numel: int) -> bool:
        # An empty bucket takes any parameter: one that is larger than a bucket should be would otherwise have none.
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
    """Lays parameters out in buckets, in the order their gradients arrive: the reverse of registration.

    Each key fills its own buckets side by side, so that groups which alternate through a model (weights with decay,
    biases without) do not cut each other short. A parameter larger than `bucket_numel` has a bucket of its own; an intact
    one shares it with what fills the other shards. Buckets are numbered by the arrival of their last gradient: the order in
    which they can be reduced.

    Args:
        parameters: in registration order, tied ones once.
        bucket_numel: elements a bucket should not pass.
        shards: ranks in the shard group, where a parameter does not say otherwise.
        first_index: number of the first bucket.
        align: of slots and shards.
    """
    arriving: dict[tuple[bool, Hashable], list[tuple[int, ParameterSpec]]] = {}
    for arrival, spec in enumerate(reversed(parameters)):
        # Intact ones apart: a bucket is either dealt to the shards whole or cut by them anywhere.
        arriving.setdefault((spec.intact, spec.key), []).append((arrival, spec))
    buckets = [
        bucket
        for (intact, _), specs in arriving.items()
        for bucket in (_dealt if intact else _in_a_row)(specs, bucket_numel, specs[0][1].shards or shards, align)
    ]
    # The order of reduction, which must be the same on all ranks: a bucket is full when its last gradient has come.
    buckets.sort(key=lambda bucket: bucket.index)
    return tuple(replace(bucket, index=index) for index, bucket in enumerate(buckets, start=first_index))


def _in_a_row(
    specs: Sequence[tuple[int, ParameterSpec]], bucket_numel: int, shards: int, align: Alignment
) -> Iterator[BucketLayout]:
    """Yields buckets of one key that shards may cut anywhere, numbered by the arrival of the last gradient."""
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
            # Indices ascend, so that the last is that of the gradient that arrives last and makes the bucket full.
            index=specs[indices[-1]][0],
            key=mine[0].key,
            # Sorted by place: flat views of a bucket are cut one behind the other, in the order of the slots.
            slots=tuple(sorted(slots, key=lambda slot: slot.interval)),
            numel=shard_numel * shards,
            shards=shards,
            oversize=max(spec.numel for spec in mine) > bucket_numel,
            intact=True,
        )


# ---- The rows of a shard: the unit of the optimizer, the tiers and the checkpoints ----


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The part of one parameter that lies in one rank's shard.

    `in_parameter` counts elements of the parameter, row-major; `in_shard` the same elements of the rank's shard.
    """

    name: str
    in_parameter: Interval
    in_shard: Interval


def rows_of_shard(bucket: BucketLayout, rank: int) -> tuple[RowLayout, ...]:
    """Returns the rows of `rank`'s shard of `bucket`, in slot order. Over all ranks they cover every parameter once."""
    shard = bucket.shard(rank)
    rows = []
    for slot in bucket.slots:
        common = slot.interval.intersect(shard)
        if common is not None:
            in_parameter, in_shard = common.shift(-slot.interval.start), common.shift(-shard.start)
            rows.append(RowLayout(name=slot.name, in_parameter=in_parameter, in_shard=in_shard))
    return tuple(rows)
