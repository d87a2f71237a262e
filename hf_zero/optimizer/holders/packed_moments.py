"""Which moments are kept in 8-bit blocks, and how they come out of them and go back."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...buckets.bucket import Bucket, Row
from ...buckets.packed_state import PackedState
from ...config import ConfigError
from ...kernels.dynamic import SIGNED, UNSIGNED, DynamicCode
from ...layout.blocks import has_blocks, is_in_blocks
from ..state.bucket_state import Placeholders, States, is_elementwise
from ..state.state_kinds import state_kinds

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
square is subtracted from what is to be a root's argument; averages of parameters (ASGD), step sizes (Rprop)."""


class MomentCodes:
    """The codes of the moments that each optimizer keeps in each of its groups.

    Raises:
        ConfigError: an optimizer with other state, or one that a trial step tells nothing about.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._codes = {
            (index, group): _codes_for(optimizer, settings)
            for index, optimizer in enumerate(optimizers)
            for group, settings in enumerate(optimizer.param_groups)
        }

    def of(self, bucket: Bucket) -> dict[str, DynamicCode]:
        """By name; empty where the bucket's moments are not kept in blocks."""
        if not bucket.trained or not has_blocks(bucket.layout):
            return {}
        return self._codes.get((bucket.key.optimizer, bucket.key.group), {})


class PackedMoments:
    """Moves the moments of one bucket between 8-bit blocks, laid out as the rank's shard, and float32 tensors.

    Args:
        codes: of the moments, by name.
        placeholders: what the optimizer's register has of moments that are in blocks.
    """

    def __init__(self, bucket: Bucket, codes: Mapping[str, DynamicCode], placeholders: Placeholders):
        self._bucket = bucket
        self._placeholders = placeholders
        self.codes = codes

    @property
    def float_bytes(self) -> int:
        """Bytes of all moments of the bucket in float32."""
        return len(self.codes) * self._bucket.layout.shard_numel * torch.float32.itemsize

    def zeros(self) -> dict[str, PackedState]:
        """Blocks for all moments by name."""
        numel, tier = self._bucket.layout.shard_numel, self._bucket.tier
        return {name: PackedState.zeros(numel, code, tier) for name, code in self.codes.items()}

    def packable(self, row: Row, state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """What of a row's state in the register is to be packed, or is."""
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

        See [Note: blocks of parameters] for why that comes to the same on any layout, and [Note: nothing drifts] for why rows
        that a step leaves alone stay as they are.

        Args:
            lent: what `unpack` has returned.
        """
        for row, state in states.items():
            for name, value in self.packable(row, state):
                if name not in lent:
                    lent[name] = self._bucket.tier.scratch(self._bucket.layout.shard_numel, torch.float32).zero_()
                view = row.of(lent[name])
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                state[name] = self.placeholder(row)
        for name, values in lent.items():
            packed[name].pack(values)

    def placeholder(self, row: Row) -> torch.Tensor:
        """For one of the row's moments."""
        return self._placeholders.of(row.tensor.shape, torch.float32, row.tensor.device)

    def is_placeholder(self, value: Any) -> bool:
        """Whether something in a register is a placeholder, so that its values are in blocks."""
        return self._placeholders.has(value)


def _codes_for(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, DynamicCode]:
    """Name → code of each moment that the optimizer keeps in a group with these settings."""
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
