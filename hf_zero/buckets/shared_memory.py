"""Buckets whose parameters, or shards of them, lie in memory that the other ranks can read."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from ..comm.peers.peer_memory import PeerMemory
from ..device import allocate
from ..layout.intervals import Interval
from ..layout.slots import BucketLayout
from .memory import ParameterMemory, SeparateShardMemory, UnshardedMemory


class SharedUnshardedMemory(UnshardedMemory):
    """Parameters that are never sharded; peers read the part that this rank steps.

    Attributes:
        shared: the memory, and the other ranks' shards of theirs.
    """

    def __init__(
        self, layout: BucketLayout, dtype: torch.dtype, device: torch.device, shard: Interval, peers: PeerMemory
    ):
        self.shared = peers.share(layout.numel, dtype, [layout.shard(place) for place in range(peers.group.size)])
        super().__init__(layout, dtype, device, shard)

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.shared.own


class SharedShardMemory(SeparateShardMemory):
    """A shard that peers read, apart from the gather buffer.

    Args:
        kept: dtype of the shard. Where it is not that of forward and backward, peers read a copy that is.

    Attributes:
        shared: what peers read of this rank, and this rank of them.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        shard: Interval,
        kept: torch.dtype,
        *,
        peers: PeerMemory,
    ):
        whole = Interval(0, layout.shard_numel)
        self.shared = peers.share(layout.shard_numel, dtype, [whole] * peers.group.size)
        own = self.shared.own if kept == dtype else allocate(layout.shard_numel, kept, device)
        super().__init__(layout, dtype, device, shard, own)

    @property
    def lasting_bytes(self) -> int:
        return self._own.nbytes + (self.shared.own.nbytes if self.casts else 0)

    def gather(self, *, exactly: bool) -> AbstractContextManager[None]:
        if self.casts and not exactly:
            # No peer reads it still: a gather ends on all ranks.
            self.shared.own.copy_(self._own)
        return super().gather(exactly=exactly)


def memory_of(peers: PeerMemory, *, sharded: bool) -> Callable[..., ParameterMemory]:
    """What makes memory for buckets whose parameters are `sharded`, or whole on each rank."""
    return partial(SharedShardMemory if sharded else SharedUnshardedMemory, peers=peers)
