"""Cuts a batch into parts along its rows."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

IGNORED = -100
"""The label of a token that has no loss."""


class Part(NamedTuple):
    """Some rows of a batch.

    Attributes:
        weight: what the part's mean loss counts in the batch's; 0 for a part that is there for the other ranks' sake.
    """

    inputs: Any
    weight: float


def rows_of(batch: Any) -> int | None:
    """How many rows a batch has; None where its tensors do not have the same number of rows, and it cannot be cut.

    A tensor whose first dimension is 1 belongs to all rows.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim() > 0}
    sizes = sizes - {1} or sizes
    return sizes.pop() if len(sizes) == 1 else None


def cut(batch: Any, count: int) -> list[Part]:
    """`count` parts of as many rows each as can be, the larger ones first.

    A batch of fewer rows has its first row in the rest of the parts, with weight 0.

    Raises:
        ValueError: it has no rows to cut along.
    """
    rows = rows_of(batch)
    if rows is None:
        raise ValueError("the tensors of the batch do not have the same number of rows")
    bounds = [(rows * i // count, rows * (i + 1) // count) for i in range(count)]
    spans = sorted(bounds, key=lambda span: span[0] - span[1])
    whole = _numbers(batch, 0, rows)
    parts = []
    for start, stop in spans:
        is_empty = start == stop
        inputs = _rows(batch, rows, 0, 1) if is_empty else _rows(batch, rows, start, stop)
        weight = 0.0 if is_empty or not whole else _numbers(batch, start, stop) / whole
        parts.append(Part(inputs, weight))
    return parts


def _numbers(batch: Any, start: int, stop: int) -> int:
    """What a mean loss is a mean over: the labels of tokens that have a loss, or else rows."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point():
        return int((labels[start:stop] != IGNORED).sum())
    return stop - start


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in _tensors(value)]
    if isinstance(batch, list | tuple):
        return [tensor for value in batch for tensor in _tensors(value)]
    return []


def _rows(batch: Any, rows: int, start: int, stop: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() > 0 and batch.shape[0] == rows else batch
    if isinstance(batch, Mapping):
        return {name: _rows(value, rows, start, stop) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        is_of_rows = isinstance(batch, list) and len(batch) == rows and not _tensors(batch)
        return batch[start:stop] if is_of_rows else type(batch)([_rows(value, rows, start, stop) for value in batch])
    return batch
