"""All-gathers of parameters in blocks."""

from collections.abc import Callable

import torch

from ..buckets.bucket import Bucket
from ..comm.transport import Handle
from ..step.gathers import GATHER, Gather
from .block_collectives import all_gather_blocks
from .quantize import BlockFormat


class QuantizedGather(Gather):
    """Gathers parameters as dequantized blocks. All ranks get the same values, also for their own part.

    If a bucket's `source` lies in its `flat`, the gather overwrites it, so its values must be stored elsewhere as well.
    """

    takes_edits = False

    def __init__(self, format: BlockFormat):
        super().__init__()
        self._format = format

    @property
    def rounding(self) -> Callable[[torch.Tensor], None]:
        return self._format.round_in_place

    def start(self, bucket: Bucket) -> Handle:
        group = bucket.group
        if group.groups.shard_size == 1 or bucket.key.is_packed:
            return super().start(bucket)
        flat, own, label = bucket.flat, bucket.memory.source, bucket.labels[GATHER]
        return all_gather_blocks(group.transport, self._format, flat, own, group.groups.gather, label)
