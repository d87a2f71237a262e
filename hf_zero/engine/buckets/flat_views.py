"""Views of many parts of one flat tensor, made in one call of torch."""

from collections.abc import Iterable, Sequence

import torch
from torch._utils import _unflatten_dense_tensors

from ...layout.intervals import Interval

_ANY_SHAPE = torch.empty((), device="meta")
"""Expanded to tensors that have a shape and no memory."""


class FlatViews:
    """Cuts flat tensors that are laid out alike. A view made in Python costs the host three times as much.

    Args:
        parts: interval of the flat tensor and shape of each view, in the order of the intervals, which do not overlap.
    """

    def __init__(self, parts: Iterable[tuple[Interval, Sequence[int]]]):
        self._like: list[torch.Tensor] = []
        self._places: list[int] = []
        self._without_elements: dict[int, Sequence[int]] = {}
        end = 0
        for number, (interval, shape) in enumerate(parts):
            if interval.start > end:
                self._like.append(_ANY_SHAPE.expand(interval.start - end))
            self._places.append(len(self._like))
            self._like.append(_ANY_SHAPE.expand(shape))
            end = max(end, interval.stop)
            if interval.numel == 0:
                self._without_elements[number] = shape

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The views of a 1-D tensor, each in its shape, row-major."""
        views = _unflatten_dense_tensors(flat, self._like)
        found = [views[place] for place in self._places]
        for number, shape in self._without_elements.items():
            found[number] = flat[:0].view(shape)
        return found
