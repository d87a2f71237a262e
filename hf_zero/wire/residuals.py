"""Error feedback: the rounding errors of quantised gradients, kept between steps and in checkpoints.

[Note: residuals] A residual is what its rank has been given to send and has not sent, in units of the averaged gradient.
Only the sum of all residuals ever reaches a parameter, so a run on other ranks, or on other groups of them, has to go on
with the same sum: each saved residual is added to one of the new run's. Two things are let go: what had been left of a
parameter that no rank uses in a pass, and, under a loss scale that changes, the difference once.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from ..buckets.bucket import Bucket
from ..buckets.rows import RESIDUAL, KindsOf, Read, StateRow
from ..comm.groups import Groups
from ..device import allocate
from ..layout.intervals import Interval

BETWEEN = f"{RESIDUAL}between."
"""Begins the kind of what has not been sent between shard groups; the number of the shard group follows, whose ranks have a
part each."""

OF_SUMS = f"{RESIDUAL}sums"
"""The kind of what has not been sent of the sums over all ranks, of which each rank has a part."""


class Residuals:
    """Those of one collective on this rank, one a bucket.

    Args:
        kind_in: of their rows in a checkpoint, by the ranks that share a bucket.
        interval_of: what of a bucket this rank sends.
        takes: of a saved kind, whether they are added to by it among those ranks.
    """

    def __init__(
        self,
        kind_in: Callable[[Groups], str],
        interval_of: Callable[[Bucket], Interval],
        takes: Callable[[str, Groups], bool],
    ):
        self._kind_in = kind_in
        self._interval_of = interval_of
        self._takes = takes
        self._of: dict[Bucket, torch.Tensor] = {}

    @property
    def held_bytes(self) -> int:
        return sum(residual.nbytes for residual in self._of.values())

    def of(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's, 1-D bfloat16, zeros at first."""
        if bucket not in self._of:
            self._of[bucket] = allocate(self._interval_of(bucket).numel, torch.bfloat16, bucket.device).zero_()
        return self._of[bucket]

    def rows(self) -> Iterator[StateRow]:
        """All of them, copied: the next backward writes into them, before the step up to which a save may take its time."""
        for bucket, residual in self._of.items():
            kind = self._kind_in(bucket.group.groups)
            for name, in_parameter, in_residual in self._cuts(bucket):
                yield StateRow(
                    kind=kind,
                    name=name,
                    interval=in_parameter,
                    own_shape=None,
                    tensor=residual[in_residual].to("cpu", copy=True),
                )

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        """Replaces them by those of a checkpoint that they are to take; the arguments are `fill_rows`'s."""
        self._of.clear()
        for bucket in buckets:
            for name, in_parameter, in_residual in self._cuts(bucket):
                for kind in (kind for kind in kinds_of(name) if self._takes(kind, bucket.group.groups)):
                    place = self.of(bucket)[in_residual]
                    place.add_(read(kind, name, in_parameter).to(place.device))

    def _cuts(self, bucket: Bucket) -> Iterator[tuple[str, Interval, slice]]:
        """Yields name, interval of the parameter and slice of the residual, for each parameter in the residual."""
        interval = self._interval_of(bucket)
        for slot in bucket.slots:
            common = slot.interval.intersect(interval)
            if common is not None:
                here = common.shift(-interval.start)
                yield slot.name, common.shift(-slot.interval.start), slice(here.start, here.stop)
