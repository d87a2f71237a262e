"""Intervals, slots of parameters in flat buckets, shards and quantised blocks that cut buckets, and boxes of split tensors."""

import heapq
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import product
from math import prod
from typing import Generic, NamedTuple, TypeVar

# ---- Half-open intervals of elements: the one unit of shards, rows and checkpoint files ----


class Interval(NamedTuple):
    """Elements `start <= i < stop` of some flat sequence."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def shift(self, by: int) -> "Interval":
        return Interval(self.start + by, self.stop + by)

    def intersect(self, other: "Interval") -> "Interval | None":
        """The elements in both, or None when there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else None


def uncovered(whole: Interval, parts: Iterable[Interval]) -> list[Interval]:
    """Returns the runs of `whole` that no part covers, in order. Parts may touch, overlap and come in any order."""
    gaps, at = [], whole.start
    for part in sorted(parts):
        if part.start > at:
            gaps.append(Interval(at, min(part.start, whole.stop)))
        at = max(at, part.stop)
        if at >= whole.stop:
            break
    if at < whole.stop:
        gaps.append(Interval(at, whole.stop))
    return [gap for gap in gaps if gap.numel > 0]


def doubly_covered(parts: Iterable[Interval]) -> list[Interval]:
    """Returns the runs that two or more parts cover, in order of the later part's start."""
    found, end = [], None
    for part in sorted(parts):
        if end is not None and part.start < end:
            found.append(Interval(part.start, min(end, part.stop)))
        end = part.stop if end is None else max(end, part.stop)
    return found


# ---- Parameters that may not be cut: their bucket, and their shard of the bucket ----
#
# Collectives move equal shards, so each shard has the size of the fullest; the others are padded. Padding is small where a
# bucket has several parameters a rank. A parameter larger than its rank's part of a bucket sets the size of all shards, and
# others of its optimizer group are drawn in to fill them.


def group(numels: Sequence[int], *, bucket_numel: int, shards: int) -> list[list[int]]:
    """Groups parameters into buckets, as lists of their indices in ascending order.

    Args:
        numels: of each parameter, in the order in which gradients arrive.
        bucket_numel: elements a bucket should not pass, padding left out; it may where its largest parameter fills more
            than a shard.
    """
    left = dict.fromkeys(range(len(numels)))
    groups = []
    large = [index for index in left if numels[index] * shards > bucket_numel]
    for seed in sorted(large, key=lambda index: -numels[index]):
        # A larger seed may have drawn this one in to fill another shard.
        if seed in left:
            # Those that arrive next to it, so that the bucket is full soon after it could be.
            nearest = sorted(left, key=lambda index: abs(index - seed))
            groups.append(_take(nearest, left, numels, room=numels[seed] * shards, skips=True))
    while left:
        groups.append(_take(list(left), left, numels, room=bucket_numel, skips=False))
    return groups


def _take(candidates: list[int], left: dict[int, None], numels: Sequence[int], *, room: int, skips: bool) -> list[int]:
    """Moves candidates out of `left` while there is room. `skips`: passes over those that are too large."""
    taken: list[int] = []
    total = 0
    for index in candidates:
        if taken and total + numels[index] > room:
            if skips:
                continue
            break
        taken.append(index)
        total += numels[index]
        del left[index]
    return sorted(taken)


def aligned(value: int, to: int) -> int:
    """Rounds up to a multiple of `to`."""
    return -(-value // to) * to


def deal(numels: Sequence[int], *, shards: int, align_numel: int) -> list[tuple[int, int]]:
    """Returns (shard, first element) of each parameter: the largest first, each on the emptiest shard.

    Args:
        align_numel: parameters begin at multiples of this.

    Longest processing time first: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969; the fullest shard has at most
    4/3 of what the best deal could reach.
    """
    places = [(0, 0)] * len(numels)
    ends = [(0, shard) for shard in range(shards)]
    # Ties go by index and by shard, the same on every rank: ranks that disagreed on a place would add up different parameters.
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        end, shard = heapq.heappop(ends)
        places[index] = (shard, end)
        heapq.heappush(ends, (end + aligned(numels[index], align_numel), shard))
    return places


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


# ---- 8-bit blocks in a bucket, and their bytes ----
#
# [Note: blocks of parameters] A block is 256 neighbours of one parameter, counted from its first element. Slots then start,
# and shards end, at multiples of 256, so that a parameter's blocks are the same on every world size, stage and bucket size,
# and no shard cuts one: another run loads the blocks of a checkpoint without requantising them.

BLOCK_NUMEL = 256
"""Elements that share a scale."""

SMALLEST_NUMEL = 4096
"""Parameters of fewer elements keep their moments as they are, as in Dettmers et al. 2021: biases and norms take little."""

IN_BLOCKS = Alignment(
    slot_numel=max(SLOT_ALIGN_NUMEL, BLOCK_NUMEL),
    shard_numel=max(SHARD_ALIGN_NUMEL, BLOCK_NUMEL),
)
"""Of buckets whose moments are in blocks."""

_SCALE_BYTES = 4


def is_in_blocks(numel: int) -> bool:
    """Whether the moments of a parameter of `numel` elements are in blocks."""
    return numel >= SMALLEST_NUMEL


def blocks(numel: int) -> int:
    """Counts the blocks, and so scales, of `numel` elements."""
    return -(-numel // BLOCK_NUMEL)


def block_bytes(numel: int) -> int:
    """Counts bytes of `numel` elements in blocks: one each, and the scales."""
    return numel + _SCALE_BYTES * blocks(numel)


def has_blocks(bucket: BucketLayout) -> bool:
    """Whether a bucket has a parameter whose moments are in blocks."""
    return any(is_in_blocks(slot.interval.numel) for slot in bucket.slots)


def moment_bytes(bucket: BucketLayout, itemsize: int) -> int:
    """Counts bytes of one moment in a rank's shard of a bucket. Small parameters take `itemsize` an element.

    Which rank has the small ones is left open: they count as if they were spread over the shards.
    """
    if not has_blocks(bucket):
        return bucket.shard_numel * itemsize
    # Small parameters count twice: the codes and scales of a bucket cover its whole shard, small parameters and padding too.
    small = sum(slot.interval.numel for slot in bucket.slots if not is_in_blocks(slot.interval.numel))
    return block_bytes(bucket.shard_numel) + -(-small // bucket.shards) * itemsize


# ---- Sizes of the buffers that whole-bucket gradients pass through at stages 2 and 3 ----

GRAD_BUFFERS = 3
"""Large buffers at a time: backward waits for the oldest bucket where another is full."""

_SMALL_PART = 4


class BufferKind(Enum):
    """The lifetime of a bucket's gradient buffer.

    SHARED: one of a few buffers, passed on to buckets that are no larger than the one that it was made for.
    SMALL: one beside those, passed on among small ones. A handful of biases would hold a shared one through the whole backward.
    OVERSIZE: its own, and dropped when reduced: a parameter larger than a bucket should be (an embedding), which would
        otherwise be kept for smaller ones.

    Shared and oversize buffers are large: there are only so many of them at a time, free ones counted. Small ones are not
    counted, and each is less than a quarter of the largest shared one.
    """

    SHARED = "shared"
    SMALL = "small"
    OVERSIZE = "oversize"


def shared_numel(buckets: Sequence[BucketLayout]) -> int:
    """Counts elements of the largest shared buffer, that of the largest bucket that is not oversize; 0 without one."""
    return max((bucket.numel for bucket in buckets if not bucket.oversize), default=0)


def kind_of_buffer(bucket: BucketLayout, shared: int) -> BufferKind:
    """Chooses the kind for `bucket` where the largest shared buffer has `shared` elements."""
    if bucket.oversize:
        return BufferKind.OVERSIZE
    return BufferKind.SMALL if bucket.numel * _SMALL_PART < shared else BufferKind.SHARED


def pool_numel(buckets: Sequence[BucketLayout], limit: int) -> int:
    """Counts the most elements of all buffers at a time, where gradients come in the order of the buckets.

    Large buffers in use at the same time are then those of `limit` buckets that follow one another: embeddings at both ends of
    a model do not meet. What they leave of `limit` may be the largest shared buffers so far, in use or free. Buckets of different
    keys fill side by side, and nobody knows in which order: where large ones have several keys, the largest count, `limit` of
    them or one for each key.

    Args:
        buckets: in the order in which they are reduced.
        limit: large buffers at a time.
    """
    shared = shared_numel(buckets)
    small = sum(bucket.numel for bucket in buckets if kind_of_buffer(bucket, shared) is BufferKind.SMALL)
    large = [bucket for bucket in buckets if kind_of_buffer(bucket, shared) is not BufferKind.SMALL]
    return small + max((_large_numel(large[:stop], limit) for stop in range(1, len(large) + 1)), default=0)


def pool_growth(buckets: Sequence[BucketLayout], limit: int) -> list[int]:
    """Counts the most elements of all buffers when each bucket has just taken its own; see `pool_numel`.

    Args:
        buckets: in the order in which their first gradients come.
        limit: large buffers at a time.
    """
    shared = shared_numel(buckets)
    small, large, found = 0, [], []
    for bucket in buckets:
        if kind_of_buffer(bucket, shared) is BufferKind.SMALL:
            small += bucket.numel
        else:
            large.append(bucket)
        found.append(small + _large_numel(large, limit))
    return found


def _large_numel(taken: Sequence[BucketLayout], limit: int) -> int:
    """Counts elements of large buffers, at most, when the last of these buckets has just taken its own."""
    keys = len({bucket.key for bucket in taken})
    if keys > 1:
        return sum(sorted((bucket.numel for bucket in taken), reverse=True)[: max(limit, keys)])
    # At most `limit` of them, so that the difference below is never negative: a negative stop would count nearly all buffers.
    oversize = [bucket.numel for bucket in taken[-limit:] if bucket.oversize]
    passed_on = sorted((bucket.numel for bucket in taken if not bucket.oversize), reverse=True)
    return sum(oversize) + sum(passed_on[: limit - len(oversize)])


# ---- A rank's elements of a tensor that tensor or expert parallelism has split along its dimensions ----


@dataclass(frozen=True)
class Box:
    """Part of a whole tensor: along each dimension some ranges of indices, one behind the other.

    Attributes:
        shape: of the whole tensor.
        ranges: along each dimension, in ascending order, none empty unless the part is.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Interval, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Covers all of a tensor."""
        return cls(tuple(shape), tuple((Interval(0, size),) for size in shape))

    def split(self, dim: int, parts: int, place: int, *, repeats: int = 1) -> "Box":
        """Cuts this part along a dimension as `torch.chunk` does; returns the `place`-th of `parts`.

        Args:
            repeats: tensors that lie side by side along the dimension (gate and up projection); each is cut by itself.
        """
        held = self.ranges[dim]
        numel = sum(each.numel for each in held)
        size = -(-numel // (parts * repeats))
        starts = [size * (place + parts * repeat) for repeat in range(repeats)]
        wanted = [Interval(min(start, numel), min(start + size, numel)) for start in starts]
        kept = tuple(piece for each in wanted for piece in _within(held, each))
        return Box(self.shape, (*self.ranges[:dim], kept, *self.ranges[dim + 1 :]))

    def narrow(self, dim: int, interval: Interval) -> "Box":
        """Keeps the elements of this part whose index along a dimension is in an interval."""
        kept = tuple(_within(self.ranges[dim], interval))
        return Box(self.shape, (*self.ranges[:dim], kept, *self.ranges[dim + 1 :]))

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(each.numel for each in ranges) for ranges in self.ranges)

    @property
    def numel(self) -> int:
        return prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    def shares_with(self, other: "Box") -> bool:
        """Whether an element of the whole tensor is in both parts."""
        return all(
            any(one.intersect(another) for one in mine for another in theirs)
            for mine, theirs in zip(self.ranges, other.ranges)
        )

    def runs(self, interval: Interval) -> Iterator[tuple[Interval, int]]:
        """Yields runs of the part's elements that lie beside each other in the whole tensor too.

        Args:
            interval: of the part, row-major.

        Yields:
            Intervals of the part, in order, each with the index in the whole tensor at which it starts.
        """
        cut = [dim for dim, size in enumerate(self.local_shape) if size != self.shape[dim]]
        if not cut or not self.numel:
            if interval.numel:
                yield interval, interval.start
            return
        # Behind the last cut dimension all is contiguous: runs end only there, so one loop over its ranges finds them
        # all.
        last = cut[-1]
        inner = prod(self.shape[last + 1 :])
        strides = [prod(self.shape[dim + 1 :]) for dim in range(last)]
        row_numel = self.local_shape[last] * inner
        outer_sizes = self.local_shape[:last]
        indices = [[i for each in ranges for i in range(each.start, each.stop)] for ranges in self.ranges[:last]]
        first, behind = interval.start // row_numel, -(-interval.stop // row_numel)
        for row in range(first, behind):
            begin = sum(
                indices[dim][at] * stride
                for dim, (at, stride) in enumerate(zip(_unravel(row, outer_sizes), strides, strict=True))
            )
            place = row * row_numel
            for each in self.ranges[last]:
                run = Interval(place, place + each.numel * inner)
                common = run.intersect(interval)
                if common is not None:
                    yield common, begin + each.start * inner + common.start - place
                place = run.stop

    def slices(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yields the part's blocks as indices of tensors: (in the whole tensor, in the part)."""
        placed = []
        for ranges in self.ranges:
            at, found = 0, []
            for each in ranges:
                found.append((slice(each.start, each.stop), slice(at, at + each.numel)))
                at += each.numel
            placed.append(found)
        for block in product(*placed):
            yield tuple(there for there, _ in block), tuple(here for _, here in block)


def _within(held: Sequence[Interval], wanted: Interval) -> Iterator[Interval]:
    """Yields the ranges of the `wanted` elements, counted through all ranges."""
    at = 0
    for each in held:
        common = Interval(at, at + each.numel).intersect(wanted)
        if common is not None:
            yield common.shift(each.start - at)
        at += each.numel


def _unravel(place: int, sizes: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(sizes):
        place, index = divmod(place, size)
        found.append(index)
    return found[::-1]


# ---- The saved pieces that fill a wanted interval: so any world size reads the files of any other ----

Source = TypeVar("Source")


@dataclass(frozen=True, kw_only=True)
class Piece(Generic[Source]):
    """Copy elements `in_source` of one saved piece to elements `in_target` of the wanted interval (both from 0)."""

    source: Source
    in_source: Interval
    in_target: Interval


def pieces_for(wanted: Interval, saved: Iterable[tuple[Interval, Source]]) -> list[Piece[Source]]:
    """Returns the copies that fill `wanted` from saved (interval, source) pairs, every element exactly once.

    Raises:
        ValueError: an element of `wanted` is in no saved interval, or in more than one.
    """
    pieces = []
    # By the interval alone: sources need have no order among themselves.
    for interval, source in sorted(saved, key=lambda pair: pair[0]):
        common = interval.intersect(wanted)
        if common is not None:
            pieces.append(
                Piece(source=source, in_source=common.shift(-interval.start), in_target=common.shift(-wanted.start))
            )
    targets = [piece.in_target for piece in pieces]
    # A checkpoint with a gap or an overlap must not load: uninitialised memory would pass for weights.
    missing, twice = uncovered(Interval(0, wanted.numel), targets), doubly_covered(targets)
    if missing or twice:
        fault, run = ("saved nowhere", missing[0]) if missing else ("saved more than once", twice[0])
        run = run.shift(wanted.start)
        raise ValueError(f"elements {run.start} to {run.stop} are {fault}")
    return pieces
