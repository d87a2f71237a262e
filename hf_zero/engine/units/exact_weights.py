"""Puts exact values into unsharded parameters for a while, where quantised all-gathers have rounded them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...buckets.bucket import Bucket
from ...comm.transport import Transport
from ...kernels.quantise import round_to_blocks
from ...optimizer.state.holder import StateHolder
from ..travel.gathers import Gather


class ExactWeights:
    """Puts the masters' values in place of what forward and backward compute with, and back.

    Without buckets, as where parameters travel as they are, all of it does nothing. Sharded parameters are not among them:
    their shards are exact, and only what is gathered is not.

    Args:
        buckets: of whole parameters; those that have not been through blocks do not matter.
        gather: brings them together as they are.
        holder: has their masters.
        timeout_s: how long ranks that come wait for those that do not.
    """

    def __init__(
        self, buckets: Sequence[Bucket], gather: Gather, holder: StateHolder, transport: Transport, timeout_s: float
    ):
        self._format_of = {b: format for b in buckets if (format := b.precision.weights) is not None}
        self._gather = gather
        self._holder = holder
        self._transport = transport
        self._timeout_s = timeout_s
        self._depth = 0
        # All ranks have started with the same exact values.
        self.put_back()

    @property
    def is_empty(self) -> bool:
        return not self._format_of

    @contextmanager
    def at_hand(self, purpose: str, alone: str = "") -> Iterator[None]:
        """The parameters are their masters, in the parameters' dtype. Collective on the way in where there are buckets.

        Args:
            alone: see `Transport.meet`.
        """
        if self._format_of and not self._depth:
            self._transport.meet(purpose, self._timeout_s, alone)
            for bucket in self._format_of:
                with self._holder.at_hand(bucket):
                    bucket.follow_edits()
                    bucket.write_back()
                self._gather.start(bucket).finish()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.put_back()

    def put_back(self) -> None:
        """Rounds parameters that are exact on every rank to what a quantised gather would leave of them, without one.

        Shards are whole blocks, so that the blocks of the whole are those of the shards.
        """
        for bucket, format in self._format_of.items() if not self._depth else ():
            round_to_blocks(bucket.flat, bucket.flat, format)
