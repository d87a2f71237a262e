"""All-gathers of the parameters of a bucket, exact or cast to the dtype of forward and backward."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from ..buckets.bucket import Bucket
from ..buckets.gathered_memory import GatheredMemory
from ..comm.groups import RankGroup
from ..comm.transport import Handle
from ..comm.waits import Label

GATHER = "all-gather of parameters"


def start_all_gather(
    bucket: Bucket, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
) -> Handle:
    """Starts filling `flat` with each rank's `own`, exactly; see `Transport.start_all_gather`."""
    flat, own = _sendable(bucket, flat, own)
    return bucket.group.transport.start_all_gather(flat, own, label, among=among)


def _sendable(bucket: Bucket, flat: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Backends do not support all dtypes: NCCL lacks int16, gloo lacks bool.
    return (flat.view(torch.uint8), own.view(torch.uint8)) if bucket.key.is_packed else (flat, own)


class Gather:
    """Fills a bucket's flat buffer with every rank's shard, in this class without quantization.

    Attributes:
        is_exact: shards are gathered in their own dtype. Otherwise each rank casts its shard to the dtype of forward and
            backward before the gather.
        takes_edits: edits of gathered values may be written to the shards, because the values are not rounded and no other copy
            of them is kept.
    """

    is_exact = False
    takes_edits = True

    def __init__(self, *, is_exact: bool = False):
        self.is_exact = is_exact

    def start(self, bucket: Bucket) -> Handle:
        """Starts filling `bucket.flat`, whose memory is allocated, from each rank's `bucket.memory.source`."""
        memory = bucket.memory
        return start_all_gather(bucket, memory.shown, memory.source, bucket.labels[GATHER])

    def starter_of(self, bucket: Bucket) -> Callable[[], Handle]:
        """Prepares a gather repeated in each step; returns a function without arguments for `start`."""
        memory = cast(GatheredMemory, bucket.memory)
        if type(self) is not Gather or (self.is_exact and memory.casts):
            return partial(self.start, bucket)
        flat, own = _sendable(bucket, memory.flat, memory.source)
        return bucket.group.transport.prepare_all_gather(flat, own, bucket.labels[GATHER])

    @property
    def rounding(self) -> Callable[[torch.Tensor], None] | None:
        """Rounds parameters in place, as a receiver of their quantized blocks does; None without quantization."""
        return None

    @property
    def held_bytes(self) -> int:
        """Bytes kept from one gather for later gathers."""
        return 0

    def forget(self) -> None:
        """Called when the parameters are about to change."""
