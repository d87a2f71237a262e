"""Moments in 8-bit blocks, which are float32 for the moment in which their bucket is stepped."""

from collections.abc import Sequence
from typing import Any

import torch

from ..buckets.bucket import Bucket, Row
from ..buckets.packed_state import PackedPart
from ..state.bucket_steps import OwnStep
from ..state.packed_moments import PackedMoments
from .in_turn_holder import SteppedInTurn
from .stochastic_holder import RoundedStochastically


class InEightBits(SteppedInTurn):
    """A bucket's moments are unpacked for its step and packed again behind it.

    What is no stand-in in the optimizer's register (freshly loaded by the script, or made by the optimizer) is the state
    itself, and is packed behind the next step of its bucket.

    Raises:
        ConfigError: an optimizer with other state, or one that a trial step tells nothing about.

    Attributes:
        packed: the moments.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__(optimizers, OwnStep)
        self.packed = PackedMoments(optimizers)
        self._window_bytes = 0

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        super().step_with(optimizer, buckets)
        for bucket in filter(self.packed.takes, buckets):
            self._window_bytes = max(self._window_bytes, self.packed.lent_bytes(bucket))
            self._put_earlier(optimizer, bucket)

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
        self._fill_registers(buckets)
        self.packed.clear()

    def _passes(self, bucket: Bucket) -> bool:
        return self.packed.takes(bucket)

    def _bring(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        if self.packed.takes(bucket):
            self.packed.lend(bucket, self._states_of(bucket), self.packed.there_already(bucket))

    def _put_back(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        if self.packed.takes(bucket):
            self.packed.take_back(bucket, self._states_of(bucket), self.packed.of(bucket))


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
