"""All-gathers of a bucket's parameters: exact, cast or quantised."""

from abc import ABC, abstractmethod

from ...buckets.bucket import Bucket
from ...comm.quantised import all_gather_blocks
from ...comm.transport import Handle
from ...kernels.quantise import BlockFormat

_KIND = "all-gather parameters"


class Gather(ABC):
    """Fills a bucket's flat buffer with every rank's shard.

    Attributes:
        is_exact: shards of another dtype than that of forward and backward are gathered as they are.
        takes_edits: what is gathered is the shards' values, and no copy of it is kept: an edit of it may go into the shards.
    """

    is_exact = False
    takes_edits = True

    @abstractmethod
    def start(self, bucket: Bucket) -> Handle:
        """Starts filling `bucket.flat`, which has memory, from the `source` of each rank's."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes kept from one gather for others."""

    @abstractmethod
    def forget(self) -> None:
        """Called when the parameters are about to change."""


class _Forgetful(Gather):
    """Nothing is kept."""

    held_bytes = 0

    def forget(self) -> None:
        """There is nothing to forget."""


class ExactGather(_Forgetful):
    """Parameters as the ranks have them."""

    is_exact = True

    def start(self, bucket: Bucket) -> Handle:
        memory = bucket.memory
        return bucket.group.transport.start_all_gather(memory.shown, memory.source, bucket.label(_KIND))


class CastGather(ExactGather):
    """Parameters in the dtype of forward and backward, to which each rank casts its shard."""

    is_exact = False


class QuantisedGather(ExactGather):
    """What blocks leave of the parameters, on every rank the same, this rank's own part too. One rank's own stay as they are.

    Where a bucket's `source` lies in its `flat` it is overwritten, so what it was made from must be elsewhere.
    """

    is_exact = False
    takes_edits = False

    def __init__(self, format: BlockFormat):
        self._format = format

    def start(self, bucket: Bucket) -> Handle:
        group = bucket.group
        if group.groups.shard_size == 1:
            return super().start(bucket)
        flat, own, label = bucket.flat, bucket.memory.source, bucket.label(_KIND)
        return all_gather_blocks(group.transport, self._format, flat, own, group.groups.gather, label)
