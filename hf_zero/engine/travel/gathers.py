"""All-gathers of a bucket's parameters: exact, cast or quantised."""

from ...buckets.bucket import Bucket
from ...comm.quantised import all_gather_blocks
from ...comm.transport import Handle
from ...kernels.quantise import BlockFormat

_KIND = "all-gather parameters"


class Gather:
    """Fills a bucket's flat buffer with every rank's shard: here with parameters as the ranks have them.

    Attributes:
        is_exact: shards of another dtype than that of forward and backward are gathered as they are; else each rank casts its
            own to that.
        takes_edits: what is gathered is the shards' values, and no copy of it is kept: an edit of it may go into the shards.
    """

    is_exact = False
    takes_edits = True

    def __init__(self, *, is_exact: bool = False):
        self.is_exact = is_exact

    def start(self, bucket: Bucket) -> Handle:
        """Starts filling `bucket.flat`, which has memory, from the `source` of each rank's."""
        memory = bucket.memory
        return bucket.group.transport.start_all_gather(memory.shown, memory.source, bucket.label(_KIND))

    @property
    def held_bytes(self) -> int:
        """Bytes kept from one gather for others."""
        return 0

    def forget(self) -> None:
        """Called when the parameters are about to change."""


class QuantisedGather(Gather):
    """What blocks leave of the parameters, on every rank the same, this rank's own part too. One rank's own stay as they are.

    Where a bucket's `source` lies in its `flat` it is overwritten, so what it was made from must be elsewhere.
    """

    takes_edits = False

    def __init__(self, format: BlockFormat):
        super().__init__()
        self._format = format

    def start(self, bucket: Bucket) -> Handle:
        group = bucket.group
        if group.groups.shard_size == 1:
            return super().start(bucket)
        flat, own, label = bucket.flat, bucket.memory.source, bucket.label(_KIND)
        return all_gather_blocks(group.transport, self._format, flat, own, group.groups.gather, label)
