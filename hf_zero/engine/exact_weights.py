"""Puts exact values into unsharded parameters for a while, if quantised all-gathers have rounded them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..buckets.bucket import Bucket
from ..comm.transport import Transport
from ..optimizer.holder import StateHolder
from ..step.gathers import Gather


class ExactWeights:
    """Replaces the compute values of parameters by the masters' values, and back.

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
        self._rounding_of = {b: rounds for b in buckets if (rounds := b.precision.weights) is not None}
        self._gather = gather
        self._holder = holder
        self._transport = transport
        self._timeout_s = timeout_s
        self._depth = 0
        # All ranks have started with the same exact values.
        self.put_back()

    @property
    def is_empty(self) -> bool:
        return not self._rounding_of

    @contextmanager
    def fetched_master(self, purpose: str, alone: str = "") -> Iterator[None]:
        """The parameters are their masters, in the parameters' dtype. Collective on the way in where there are buckets.

        Args:
            alone: see `Transport.barrier`.
        """
        if self._rounding_of and not self._depth:
            self._transport.barrier(purpose, self._timeout_s, alone)
            for bucket in self._rounding_of:
                with self._holder.fetched_master(bucket):
                    # Edits first: the write-back would undo what a script has written into the rounded parameters.
                    bucket.follow_edits()
                    bucket.write_back()
                # Waited for at once: no guard makes a reader inside the context wait, as behind a step.
                self._gather.start(bucket).finish()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.put_back()

    def put_back(self) -> None:
        """Rounds exact parameters to the values of a quantised gather, without one.

        Shards are whole blocks, so that the blocks of the whole are those of the shards.
        """
        for bucket, rounds in self._rounding_of.items() if not self._depth else ():
            rounds(bucket.flat)
