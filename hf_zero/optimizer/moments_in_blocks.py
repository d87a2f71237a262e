"""Optimizer moments in 8-bit blocks: their conversion, and their storage in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..buckets.bucket import Bucket, Row
from ..buckets.rows import SIGNED, UNSIGNED, DynamicCode, PackedPart, PackedState
from ..config import ConfigError
from ..layout.blocks import is_in_blocks
from ..layout.intervals import Interval
from .bucket_state import Placeholders, Regions, States, StateStorage, is_elementwise
from .trial_step import state_kinds

CODES: dict[str, DynamicCode] = {
    "exp_avg": SIGNED,
    "momentum_buffer": SIGNED,
    "exp_avg_sq": UNSIGNED,
    "max_exp_avg_sq": UNSIGNED,
    "exp_inf": UNSIGNED,
    "square_avg": UNSIGNED,
    "acc_delta": UNSIGNED,
    "sum": UNSIGNED,
}
"""By torch's names, which other optimizers use too. Moments sensitive to small errors are left out: RMSprop's `grad_avg`, whose
square is subtracted under a root; averages of parameters (ASGD); step sizes (Rprop)."""


def codes_of_groups(optimizers: Sequence[torch.optim.Optimizer]) -> dict[tuple[int, int], dict[str, DynamicCode]]:
    """Maps (optimizer, group), by number, to the code of each moment by name.

    Raises:
        ConfigError: an optimizer has other state, or a trial step does not show its state.
    """
    return {
        (index, group): _codes_for(optimizer, settings)
        for index, optimizer in enumerate(optimizers)
        for group, settings in enumerate(optimizer.param_groups)
    }


class PackedMoments:
    """Converts the moments of one bucket between 8-bit blocks, with the layout of the shard, and float32 tensors.

    Args:
        codes: the codes of the moments, by name.
        placeholders: represent moments in blocks in the optimizer's state.
    """

    def __init__(self, bucket: Bucket, codes: Mapping[str, DynamicCode], placeholders: Placeholders):
        self._bucket = bucket
        self._placeholders = placeholders
        self.codes = codes

    @property
    def float_bytes(self) -> int:
        """Returns the bytes of all moments of the bucket in float32."""
        return len(self.codes) * self._bucket.layout.shard_numel * torch.float32.itemsize

    def zeros(self) -> dict[str, PackedState]:
        """Makes blocks of zeros for all moments, by name."""
        numel, tier = self._bucket.layout.shard_numel, self._bucket.tier
        return {name: PackedState.zeros(numel, code, tier) for name, code in self.codes.items()}

    def packable(self, row: Row, state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Returns the entries of a row's state to be stored in blocks."""
        if not is_in_blocks(row.slot.parameter.numel()):
            return []
        return [(name, value) for name, value in state.items() if name in self.codes and is_elementwise(value, row)]

    def unpack(self, states: States, packed: Mapping[str, PackedState]) -> dict[str, torch.Tensor]:
        """Replaces placeholders in `states` by float32 tensors with the values of `packed`.

        Returns:
            The flat tensors, (shard_numel,), by name. The tensors in `states` are views of them.
        """
        # Unpack all moments, even without a row in `states`, because blocks are packed again as a whole.
        unpacked = {}
        for name, coded in packed.items():
            unpacked[name] = self._bucket.tier.scratch(self._bucket.layout.shard_numel, torch.float32)
            coded.unpack(unpacked[name])
        for row, state in states.items():
            for name, value in self.packable(row, state):
                if self.is_placeholder(value):
                    state[name] = row.of(unpacked[name])
        return unpacked

    @torch.no_grad()
    def pack(self, states: States, unpacked: dict[str, torch.Tensor], packed: Mapping[str, PackedState]) -> None:
        """Packs the moments in `states` into `packed`, as flat tensors with zeros in the gaps; leaves placeholders.

        [Note: blocks of parameters] explains why the result does not depend on the layout, and [Note: nothing drifts] why rows
        without a step do not change.

        Args:
            unpacked: the result of `unpack`.
        """
        for row, state in states.items():
            for name, value in self.packable(row, state):
                # In a first step there were no blocks, and the optimizer has made its own tensors. Scratch memory is not
                # cleared: without `zero_`, its old bytes would become moments of rows without state.
                if name not in unpacked:
                    unpacked[name] = self._bucket.tier.scratch(self._bucket.layout.shard_numel, torch.float32).zero_()
                view = row.of(unpacked[name])
                # Copy if the optimizer has replaced the tensor. An unchanged tensor already has its values in place.
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                state[name] = self.placeholder(row)
        for name, values in unpacked.items():
            packed[name].pack(values)

    def placeholder(self, row: Row) -> torch.Tensor:
        return self._placeholders.of(row.tensor.shape, torch.float32, row.tensor.device)

    def is_placeholder(self, value: Any) -> bool:
        """Whether an entry is a placeholder, whose values are in blocks."""
        return self._placeholders.has(value)


def _codes_for(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, DynamicCode]:
    """Returns the code of each moment by name, for a group with these settings."""
    name, kinds = type(optimizer).__name__, state_kinds(optimizer, settings, torch.float32)
    if kinds is None:
        raise ConfigError(
            f"hf_zero config: `moments: 8bit`, but a trial step cannot determine the state of {name}. Leave `moments` at "
            "32bit, or use one of torch's optimizers (without `capturable`)."
        )
    strange = [kind for kind, dtype in kinds if kind not in CODES or dtype != torch.float32]
    if strange:
        raise ConfigError(
            f"hf_zero config: `moments: 8bit`, but {name} keeps {strange[0]!r}; allowed: {', '.join(CODES)}, in float32. Leave "
            "`moments` at 32bit, or use AdamW, Adam, NAdam, RAdam, Adamax, SGD, Lion, RMSprop, Adagrad or Adadelta."
        )
    return {kind: CODES[kind] for kind, _ in kinds}


class MomentStorage(StateStorage):
    """Stores a bucket's moments in blocks, which are converted to float32 during a step of the bucket.

    Moments of small parameters stay in the optimizer's state.
    """

    is_away = True

    def __init__(self, moments: PackedMoments):
        self._moments = moments
        self._unpacked: dict[str, torch.Tensor] = {}
        self.bytes_in_step = moments.float_bytes

    def values(self, row: Row, name: str, value: Any) -> Any:
        if not self._moments.is_placeholder(value):
            return value
        return self._part(row, name).detach().view(row.tensor.shape)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return self._part(row, kind) if self._moments.is_placeholder(tensor) else tensor

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        kept = dict(state)
        for name, value in self._moments.packable(row, kept):
            if not self._moments.is_placeholder(value):
                self._pack_part(name, row.layout.in_shard, value.reshape(-1).float())
                kept[name] = self._moments.placeholder(row)
        return kept

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        return self._packed_bytes() + sum(t.nbytes for t in tensors if not self._moments.is_placeholder(t))

    def _part(self, row: Row, name: str) -> PackedPart:
        """Returns a row's moment in its live blocks."""
        raise NotImplementedError

    def _pack_part(self, name: str, interval: Interval, values: torch.Tensor) -> None:
        """Stores float32 values of an interval of the shard, which begins with a block."""
        raise NotImplementedError

    def _packed_bytes(self) -> int:
        """Returns the bytes of all blocks."""
        raise NotImplementedError


class StateInBlocks(MomentStorage):
    """Stores a bucket's moments in blocks in memory.

    Attributes:
        packed: by name; empty before the first step.
    """

    def __init__(self, moments: PackedMoments):
        super().__init__(moments)
        self.packed: dict[str, PackedState] = {}

    def blocks(self) -> dict[str, PackedState]:
        """Returns the moments by name; zeros at first."""
        if not self.packed:
            self.packed = self._moments.zeros()
        return self.packed

    def lend(self, states: States, regions: Regions) -> None:
        self._unpacked = self._moments.unpack(states, self.packed)

    def store(self, states: States, regions: Regions) -> None:
        self._moments.pack(states, self._unpacked, self.blocks())
        self._unpacked = {}

    def make_ready(self, name: str, states: States) -> set[Row]:
        """Puts the rows' moments into blocks, with zeros for missing ones; returns the rows without previous moments."""
        new = set()
        for row, state in states.items():
            value = state.get(name)
            # Check this first: after the first step, this is true for all moments.
            if self._moments.is_placeholder(value):
                continue
            if value is not None:
                state[name] = self.put(row, {name: value})[name]
                continue
            self.blocks()[name].clear_part(row.layout.in_shard)
            state[name] = self._moments.placeholder(row)
            new.add(row)
        return new

    def close(self, states: States) -> None:
        self.packed = {}

    def _part(self, row: Row, name: str) -> PackedPart:
        return PackedPart(self.packed[name], row.layout.in_shard)

    def _pack_part(self, name: str, interval: Interval, values: torch.Tensor) -> None:
        self.blocks()[name].pack_part(interval, values)

    def _packed_bytes(self) -> int:
        return sum(state.nbytes for state in self.packed.values())
