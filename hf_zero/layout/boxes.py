"""A rank's elements of a tensor split along its dimensions by tensor or expert parallelism."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from .intervals import Interval


@dataclass(frozen=True)
class Box:
    """Part of a whole tensor: the product of some index ranges along each dimension.

    Attributes:
        shape: shape of the whole tensor.
        ranges: for each dimension, index ranges in ascending order; none is empty unless the part is empty.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Interval, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Returns the box of the whole tensor."""
        return cls(tuple(shape), tuple((Interval(0, size),) for size in shape))

    def split(self, dim: int, parts: int, index: int, *, repeats: int = 1) -> "Box":
        """Cuts this part along a dimension as `torch.chunk` does, and returns number `index` of `parts`.

        Args:
            repeats: number of tensors that are concatenated along the dimension (gate and up projection); each is cut separately.
        """
        held = self.ranges[dim]
        numel = sum(each.numel for each in held)
        size = -(-numel // (parts * repeats))
        starts = [size * (index + parts * repeat) for repeat in range(repeats)]
        wanted = [Interval(min(start, numel), min(start + size, numel)) for start in starts]
        kept = tuple(piece for each in wanted for piece in _within(held, each))
        return Box(self.shape, (*self.ranges[:dim], kept, *self.ranges[dim + 1 :]))

    def narrow(self, dim: int, interval: Interval) -> "Box":
        """Keeps the elements of this part whose index along `dim` is in `interval`."""
        kept = tuple(_within(self.ranges[dim], interval))
        return Box(self.shape, (*self.ranges[:dim], kept, *self.ranges[dim + 1 :]))

    def stacked(self, count: int) -> "Box":
        """Returns this part of each of `count` tensors, stacked along a new first dimension."""
        return Box((count, *self.shape), ((Interval(0, count),), *self.ranges))

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
        """Whether both parts contain a common element of the whole tensor."""
        return all(
            any(one.intersect(another) for one in mine for another in theirs)
            for mine, theirs in zip(self.ranges, other.ranges)
        )

    def runs(self, interval: Interval) -> Iterator[tuple[Interval, int]]:
        """Yields runs of the part's elements, if contiguous in the whole tensor as well.

        Args:
            interval: elements of the part, in row-major order.

        Yields:
            Intervals of the part, in order, each with the index in the whole tensor where it starts.
        """
        cut = [dim for dim, size in enumerate(self.local_shape) if size != self.shape[dim]]
        if not cut or not self.numel:
            if interval.numel:
                yield interval, interval.start
            return
        # Dimensions after the last cut one are contiguous, so runs end only at ranges of the last cut dimension.
        last = cut[-1]
        inner = prod(self.shape[last + 1 :])
        strides = [prod(self.shape[dim + 1 :]) for dim in range(last)]
        row_numel = self.local_shape[last] * inner
        outer_sizes = self.local_shape[:last]
        indices = [[i for each in ranges for i in range(each.start, each.stop)] for ranges in self.ranges[:last]]
        first, stop = interval.start // row_numel, -(-interval.stop // row_numel)
        for row in range(first, stop):
            begin = sum(
                indices[dim][at] * stride
                for dim, (at, stride) in enumerate(zip(_unravel(row, outer_sizes), strides, strict=True))
            )
            offset = row * row_numel
            for each in self.ranges[last]:
                run = Interval(offset, offset + each.numel * inner)
                common = run.intersect(interval)
                if common is not None:
                    yield common, begin + each.start * inner + common.start - offset
                offset = run.stop

    def slices(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yields the contiguous blocks of the part as pairs of indices: (in the whole tensor, in the part)."""
        found_blocks = []
        for ranges in self.ranges:
            at, found = 0, []
            for each in ranges:
                found.append((slice(each.start, each.stop), slice(at, at + each.numel)))
                at += each.numel
            found_blocks.append(found)
        for block in product(*found_blocks):
            yield tuple(there for there, _ in block), tuple(here for _, here in block)


def _within(held: Sequence[Interval], wanted: Interval) -> Iterator[Interval]:
    """Yields the ranges of the `wanted` elements, whose numbers count through all ranges of `held`."""
    at = 0
    for each in held:
        common = Interval(at, at + each.numel).intersect(wanted)
        if common is not None:
            yield common.shift(each.start - at)
        at += each.numel


def _unravel(offset: int, sizes: Sequence[int]) -> list[int]:
    found = []
    for size in reversed(sizes):
        offset, index = divmod(offset, size)
        found.append(index)
    return found[::-1]
