"""bfloat16 parameters without a master: stepped in float32 on a copy that passes, and rounded by chance."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...kernels.stochastic import REGION_NUMEL, counters_for, round_stochastically
from ..buckets.bucket import Bucket, Row
from .in_turn_holder import SteppedInTurn

STEP = "rounding_step"
"""State of each parameter beside the optimizer's own: how often it has been rounded."""

_KEY_BITS = 63


class RoundedStochastically(SteppedInTurn):
    """A bucket's parameters become a float32 master for the moment of its step, and are the master rounded after.

    [Note: whose random bits]
    An element's bits depend on its parameter's name, its place in the parameter and how often the parameter has been rounded,
    and on nothing else: not on the world size, the stage, the buckets or what was rounded before. That count is in the
    optimizer's register as `rounding_step`, so that checkpoints have it and a run that goes on draws the bits that it would
    have drawn.

    Moments stay in float32, where the optimizer made them: 10 bytes a parameter under Adam, where a master makes it 14.
    Stochastic rounding in training: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.
    """

    def take(self, bucket: Bucket) -> None:
        if _passes(bucket):
            bucket.put_away(_absent(bucket))

    @contextmanager
    def at_hand(self, bucket: Bucket) -> Iterator[None]:
        if bucket.is_away:
            # What is edited is the parameter itself, and the next step begins with it.
            bucket.bring(bucket.own.to(bucket.precision.master))
            yield
            bucket.put_away(_absent(bucket))
        else:
            yield

    def put_master(self, row: Row, values: torch.Tensor) -> None:
        # What the masters of a former run were rounded to has been loaded as the parameters.
        if not row.slot.bucket.is_away:
            super().put_master(row, values)

    def _passes(self, bucket: Bucket) -> bool:
        return _passes(bucket)

    def _bring(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        master = bucket.tier.scratch(bucket.layout.shard_numel, bucket.precision.master)
        bucket.bring(master.copy_(bucket.own))

    @torch.no_grad()
    def _put_back(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        register = self._optimizer_of(bucket).state
        for row in bucket.rows:
            if row.tensor.grad is not None:
                state = register[row.tensor]
                round_row(row, bucket.master, bucket.own, count=state.get(STEP, 0))
                state[STEP] = state.get(STEP, 0) + 1
        bucket.put_away(_absent(bucket))


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


def _passes(bucket: Bucket) -> bool:
    return bucket.trained and bucket.precision.stochastic


def _absent(bucket: Bucket) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=bucket.precision.master, device=bucket.device)


def _key_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> (64 - _KEY_BITS)
