"""Reductions of a bucket's gradients: reduce-scatter, all-reduce, or both over two groups."""

from collections.abc import Iterable, Iterator

import torch

from ..buckets.bucket import Bucket
from ..buckets.rows import KindsOf, Read, StateRow
from ..comm.steps_in_order import StepsInOrder
from ..comm.transport import Handle
from ..queues import SideQueue


class Reduction:
    """Sums buckets over the ranks, in this class by an exact reduce-scatter.

    Subclasses may be lossy, and may keep state between passes. Checkpoints store this state.

    Args:
        of: name of the summed values in the ledger.
    """

    def __init__(self, of: str = "gradients"):
        self._kind = f"reduce-scatter of {of}"

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        """Starts the sum of `flat` (numel,) over the ranks, and writes this rank's shard of the sum to `out` (shard_numel,).

        `out` may be this rank's slice of `flat`. The contents of `flat` are undefined afterwards.
        """
        return bucket.group.transport.start_reduce_scatter(flat, out, bucket.labels[self._kind])

    def end_pass(self) -> None:
        """Called on every rank when all reductions of a backward pass have ended."""

    @property
    def held_bytes(self) -> int:
        """Bytes of lasting state."""
        return 0

    @property
    def error(self) -> float | None:
        """Relative error of a recently sampled reduced gradient; None if the reduction is exact."""
        return None

    def rows(self) -> Iterator[StateRow]:
        """Yields copies of this rank's lasting state."""
        return iter(())

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        """Replaces lasting state by a checkpoint's state. Arguments as in `fill_rows`.

        A reduction without state ignores the saved one. So rounding residuals of the saved run are lost, at most half a
        quantization step of its blocks.
        """


class ReplicatedReduction(Reduction):
    """An all-reduce, for buckets whose parameters every rank steps; `out` may be `flat` itself."""

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        label, transport = bucket.labels["all-reduce of gradients"], bucket.group.transport
        handle = transport.start_all_reduce(flat, label)
        if out.data_ptr() == flat.data_ptr():
            return handle

        def complete() -> None:
            handle.finish()
            # After the wait, because `flat` is the all-reduce's buffer until then.
            out.copy_(flat)

        return Handle(label, transport.ledger, complete)


class HybridReduction(Reduction):
    """A reduction inside the shard group, followed by an all-reduce of each shard over its replicate group.

    Hybrid sharding: Zhang et al. 2022, "MiCS", arXiv 2205.00119. With R shard groups of S ranks, and n elements in a bucket, each
    rank sends 2(R-1)/R x n/S elements between the groups.

    Args:
        within: the reduction inside the shard group.
        order: starts all steps between ranks of a replicate group in the same order.
        queue: side queue in which the second sum waits for the first.
        of: name of the summed values in the ledger.
    """

    def __init__(
        self,
        within: Reduction,
        order: StepsInOrder,
        queue: SideQueue,
        of: str = "shards of gradients",
    ):
        self._within = within
        self._order = order
        self._queue = queue
        self._kind = f"all-reduce of {of}"

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        label, transport = bucket.labels[self._kind], bucket.group.transport
        steps = self._order.begin(
            lambda: self._within.start(bucket, flat, out),
            lambda: transport.start_all_reduce(out, label),
            queue=self._queue,
        )
        return Handle(label, transport.ledger, steps.finish, steps.start_last)
