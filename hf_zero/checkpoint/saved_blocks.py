"""A part of a tensor, assembled from blocks in checkpoints of other layouts."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..layout.boxes import Box
from ..layout.intervals import Interval

_Slices = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class SavedBlock:
    """A rectangular block of a tensor: consecutive elements along each dimension.

    Attributes:
        offsets, sizes: in the whole tensor, one per dimension.
        load: returns the values, of shape `sizes`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    load: Callable[[], torch.Tensor]


def read_blocks(box: Box, interval: Interval, blocks: Iterable[SavedBlock]) -> torch.Tensor:
    """Reads the elements `interval`, in row-major order, of a part of a tensor as a 1-D tensor. Loads only overlapping blocks.

    Args:
        box: the part of the whole tensor.
        blocks: together contain each element of the whole tensor exactly once.
    """
    row_numel = math.prod(box.local_shape[1:])
    if interval.numel == 0 or row_numel == 0:
        return torch.empty(0)
    rows = Interval(interval.start // row_numel, -(-interval.stop // row_numel))
    part = box.narrow(0, rows)
    wanted = list(part.slices())
    buffer: torch.Tensor | None = None
    for block in blocks:
        common = [both for there, here in wanted if (both := _overlap(block, there, here)) is not None]
        if not common:
            continue
        values = block.load()
        if buffer is None:
            buffer = torch.empty(part.local_shape, dtype=values.dtype)
        for in_block, in_part in common:
            buffer[in_part] = values[in_block]
    assert buffer is not None
    first = interval.start - rows.start * row_numel
    return buffer.reshape(-1)[first : first + interval.numel]


def _overlap(block: SavedBlock, there: _Slices, here: _Slices) -> tuple[_Slices, _Slices] | None:
    """Returns the slices of the common elements of a saved block and a part, in the block and in the part; None without any.

    Args:
        there, here: the slices of a block of the part, in the whole tensor and in the part.
    """
    in_block, in_part = [], []
    for offset, size, whole, own in zip(block.offsets, block.sizes, there, here, strict=True):
        start, stop = max(offset, whole.start), min(offset + size, whole.stop)
        if start >= stop:
            return None
        in_block.append(slice(start - offset, stop - offset))
        in_part.append(slice(start - whole.start + own.start, stop - whole.start + own.start))
    return tuple(in_block), tuple(in_part)
