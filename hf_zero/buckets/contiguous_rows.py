"""Neighbouring rows as one flat tensor, so that a kernel is launched once for many parameters."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from ..layout.intervals import Interval
from .bucket import Row


@dataclass(frozen=True, eq=False)
class Run:
    """Rows of one bucket that follow each other without a gap, and so do their gradients.

    Padding ends a run: what lies there is no gradient, and on an accelerator nobody has written it.

    Attributes:
        phase: what the rows have in common.
        interval: of the rank's shard.
        gradient: (interval.numel,), a view of the rows' gradients, or a copy of one that is not dense.
    """

    phase: Hashable
    interval: Interval
    gradient: torch.Tensor


def runs_of(rows: Iterable[Row], phase_of: Mapping[Row, Hashable] | None = None) -> list[Run]:
    """The fewest runs of rows that all have gradients, in the order of buckets and of places in them.

    Args:
        phase_of: rows of different phases do not share a run. None: all are alike.
    """
    found: list[list[tuple[Row, torch.Tensor]]] = []
    phases = phase_of or {}
    for row in sorted(rows, key=lambda row: (row.slot.bucket.layout.index, row.layout.in_shard.start)):
        here = (row, cast(torch.Tensor, row.tensor.grad).detach().contiguous())
        if found and _follows(found[-1][-1], here) and phases.get(row) == phases.get(found[-1][-1][0]):
            found[-1].append(here)
        else:
            found.append([here])
    return [_joined(run, phases.get(run[0][0])) for run in found]


def _follows(before: tuple[Row, torch.Tensor], after: tuple[Row, torch.Tensor]) -> bool:
    (last, last_gradient), (row, gradient) = before, after
    return (
        row.slot.bucket is last.slot.bucket
        and row.layout.in_shard.start == last.layout.in_shard.stop
        and gradient.dtype == last_gradient.dtype
        and gradient.untyped_storage().data_ptr() == last_gradient.untyped_storage().data_ptr()
        and gradient.data_ptr() == last_gradient.data_ptr() + last_gradient.nbytes
    )


def _joined(run: list[tuple[Row, torch.Tensor]], phase: Hashable) -> Run:
    (first, gradient), (last, _) = run[0], run[-1]
    interval = Interval(first.layout.in_shard.start, last.layout.in_shard.stop)
    return Run(phase, interval, gradient.as_strided((interval.numel,), (1,)))
