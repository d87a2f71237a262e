"""Moments in 8-bit blocks in memory."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...buckets.bucket import Bucket, Row
from ...buckets.packed_state import PackedPart, PackedState
from ...layout.blocks import block_bytes, is_in_blocks
from ..state.bucket_state import Regions, StatePlace, States
from .packed_moments import PackedMoments


class StateInBlocks(StatePlace):
    """A bucket's moments, which are float32 for the moment in which it is stepped.

    Those of parameters that are too small for blocks stay in the register.

    Attributes:
        packed: by name; empty before the first step.
    """

    is_away = True

    def __init__(self, moments: PackedMoments):
        super().__init__()
        self._moments = moments
        self._lent: dict[str, torch.Tensor] = {}
        self.packed: dict[str, PackedState] = {}
        # Of steps aside; they change places with the others when such a step is taken over.
        self._packed_aside: dict[str, PackedState] = {}
        self.lent_bytes = moments.float_bytes

    def blocks(self) -> dict[str, PackedState]:
        """The moments by name; zeros at first."""
        if not self.packed:
            self.packed = self._moments.zeros()
        return self.packed

    def lend(self, states: States, regions: Regions) -> None:
        self._lent = self._moments.unpack(states, self.packed)

    def take_back(self, states: States, regions: Regions) -> None:
        self._moments.pack(states, self._lent, self.blocks())
        self._lent = {}

    def values(self, row: Row, name: str, value: Any) -> Any:
        if not self._moments.is_placeholder(value):
            return value
        return self.packed[name].part(row.layout.in_shard).view(row.tensor.shape)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return PackedPart(self.packed[kind], row.layout.in_shard) if self._moments.is_placeholder(tensor) else tensor

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        kept = dict(state)
        for name, value in self._moments.packable(row, kept):
            if not self._moments.is_placeholder(value):
                self.blocks()[name].pack_part(row.layout.in_shard, value.reshape(-1).float())
                kept[name] = self._moments.placeholder(row)
        return kept

    def make_ready(self, row: Row, name: str, state: dict[str, Any]) -> bool:
        """Has the row's moment in blocks, zero if the register has none, or in float32 there if the parameter is too small.

        Returns whether it had values.
        """
        had = name in state
        if not is_in_blocks(row.slot.parameter.numel()):
            value = state[name] if had else torch.zeros_like(row.tensor)
            state[name] = value.to(torch.float32).contiguous()
        elif had:
            state[name] = self.put(row, {name: state[name]})[name]
        else:
            self.blocks()[name].clear_part(row.layout.in_shard)
            state[name] = self._moments.placeholder(row)
        return had

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        packed = sum(state.nbytes for state in self.packed.values())
        return packed + sum(tensor.nbytes for tensor in tensors if not self._moments.is_placeholder(tensor))

    def end_aside(self, states: States, regions: Regions) -> None:
        if not self._packed_aside:
            self._packed_aside = self._moments.zeros()
        self._moments.pack(states, self._lent, self._packed_aside)
        self._lent = {}

    def exchange_aside(self) -> None:
        self.packed, self._packed_aside = self._packed_aside, self.packed

    @property
    def aside_bytes(self) -> int:
        return sum(state.nbytes for state in self._packed_aside.values())

    def most_aside_bytes(self, bucket: Bucket, dtypes: Iterable[torch.dtype]) -> int:
        return len(self._moments.codes) * block_bytes(bucket.layout.shard_numel)

    def close(self) -> None:
        self.packed = {}
