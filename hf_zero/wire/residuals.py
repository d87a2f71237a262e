"""Error feedback: the rounding errors of quantized gradients, kept between steps and in checkpoints.

[Note: residuals] A rank's residual is the part of its gradients that it should have sent and has not sent yet, in units of the
averaged gradient. Only the sum of all residuals ever reaches a parameter. So a run with other ranks or other shard groups must
continue with the same sum: each saved residual is added to one residual of the new run. Two parts are dropped: the residual of a
parameter that no rank uses in a pass, and, if the loss scale changes, the difference once.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from ..allocation import allocate
from ..buckets.bucket import Bucket
from ..buckets.rows import RESIDUAL, KindsOf, Read, StateRow
from ..comm.groups import Groups
from ..layout.intervals import Interval

OF_RANKS = f"{RESIDUAL}*"
"""The kind of residuals of the ranks' gradients. Each rank stores one of whole parameters. When a checkpoint is read, the star is
the rank's number."""

BETWEEN = f"{RESIDUAL}between."
"""Prefix of residuals between shard groups, followed by the shard group's number. Each rank of the group stores a part."""

OF_GROUPS = f"{BETWEEN}*"
"""The kind of these residuals of all shard groups."""

OF_SUMS = f"{RESIDUAL}sums"
"""The kind of residuals of the sums over all ranks. Each rank stores a part."""


class Residuals:
    """The residuals of one collective on this rank, one for each bucket.

    Args:
        kind: the kind of their rows in a checkpoint.
        of_each: see `StateRow`, given the ranks that share a bucket.
        interval_of: returns the interval of a bucket that this rank sends.
        begins: beginning of the saved kinds that these residuals load, on some rank.
        takes: whether this rank's residuals load one of these, given the ranks that share a bucket.
    """

    def __init__(
        self,
        kind: str,
        of_each: Callable[[Groups], tuple[int, int] | None],
        interval_of: Callable[[Bucket], Interval],
        begins: str,
        takes: Callable[[str, Groups], bool],
    ):
        self._kind = kind
        self._of_each = of_each
        self._interval_of = interval_of
        self._begins = begins
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
            of_each = self._of_each(bucket.group.groups)
            for name, in_parameter, in_residual in self._cuts(bucket):
                yield StateRow(
                    kind=self._kind,
                    name=name,
                    interval=in_parameter,
                    own_shape=None,
                    tensor=residual[in_residual].to("cpu", copy=True),
                    of_each=of_each,
                )

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        """Replaces all residuals by the residuals of a checkpoint; for the arguments see `fill_rows`."""
        self._of.clear()
        for bucket in buckets:
            for name, in_parameter, in_residual in self._cuts(bucket):
                for kind in (kind for kind in kinds_of(name) if kind.startswith(self._begins)):
                    # Also make the residual of a rank that loads none: a save before the next backward needs those of all ranks.
                    target = self.of(bucket)[in_residual]
                    if self._takes(kind, bucket.group.groups):
                        target.add_(read(kind, name, in_parameter).to(target.device))

    def _cuts(self, bucket: Bucket) -> Iterator[tuple[str, Interval, slice]]:
        """Yields (name, interval of the parameter, slice of the residual) for each parameter in the residual."""
        interval = self._interval_of(bucket)
        for slot in bucket.slots:
            common = slot.interval.intersect(interval)
            if common is not None:
                here = common.shift(-interval.start)
                yield slot.name, common.shift(-slot.interval.start), slice(here.start, here.stop)
