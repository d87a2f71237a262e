"""Views of many parts of one flat tensor, made in one call of torch."""

from collections.abc import Iterable, Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..layout.intervals import Interval

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
        self._end = end = 0
        for number, (interval, shape) in enumerate(parts):
            if interval.start > end:
                self._like.append(_ANY_SHAPE.expand(interval.start - end))
            self._places.append(len(self._like))
            self._like.append(_ANY_SHAPE.expand(shape))
            self._end = end = max(end, interval.stop)
            if interval.numel == 0:
                self._without_elements[number] = shape
        self._gaps = sorted(set(range(len(self._like))) - set(self._places))
        self._between: list[torch.Tensor] = []

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The views of a 1-D tensor, each in its shape, row-major."""
        views = _unflatten_dense_tensors(flat, self._like)
        found = [views[place] for place in self._places]
        for number, shape in self._without_elements.items():
            found[number] = flat[:0].view(shape)
        return found

    def fill(self, flat: torch.Tensor, values: Sequence[torch.Tensor], factor: float) -> None:
        """Writes `values` times `factor` into the views of a 1-D tensor, and zeros between and behind them.

        In a few operations whatever their number, by way of one more tensor of that size.

        Args:
            values: one for each view, in their shapes and order, of the dtype of `flat`.
        """
        parts = list(self._like)
        for place, value in zip(self._places, values):
            parts[place] = value
        if self._gaps and not (self._between and _are_alike(self._between[0], flat)):
            longest = max(self._like[place].numel() for place in self._gaps)
            zeros = torch.zeros(longest, dtype=flat.dtype, device=flat.device)
            self._between = [zeros[: self._like[place].numel()] for place in self._gaps]
        for place, zeros in zip(self._gaps, self._between):
            parts[place] = zeros
        packed, filled = _flatten_dense_tensors(parts), flat[: self._end]
        torch.mul(packed, factor, out=filled)
        flat[self._end :].zero_()


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device
