"""bfloat16 parameters without a master: each is stepped in a temporary float32 copy, and rounded stochastically."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..arithmetic.stochastic import REGION_NUMEL, counters_for, round_stochastically
from ..buckets.bucket import Bucket, Row
from .bucket_state import MasterAway, Regions

STEP = "rounding_step"
"""Number of roundings of a parameter, stored next to the optimizer's own state."""


_KEY_BITS = 63


class RoundedMaster(MasterAway):
    """Makes a float32 master of a bucket's parameters for a step, and rounds the master into the parameters afterwards.

    [Note: whose random bits]
    An element's bits only depend on the parameter's name, the element's index and the number of roundings, not on the world size,
    the stage or the buckets. The number is in `optimizer.state` as `rounding_step`, so a resumed run draws the same bits.

    With float32 moments, Adam needs 10 bytes per parameter, instead of 14 with a master.
    Stochastic rounding in training: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.

    Args:
        optimizer: steps the bucket; None without one.
    """

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer | None):
        super().__init__(bucket, torch.full((), float("nan"), dtype=bucket.precision.master, device=bucket.device))
        self._optimizer = optimizer

    def fetch(self, regions: Regions) -> None:
        # The parameters have a script's edits already.
        master = self._bucket.tier.scratch(self._bucket.layout.shard_numel, self._bucket.precision.master)
        self._bucket.fetch(master.copy_(self._bucket.own))

    @torch.no_grad()
    def store(self) -> None:
        register = {} if self._optimizer is None else self._optimizer.state
        for row in self._bucket.rows:
            # Only count stepped rows: a count for another row would create an entry in `optimizer.state`, like a step.
            if row.tensor.grad is not None:
                state = register[row.tensor]
                round_row(row, self._bucket.master, self._bucket.own, count=state.get(STEP, 0))
                # Increase the count after rounding, because the old count selects the bits, also in a resumed run.
                state[STEP] = state.get(STEP, 0) + 1
        self._leave()

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        # Edits are written to the parameter itself, with which the next step begins.
        self._bucket.fetch(self._bucket.own.to(self._bucket.precision.master))
        try:
            yield
        finally:
            self._leave()

    def put(self, row: Row, values: torch.Tensor) -> None:
        # A saved master of an earlier run is not needed, because its rounded values were loaded as the parameters.
        if not self._bucket.is_away:
            super().put(row, values)


def round_row(row: Row, master: torch.Tensor, own: torch.Tensor, *, count: int) -> None:
    """Rounds one row of `master` into `own`, both with the layout of the rank's shard.

    Args:
        count: number of previous roundings of the parameter.
    """
    source, start = row.layout.in_shard, row.layout.in_parameter.start
    values = master[source.start : source.stop]
    # Random bits are drawn in regions of the parameter, and a row may begin inside a region.
    before = start % REGION_NUMEL
    padded = torch.cat([values.new_zeros(before), values]) if before else values
    rounded = torch.empty_like(padded, dtype=own.dtype)
    # Use the parameter's size instead of the row's, because the bits must not depend on the world size.
    offset = count * counters_for(row.slot.interval.numel) + counters_for(start - before)
    round_stochastically(padded, rounded, seed=_key_of(row.slot.name), offset=offset)
    own[source.start : source.stop].copy_(rounded[before:])


def _key_of(name: str) -> int:
    # Do not use `hash`, which Python salts in each process: ranks and resumed runs must draw the same bits.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> (64 - _KEY_BITS)
