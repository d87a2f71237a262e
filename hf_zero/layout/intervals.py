"""Half-open intervals of elements, the unit of shards and of checkpoint files."""

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """The elements `start <= i < stop` of a flat sequence."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def shift(self, by: int) -> "Interval":
        return Interval(self.start + by, self.stop + by)

    def intersect(self, other: "Interval") -> "Interval | None":
        """The elements in both intervals, or None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else None


def uncovered(whole: Interval, parts: Iterable[Interval]) -> list[Interval]:
    """Returns the runs of `whole` that no part covers, in order. Parts may touch, overlap, and have any order."""
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
