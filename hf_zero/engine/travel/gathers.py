"""All-gathers of a bucket's parameters: exact, cast or quantised."""

from ...buckets.bucket import Bucket
from ...comm.groups.groups import Groups
from ...comm.quantised import QuantisedAllGather
from ...comm.transport import Handle, Transport
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

    def __init__(self, transport: Transport, *, is_exact: bool = False):
        self._transport = transport
        self.is_exact = is_exact

    def start(self, bucket: Bucket) -> Handle:
        """Starts filling `bucket.flat`, which has memory, from the `source` of each rank's."""
        return self._transport.start_all_gather(bucket.memory.shown, bucket.memory.source, bucket.label(_KIND))

    @property
    def held_bytes(self) -> int:
        """Bytes kept from one gather for others."""
        return 0

    def forget(self) -> None:
        """Called when the parameters are about to change."""


class QuantisedGather(Gather):
    """What blocks leave of the parameters, on every rank the same, this rank's own part too.

    Where a bucket's `source` lies in its `flat` it is overwritten, so what it was made from must be elsewhere.
    """

    takes_edits = False

    def __init__(self, transport: Transport, groups: Groups, format: BlockFormat):
        self._collective = QuantisedAllGather(transport, format)
        self._groups = groups

    def start(self, bucket: Bucket) -> Handle:
        return self._collective.start(bucket.flat, bucket.memory.source, self._groups.gather, bucket.label(_KIND))
