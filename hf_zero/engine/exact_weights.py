"""Puts exact values into unsharded parameters for a while, if quantized all-gathers have rounded them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..buckets.bucket import Bucket
from ..comm.transport import Transport
from ..optimizer.storage import OptimizerStorage
from ..step.gathers import Gather


class ExactWeights:
    """Replaces the rounded values of parameters by the masters' values, and back.

    Does nothing if parameters are sent without quantization. Sharded parameters are not included, because their shards are
    exact and only gathered values are rounded.

    Args:
        buckets: buckets of whole parameters; buckets without quantized gathers are ignored.
        gather: gathers exact values.
        storage: stores the masters.
        transport: connects all ranks of the model.
        timeout_s: time limit for the other ranks to make the same call.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gather: Gather,
        storage: OptimizerStorage,
        transport: Transport,
        timeout_s: float,
    ):
        self._rounding_of = {b: rounds for b in buckets if (rounds := b.precision.weights) is not None}
        self._gather = gather
        self._storage = storage
        self._transport = transport
        self._timeout_s = timeout_s
        self._depth = 0
        # Round the initial values, which are exact and equal on all ranks.
        self.put_back()

    @property
    def is_empty(self) -> bool:
        return not self._rounding_of

    @contextmanager
    def fetched_master(self, purpose: str, alone: str = "") -> Iterator[None]:
        """Inside, parameters have their masters' values, in the parameters' dtype. Entering is collective if there are buckets.

        Args:
            purpose: name of the call, for errors about missing ranks.
            alone: see `Transport.barrier`.
        """
        if self._rounding_of and not self._depth:
            self._transport.barrier(purpose, self._timeout_s, alone)
            for bucket in self._rounding_of:
                with self._storage.fetched_master(bucket):
                    # Follow edits first. Otherwise the write-back would undo a script's edits of rounded parameters.
                    bucket.follow_edits()
                    bucket.write_back()
                # Wait at once, because inside the context no guard makes readers wait, in contrast to the gathers after a step.
                self._gather.start(bucket).finish()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.put_back()

    def put_back(self) -> None:
        """Rounds exact parameters to the values of a quantized gather, without a gather.

        Shards consist of whole blocks, so the whole buffer has the same blocks as the shards.
        """
        for bucket, rounds in self._rounding_of.items() if not self._depth else ():
            rounds(bucket.flat)
