"""Neighboring rows as one flat tensor: one kernel launch for many parameters."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat, starmap
from operator import attrgetter, is_not
from typing import Any

import torch

from ..layout.intervals import Interval
from .bucket import BUCKET_OF, ROWS_OF, Bucket, Row
from .clipped_gradient import plain_gradient
from .gradients import flat_gradients, laid_gradients_of


@dataclass(eq=False, slots=True)
class Run:
    """Contiguous rows of one bucket, with contiguous gradients.

    Padding ends a run, because its memory has no gradient and is uninitialized on an accelerator.

    Attributes:
        phase: a value shared by all rows.
        interval: the run's interval of the rank's shard.
        gradient: (interval.numel,), a view of the rows' gradients, or a copy if one of them is not dense.
    """

    phase: Hashable
    interval: Interval
    gradient: torch.Tensor


_PLACE = attrgetter("slot.bucket.layout.index", "layout.in_shard.start")
_INDEX = attrgetter("layout.index")


def runs_of(rows: Iterable[Row], phase_of: Mapping[Row, Hashable] | None = None) -> list[Run]:
    """Joins rows with gradients into the fewest runs, in the order of buckets and rows.

    Args:
        rows: the rows.
        phase_of: rows with different phases do not share a run. None: one phase for all.
    """
    # A caller whose kernel multiplies by clip coefficients must take the coefficients before this call.
    rows = list(rows)
    phases = {None} if phase_of is None else set(phase_of.values())
    buckets = sorted(set(map(BUCKET_OF, rows)), key=_INDEX)
    if len(phases) == 1 and len(rows) == sum(map(len, map(ROWS_OF, buckets))):
        (phase,) = phases
        laid = laid_gradients_of(buckets)
        flats: list[Any] = laid[0] if laid is not None and laid[1] is None else [flat_gradients(b) for b in buckets]
        if all(map(is_not, flats, repeat(None))):
            # The usual case, without a Python loop over rows.
            return list(starmap(partial(Run, phase), chain.from_iterable(flats)))
    return _runs_row_by_row(rows, phase_of)


def _runs_row_by_row(rows: Iterable[Row], phase_of: Mapping[Row, Hashable] | None) -> list[Run]:
    # Runs for each parameter in each step, so the loop calls no Python function per row.
    ordered = sorted(rows, key=_PLACE)
    held: list[Any] = [row.tensor.grad for row in ordered]
    gradients = [each if type(each) is torch.Tensor else plain_gradient(each) for each in held]
    if not all(map(torch.Tensor.is_contiguous, gradients)):
        gradients = [gradient.contiguous() for gradient in gradients]
    phases = repeat(None) if phase_of is None else [phase_of[row] for row in ordered]
    found: list[Run] = []
    bucket: Bucket | None = None
    phase: Hashable = None
    dtype: torch.dtype | None = None
    first, start, stop, end, memory_end = None, 0, 0, 0, 0
    for row, gradient, address, own_phase in zip(ordered, gradients, map(torch.Tensor.data_ptr, gradients), phases):
        part, here = row.layout.in_shard, row.slot.bucket
        if (
            first is not None
            and here is bucket
            and part.start == stop
            and address == end
            and gradient.dtype == dtype
            # Adjacent addresses do not suffice: two allocations may be adjacent, and torch refuses a view beyond its storage.
            and address + gradient.nbytes <= memory_end
            and own_phase == phase
        ):
            stop, end = part.stop, address + gradient.nbytes
            continue
        if first is not None:
            found.append(_run(phase, start, stop, first))
        first, bucket, phase, dtype = gradient, here, own_phase, gradient.dtype
        (start, stop), end = part, address + gradient.nbytes
        memory = gradient.untyped_storage()
        memory_end = memory.data_ptr() + memory.nbytes()
    if first is not None:
        found.append(_run(phase, start, stop, first))
    return found


def _run(phase: Hashable, start: int, stop: int, first: torch.Tensor) -> Run:
    return Run(phase, Interval(start, stop), first.as_strided((stop - start,), (1,)))
