"""Error feedback: the rounding errors of quantised gradients, kept between steps and in checkpoints.

[Note: residuals] A rank's residual is the part of its gradients that it should have sent and has not sent yet, in units of the
averaged gradient. Only the sum of all residuals ever reaches a parameter. So a run with other ranks or other shard groups must
continue with the same sum: each saved residual is added to one residual of the new run. Two parts are dropped: the residual of a
parameter that no rank uses in a pass, and, if the loss scale changes, the difference once.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from ..buckets.bucket import Bucket
from ..buckets.rows import RESIDUAL, KindsOf, Read, StateRow
from ..comm.groups import Groups
from ..device import allocate
from ..layout.intervals import Interval

BETWEEN = f"{RESIDUAL}between."
"""Prefix of the kind of residuals between shard groups. The index of the shard group follows, and each of its ranks stores a
part."""

OF_SUMS = f"{RESIDUAL}sums"
"""The kind of residuals of the sums over all ranks. Each rank stores a part."""


class Residuals:
    """The residuals of one collective on this rank, one for each bucket.

    Args:
        kind_in: returns the kind of their rows in a checkpoint, given the ranks that share a bucket.
        interval_of: returns the interval of a bucket that this rank sends.
        takes: whether these residuals load a saved kind, given the ranks that share a bucket.
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
        """Returns the residual of a bucket, 1-D bfloat16, zeros at first."""
        if bucket not in self._of:
            self._of[bucket] = allocate(self._interval_of(bucket).numel, torch.bfloat16, bucket.device).zero_()
        return self._of[bucket]

    def rows(self) -> Iterator[StateRow]:
        """Yields copies of all residuals, because the next backward modifies them before a background save has finished."""
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
        """Replaces all residuals by the residuals of a checkpoint; for the arguments see `fill_rows`."""
        self._of.clear()
        for bucket in buckets:
            for name, in_parameter, in_residual in self._cuts(bucket):
                for kind in (kind for kind in kinds_of(name) if self._takes(kind, bucket.group.groups)):
                    target = self.of(bucket)[in_residual]
                    target.add_(read(kind, name, in_parameter).to(target.device))

    def _cuts(self, bucket: Bucket) -> Iterator[tuple[str, Interval, slice]]:
        """Yields (name, interval of the parameter, slice of the residual) for each parameter in the residual."""
        interval = self._interval_of(bucket)
        for slot in bucket.slots:
            common = slot.interval.intersect(interval)
            if common is not None:
                here = common.shift(-interval.start)
                yield slot.name, common.shift(-slot.interval.start), slice(here.start, here.stop)
