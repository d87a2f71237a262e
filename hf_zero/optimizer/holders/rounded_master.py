"""bfloat16 parameters without a master: stepped in float32 on a copy that passes, and rounded by chance."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...buckets.bucket import Bucket, Row
from ...kernels.stochastic import REGION_NUMEL, counters_for, round_stochastically
from ..state.bucket_state import MasterPlace, Regions

STEP = "rounding_step"
"""State of each parameter beside the optimizer's own: how often it has been rounded."""

_KEY_BITS = 63


class RoundedMaster(MasterPlace):
    """A bucket's parameters become a float32 master for the moment of its step, and are the master rounded after.

    [Note: whose random bits]
    An element's bits depend on its parameter's name, its place in the parameter and how often the parameter has been rounded,
    and on nothing else: not on the world size, the stage, the buckets or what was rounded before. That count is in the
    optimizer's register as `rounding_step`, so that checkpoints have it and a run that goes on draws the bits that it would
    have drawn.

    Moments in float32 make that 10 bytes a parameter under Adam, where a master makes it 14.
    Stochastic rounding in training: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.

    Args:
        optimizer: that steps the bucket; None where none does.
    """

    is_away = True

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer | None):
        super().__init__(bucket)
        self._optimizer = optimizer
        self._absent = torch.full((), float("nan"), dtype=bucket.precision.master, device=bucket.device)

    def move_in(self) -> None:
        self._bucket.put_away(self._absent)

    def bring(self, regions: Regions) -> None:
        master = self._bucket.tier.scratch(self._bucket.layout.shard_numel, self._bucket.precision.master)
        self._bucket.bring(master.copy_(self._bucket.own))

    @torch.no_grad()
    def put_away(self) -> None:
        register = {} if self._optimizer is None else self._optimizer.state
        for row in self._bucket.rows:
            if row.tensor.grad is not None:
                state = register[row.tensor]
                round_row(row, self._bucket.master, self._bucket.own, count=state.get(STEP, 0))
                state[STEP] = state.get(STEP, 0) + 1
        self._bucket.put_away(self._absent)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        if not self._bucket.is_away:
            yield
            return
        # What is edited is the parameter itself, and the next step begins with it.
        self._bucket.bring(self._bucket.own.to(self._bucket.precision.master))
        try:
            yield
        finally:
            self._bucket.put_away(self._absent)

    def put(self, row: Row, values: torch.Tensor) -> None:
        # What the masters of a former run were rounded to has been loaded as the parameters.
        if not self._bucket.is_away:
            super().put(row, values)


def round_row(row: Row, master: torch.Tensor, own: torch.Tensor, *, count: int) -> None:
    """Rounds one row of `master` into `own`, both flat as the rank's shard.

    Args:
        count: how often the parameter has been rounded before.
    """
    source, start = row.layout.in_shard, row.layout.in_parameter.start
    values = master[source.start : source.stop]
    # The bits come in regions of the parameter; a row may begin within one.
    before = start % REGION_NUMEL
    padded = torch.cat([values.new_zeros(before), values]) if before else values
    rounded = torch.empty_like(padded, dtype=own.dtype)
    offset = count * counters_for(row.slot.interval.numel) + counters_for(start - before)
    round_stochastically(padded, rounded, seed=_key_of(row.slot.name), offset=offset)
    own[source.start : source.stop].copy_(rounded[before:])


def _key_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> (64 - _KEY_BITS)
