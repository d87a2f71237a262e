"""Finds the saved pieces for a wanted interval, so any world size can read the files of any other."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .intervals import Interval, doubly_covered, uncovered

Source = TypeVar("Source")


@dataclass(frozen=True, kw_only=True)
class Piece(Generic[Source]):
    """Copies elements `in_source` of a saved piece to elements `in_target` of the wanted interval; both count from 0."""

    source: Source
    in_source: Interval
    in_target: Interval


def pieces_for(wanted: Interval, saved: Iterable[tuple[Interval, Source]]) -> list[Piece[Source]]:
    """Returns the copies from saved (interval, source) pairs to `wanted`, with each element exactly once.

    Raises:
        ValueError: an element of `wanted` is in no saved interval, or in more than one.
    """
    pieces = []
    # Compare intervals only, because sources need not be orderable.
    for interval, source in sorted(saved, key=lambda pair: pair[0]):
        common = interval.intersect(wanted)
        if common is not None:
            pieces.append(
                Piece(source=source, in_source=common.shift(-interval.start), in_target=common.shift(-wanted.start))
            )
    targets = [piece.in_target for piece in pieces]
    # A checkpoint with a gap must not load, because uninitialized memory would be used as weights. The same holds for overlaps.
    missing, twice = uncovered(Interval(0, wanted.numel), targets), doubly_covered(targets)
    if missing or twice:
        fault, run = ("saved nowhere", missing[0]) if missing else ("saved more than once", twice[0])
        run = run.shift(wanted.start)
        raise ValueError(f"elements {run.start} to {run.stop} are {fault}")
    return pieces
