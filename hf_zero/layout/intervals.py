"""Half-open intervals of elements, the unit of shards and of checkpoint files."""

from collections.abc import Iterable
from dataclasses import dataclass
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
    """Returns the uncovered runs of `whole`, in order. Parts may touch, overlap, and have any order."""
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
    """Returns the runs covered by two or more parts, in order of the later part's start."""
    found, end = [], None
    for part in sorted(parts):
        if end is not None and part.start < end:
            found.append(Interval(part.start, min(end, part.stop)))
        end = part.stop if end is None else max(end, part.stop)
    return found


def joined_intervals(parts: Iterable[Interval]) -> list[Interval]:
    """Returns the elements of all parts as intervals in order that do not touch."""
    found: list[Interval] = []
    for part in sorted(parts):
        if found and part.start <= found[-1].stop:
            found[-1] = Interval(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return found


@dataclass(frozen=True)
class EvenCuts:
    """Intervals next to each other: the first ends at `cut`, each further one has `numel` elements, and the last ends at `stop`.

    Shards of equal size cut a parameter this way, so four integers describe its parts on any number of ranks. A single interval
    has `cut` and `stop` equal, and `numel` 0.
    """

    start: int
    cut: int
    numel: int
    stop: int

    @property
    def is_valid(self) -> bool:
        """Whether these are intervals; only a single one may be empty."""
        if self.cut == self.stop:
            return self.start <= self.stop and self.numel == 0
        return self.start < self.cut < self.stop and 0 < self.numel <= self.stop - self.cut

    @property
    def count(self) -> int:
        return 1 + (-((self.cut - self.stop) // self.numel) if self.numel else 0)

    @property
    def whole(self) -> Interval:
        """The elements of all intervals."""
        return Interval(self.start, self.stop)

    def interval(self, index: int) -> Interval:
        if index == 0:
            return Interval(self.start, self.cut)
        start = self.cut + (index - 1) * self.numel
        return Interval(start, min(start + self.numel, self.stop))

    def of(self, indices: range) -> "EvenCuts":
        """Returns the intervals with these indices, which are neighbors."""
        start, cut = self.interval(indices[0])
        stop = self.interval(indices[-1]).stop
        # The last interval may be shorter than the others.
        return EvenCuts(start, cut, min(self.numel, stop - cut), stop)

    def about(self, wanted: Interval) -> range:
        """Returns the indices of the intervals that share an element with `wanted`."""
        common = self.whole.intersect(wanted)
        if common is None:
            return range(0)
        first = 0 if common.start < self.cut else 1 + (common.start - self.cut) // self.numel
        # Index of the interval with the last wanted element, plus one.
        stop = 1 if common.stop <= self.cut else 2 + (common.stop - 1 - self.cut) // self.numel
        return range(first, stop)


def even_cuts(parts: Iterable[tuple[Interval, int]]) -> list[tuple[EvenCuts, range]]:
    """Joins parts of one tensor, each with its rank, into as few `EvenCuts` on evenly spaced ranks as these allow."""
    found: list[tuple[EvenCuts, range]] = []
    start = cut = numel = stop = first = last = step = count = 0
    # Plain integers: rank 0 joins the parts of all ranks, and there may be millions.
    for (begin, end), rank in sorted(parts):
        if begin == stop < end:
            if count == 1 and start < cut and rank > last:
                numel, step, stop, last, count = end - begin, rank - last, end, rank, 2
                continue
            # After an interval shorter than `numel` there is no other.
            if count > 1 and rank - last == step and end - begin <= numel and not (stop - cut) % numel:
                stop, last, count = end, rank, count + 1
                continue
        if count:
            found.append((EvenCuts(start, cut, numel, stop), range(first, last + 1, step)))
        start, cut, numel, stop, first, last, step, count = begin, end, 0, end, rank, rank, 1, 1
    if count:
        found.append((EvenCuts(start, cut, numel, stop), range(first, last + 1, step)))
    return found


Cuts = tuple[EvenCuts, range]
"""Parts of one tensor, and the evenly spaced ranks that have them."""


def joined_cuts(pieces: Iterable[Cuts]) -> list[Cuts]:
    """Joins parts of one tensor on different ranks into as few `EvenCuts` as `even_cuts` makes of all of them."""
    found: list[Cuts] = []
    for piece in sorted(pieces, key=lambda piece: (piece[0].start, piece[1].start)):
        joined = _join(*found[-1], *piece) if found else None
        if joined is None:
            found.append(piece)
        else:
            found[-1] = joined
    return found


def _join(one: EvenCuts, of_one: range, other: EvenCuts, of_other: range) -> Cuts | None:
    """Joins parts with the parts after them; returns None if they are not evenly cut together."""
    step, first = of_other.start - of_one[-1], other.cut - other.start
    if one.stop != other.start or step < 1 or one.cut == one.start or first == 0:
        return None
    if any(len(ranks) > 1 and ranks.step != step for ranks in (of_one, of_other)):
        return None
    numel = one.numel or first
    # After an interval shorter than `numel` there is no other.
    if (one.stop - one.cut) % numel or first > numel or (other.numel and first < numel):
        return None
    if other.numel > numel or (len(of_other) > 2 and other.numel < numel):
        return None
    return EvenCuts(one.start, one.cut, numel, other.stop), range(of_one.start, of_other[-1] + 1, step)


def without_ranks(cuts: EvenCuts, ranks: range, gone: Iterable[Interval]) -> list[Cuts]:
    """Returns the parts of the ranks that are in none of these intervals of ranks."""

    def index(rank: int) -> int:
        """Index of the first rank that is not below this one."""
        return min(len(ranks), max(0, -((ranks.start - rank) // ranks.step)))

    there = Interval(0, len(ranks))
    left = uncovered(there, [Interval(index(start), index(stop)) for start, stop in gone])
    # A single rank has step 1.
    kept = [(each, ranks[each.start : each.stop]) for each in left]
    return [(cuts.of(range(*each)), own if len(own) > 1 else range(own[0], own[0] + 1)) for each, own in kept]
