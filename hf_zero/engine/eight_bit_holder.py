"""Moments in 8-bit blocks, which are float32 for the moment in which their bucket is stepped."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .bucket_steps import OwnStep
from .buckets import Bucket, Row
from .in_turn_holder import SteppedInTurn
from .packed_moments import PackedMoments
from .packed_state import PackedPart
from .stochastic_holder import RoundedStochastically


class InEightBits(SteppedInTurn):
    """A bucket's moments are unpacked for its step and packed again behind it, as flat tensors laid out as the shard.

    What is no stand-in in the optimizer's register (freshly loaded by the script, or made by the optimizer) is the state
    itself, and is packed behind the next step of its bucket. See [Note: blocks of parameters] for why that comes to the same
    on any layout, and [Note: nothing drifts] for why rows that a step leaves alone stay as they are.

    Raises:
        ConfigError: an optimizer with other state, or one that a trial step tells nothing about.

    Attributes:
        packed: the moments.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__(optimizers, OwnStep)
        self.packed = PackedMoments(optimizers)
        self._lent: dict[Bucket, dict[str, torch.Tensor]] = {}
        self._window_bytes = 0

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        super().step_with(optimizer, buckets)
        for bucket in filter(self.packed.takes, buckets):
            moments = len(self.packed.codes_of(bucket)) * bucket.layout.shard_numel * torch.float32.itemsize
            self._window_bytes = max(self._window_bytes, moments)
            self._pack_rows(optimizer, bucket)

    def values(self, row: Row, name: str, value: Any) -> Any:
        if not self.packed.is_stand_in(value):
            return value
        return self.packed.of(row.slot.bucket)[name].part(row.layout.in_shard).view(row.tensor.shape)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        if not self.packed.is_stand_in(tensor):
            return tensor
        return PackedPart(self.packed.of(row.slot.bucket)[kind], row.layout.in_shard)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        kept = super().put(row, state)
        self.packed.pack(row, kept)
        return kept

    def state_bytes(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> int:
        packed = sum(state.nbytes for state in self.packed.there_already(bucket).values())
        return packed + sum(tensor.nbytes for tensor in tensors if not self.packed.is_stand_in(tensor))

    def window_bytes(self) -> int:
        return self._window_bytes

    def close(self, buckets: Sequence[Bucket]) -> None:
        super().close(buckets)
        for bucket in buckets:
            # Rows of a whole bucket are the parameters, whose state stays with the optimizer.
            for row in bucket.rows if bucket.whole and self.packed.there_already(bucket) else ():
                state = self._register(bucket).get(row.tensor, {})
                for name, value in state.items():
                    state[name] = self.values(row, name, value)
        self.packed.clear()

    def _pack_rows(self, optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
        """Packs the moments that the optimizer came with."""
        for row in bucket.rows:
            if row.tensor in optimizer.state:
                optimizer.state[row.tensor] = self.put(row, optimizer.state[row.tensor])

    def _passes(self, bucket: Bucket) -> bool:
        return self.packed.takes(bucket)

    def _bring(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        lent = self._lent[bucket] = {}
        for name, packed in self.packed.there_already(bucket).items():
            lent[name] = bucket.tier.scratch(bucket.layout.shard_numel, torch.float32)
            packed.unpack(lent[name])
        for row, name, value in self._moments(bucket):
            if self.packed.is_stand_in(value):
                self._register(bucket)[row.tensor][name] = row.of(lent[name])

    @torch.no_grad()
    def _put_back(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        lent = self._lent.pop(bucket)
        for row, name, value in self._moments(bucket):
            if name not in lent:
                lent[name] = bucket.tier.scratch(bucket.layout.shard_numel, torch.float32).zero_()
            view = row.of(lent[name])
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
            self._register(bucket)[row.tensor][name] = self.packed.stand_in(row)
        for name, values in lent.items():
            self.packed.of(bucket)[name].pack(values)

    def _moments(self, bucket: Bucket) -> Iterator[tuple[Row, str, torch.Tensor]]:
        """What the register has of a bucket that is to be packed, or is: (row, name, tensor)."""
        register = self._register(bucket)
        for row in bucket.rows:
            # By `get`: the register makes an entry for whoever asks, and an empty one would look like a step taken.
            yield from ((row, name, value) for name, value in self.packed.packable(row, register.get(row.tensor, {})))


class RoundedInEightBits(InEightBits, RoundedStochastically):
    """The same for bfloat16 parameters without masters: masters and moments are float32 for the step alone."""

    def _passes(self, bucket: Bucket) -> bool:
        return RoundedStochastically._passes(self, bucket) or self.packed.takes(bucket)

    def _bring(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        RoundedStochastically._bring(self, bucket, _shard, _buffer)
        InEightBits._bring(self, bucket, _shard, _buffer)

    def _put_back(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        RoundedStochastically._put_back(self, bucket, _shard, _buffer)
        InEightBits._put_back(self, bucket, _shard, _buffer)
