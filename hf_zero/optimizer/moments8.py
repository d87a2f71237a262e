"""Moments of AdamW and Lion in 8-bit blocks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..buckets.bucket import Bucket, Row
from ..buckets.dynamic import SIGNED, UNSIGNED, DynamicCode
from ..buckets.rows import PackedPart, PackedState
from ..config import ConfigError
from ..layout.slots import block_bytes, is_in_blocks
from .bucket_state import Placeholders, Regions, StatePlace, States, is_elementwise
from .state_kinds import state_kinds

# ---- The moments in 8-bit blocks, and their conversion ----

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
"""By torch's names, which other optimizers use too. Not those of which a small error does harm: RMSprop's `grad_avg`, whose
square is subtracted under a root; averages of parameters (ASGD), step sizes (Rprop)."""


def codes_of_groups(optimizers: Sequence[torch.optim.Optimizer]) -> dict[tuple[int, int], dict[str, DynamicCode]]:
    """Returns (optimizer, group), by number → name → code of each moment that the optimizer keeps in the group.

    Raises:
        ConfigError: an optimizer with other state, or one that a trial step tells nothing about.
    """
    return {
        (index, group): _codes_for(optimizer, settings)
        for index, optimizer in enumerate(optimizers)
        for group, settings in enumerate(optimizer.param_groups)
    }


class PackedMoments:
    """Converts the moments of one bucket between 8-bit blocks, laid out as the shard, and float32 tensors.

    Args:
        codes: of the moments, by name.
        placeholders: stand in the optimizer's state for moments in blocks.
    """

    def __init__(self, bucket: Bucket, codes: Mapping[str, DynamicCode], placeholders: Placeholders):
        self._bucket = bucket
        self._placeholders = placeholders
        self.codes = codes

    @property
    def float_bytes(self) -> int:
        """Counts bytes of all moments of the bucket in float32."""
        return len(self.codes) * self._bucket.layout.shard_numel * torch.float32.itemsize

    def zeros(self) -> dict[str, PackedState]:
        """Makes blocks of zeros for all moments, by name."""
        numel, tier = self._bucket.layout.shard_numel, self._bucket.tier
        return {name: PackedState.zeros(numel, code, tier) for name, code in self.codes.items()}

    def packable(self, row: Row, state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Returns the entries of a row's state that belong in blocks."""
        if not is_in_blocks(row.slot.parameter.numel()):
            return []
        return [(name, value) for name, value in state.items() if name in self.codes and is_elementwise(value, row)]

    def unpack(self, states: States, packed: Mapping[str, PackedState]) -> dict[str, torch.Tensor]:
        """Puts float32 tensors with the values of `packed` into `states` in place of placeholders.

        Returns:
            the flat tensors, (shard_numel,), that they are views of, by name.
        """
        # All of them, also where no row of `states` asks for it: blocks go back as a whole.
        lent = {}
        for name, blocks in packed.items():
            lent[name] = self._bucket.tier.scratch(self._bucket.layout.shard_numel, torch.float32)
            blocks.unpack(lent[name])
        for row, state in states.items():
            for name, value in self.packable(row, state):
                if self.is_placeholder(value):
                    state[name] = row.of(lent[name])
        return lent

    @torch.no_grad()
    def pack(self, states: States, lent: dict[str, torch.Tensor], packed: Mapping[str, PackedState]) -> None:
        """Packs the moments in `states` into `packed`, as flat tensors that are zero where nothing is; leaves placeholders.

        [Note: blocks of parameters] shows that this is the same on any layout, and [Note: nothing drifts] that rows which a step
        leaves alone stay as they are.

        Args:
            lent: from `unpack`.
        """
        for row, state in states.items():
            for name, value in self.packable(row, state):
                # A first step: there were no blocks to lend, and the optimizer has made tensors of its own. Scratch memory is
                # not cleared: without `zero_`, its old bytes would become moments of rows without state.
                if name not in lent:
                    lent[name] = self._bucket.tier.scratch(self._bucket.layout.shard_numel, torch.float32).zero_()
                view = row.of(lent[name])
                # An optimizer may have replaced the tensor. A tensor that is still the lent one has its values there.
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                state[name] = self.placeholder(row)
        for name, values in lent.items():
            packed[name].pack(values)

    def placeholder(self, row: Row) -> torch.Tensor:
        return self._placeholders.of(row.tensor.shape, torch.float32, row.tensor.device)

    def is_placeholder(self, value: Any) -> bool:
        """Whether an entry is a placeholder, whose values are in blocks."""
        return self._placeholders.has(value)


def _codes_for(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, DynamicCode]:
    """Returns name → code of each moment that the optimizer keeps in a group with these settings."""
    name, kinds = type(optimizer).__name__, state_kinds(optimizer, settings, torch.float32)
    if kinds is None:
        raise ConfigError(
            f"hf_zero config: `moments: 8bit`, and a trial step does not show what state {name} keeps. Leave `moments` at 32bit, "
            "or use one of torch's optimizers (without `capturable`)."
        )
    strange = [kind for kind, dtype in kinds if kind not in CODES or dtype != torch.float32]
    if strange:
        raise ConfigError(
            f"hf_zero config: `moments: 8bit`, and {name} keeps {strange[0]!r} here; allowed: {', '.join(CODES)}, in float32. "
            "Leave `moments` at 32bit, or use AdamW, Adam, NAdam, RAdam, Adamax, SGD, Lion, RMSprop, Adagrad or Adadelta."
        )
    return {kind: CODES[kind] for kind, _ in kinds}


# ---- Moments in 8-bit blocks in memory ----


class StateInBlocks(StatePlace):
    """A bucket's moments in blocks, which are float32 while the bucket is stepped.

    Moments of small parameters stay in the optimizer's state.

    Attributes:
        packed: by name; empty before the first step.
    """

    is_away = True

    def __init__(self, moments: PackedMoments):
        super().__init__()
        self._moments = moments
        self._lent: dict[str, torch.Tensor] = {}
        self.packed: dict[str, PackedState] = {}
        # The copies of an early step; `exchange_aside` swaps the two.
        self._packed_aside: dict[str, PackedState] = {}
        self.lent_bytes = moments.float_bytes

    def blocks(self) -> dict[str, PackedState]:
        """Returns the moments by name; zeros at first."""
        if not self.packed:
            self.packed = self._moments.zeros()
        return self.packed

    def lend(self, states: States, regions: Regions) -> None:
        self._lent = self._moments.unpack(states, self.packed)

    def store(self, states: States, regions: Regions) -> None:
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
        """Puts the row's moment into blocks, zero if there is none; returns whether there was one."""
        value = state.get(name)
        # First: in all steps but the first, each moment is there.
        if self._moments.is_placeholder(value):
            return True
        if value is not None:
            state[name] = self.put(row, {name: value})[name]
            return True
        self.blocks()[name].clear_part(row.layout.in_shard)
        state[name] = self._moments.placeholder(row)
        return False

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        packed = sum(state.nbytes for state in self.packed.values())
        return packed + sum(tensor.nbytes for tensor in tensors if not self._moments.is_placeholder(tensor))

    def end_aside(self, states: States, regions: Regions) -> None:
        # Made at the first early step: a run without early steps has no second set of blocks.
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
