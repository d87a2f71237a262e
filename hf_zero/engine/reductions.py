"""Reductions of a bucket's gradients: reduce-scatter, all-reduce, or both over two groups."""

from collections.abc import Iterable, Iterator

import torch

from ..buckets.bucket import Bucket
from ..buckets.rows import KindsOf, Read, StateRow
from ..comm.transport import Handle, StepsInOrder
from ..device import SideQueue


class Reduction:
    """Sums buckets over the ranks: here by a reduce-scatter of the gradients as they are.

    Other ways may lose something, and keep state between passes, which goes into checkpoints.

    Args:
        of: what is summed, for the ledger.
    """

    def __init__(self, of: str = "gradients"):
        self._kind = f"reduce-scatter {of}"

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        """Starts the sum of `flat` (numel,) over the ranks; this rank's (shard_numel,) of it land in `out`.

        `out` may be this rank's part of `flat`, whose contents are undefined afterwards.
        """
        return bucket.group.transport.start_reduce_scatter(flat, out, bucket.label(self._kind))

    def end_pass(self) -> None:
        """Called on every rank when all reductions of a backward pass have ended."""

    @property
    def held_bytes(self) -> int:
        """Bytes of lasting state."""
        return 0

    @property
    def error(self) -> float | None:
        """Relative error of a reduced gradient that was sampled lately; None where nothing is lost."""
        return None

    def rows(self) -> Iterator[StateRow]:
        """This rank's lasting state, copied."""
        return iter(())

    def fill(self, buckets: Iterable[Bucket], read: Read, kinds_of: KindsOf) -> None:
        """Replaces lasting state by a checkpoint's; the arguments are `fill_rows`'s.

        Where nothing is kept, what another run has not sent stays unsent: at most half a step of its blocks.
        """


class ReplicatedReduction(Reduction):
    """An all-reduce, where every rank steps all parameters; `out` may be `flat` itself."""

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        label, transport = bucket.label("all-reduce gradients"), bucket.group.transport
        handle = transport.start_all_reduce(flat, label)
        if out.data_ptr() == flat.data_ptr():
            return handle

        def complete() -> None:
            handle.finish()
            out.copy_(flat)

        return Handle(label, transport.ledger, complete)


class HybridReduction(Reduction):
    """A sum inside the shard group, and then of each shard over its replicate group.

    Hybrid sharding: Zhang et al. 2022, "MiCS", arXiv 2205.00119. Of a bucket with n elements in shard groups of S ranks, of
    which there are R, 2(R-1)/R x n/S elements go between the groups.

    Args:
        within: the sum inside the shard group.
        order: that all steps between ranks of a replicate group are started in.
        queue: in which the second sum waits for the first.
        of: what is summed, for the ledger.
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
        self._kind = f"all-reduce {of}"

    def start(self, bucket: Bucket, flat: torch.Tensor, out: torch.Tensor) -> Handle:
        label, transport = bucket.label(self._kind), bucket.group.transport
        finish = self._order.begin(
            lambda: self._within.start(bucket, flat, out),
            lambda: transport.start_all_reduce(out, label),
            queue=self._queue,
        )
        return Handle(label, transport.ledger, finish)
