"""Which moments are kept in 8-bit blocks, where they are, and what stands for them in the optimizers' registers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...config import ConfigError
from ...kernels.dynamic import SIGNED, UNSIGNED, DynamicCode
from ...layout.blocks import has_blocks, is_in_blocks
from ..buckets.bucket import Bucket, Row
from ..buckets.packed_state import PackedState
from .placeholders import StandIns, States
from .state_kinds import state_kinds
from .state_rows import elementwise_state

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


class PackedMoments:
    """Of each bucket, its moments in blocks by name, laid out as the rank's shard.

    In the optimizer's register a moment that is here has a stand-in. Blocks may also be elsewhere (in a file), where their
    holder has them; the stand-ins are then for those.

    Raises:
        ConfigError: an optimizer with other state, or one that a trial step tells nothing about.

    Attributes:
        stand_ins: in the registers.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._codes = {
            (index, group): _codes_for(optimizer, settings)
            for index, optimizer in enumerate(optimizers)
            for group, settings in enumerate(optimizer.param_groups)
        }
        self._states: dict[Bucket, dict[str, PackedState]] = {}
        self._lent: dict[Bucket, dict[str, torch.Tensor]] = {}
        self.stand_ins = StandIns()

    def takes(self, bucket: Bucket) -> bool:
        """Whether moments of the bucket are kept here."""
        return bucket.trained and has_blocks(bucket.layout) and bool(self.codes_of(bucket))

    def codes_of(self, bucket: Bucket) -> dict[str, DynamicCode]:
        """By name, the codes of the moments that the bucket's optimizer keeps."""
        return self._codes.get((bucket.key.optimizer, bucket.key.group), {})

    def of(self, bucket: Bucket) -> dict[str, PackedState]:
        """The bucket's moments by name; zeros at first."""
        if bucket not in self._states:
            numel = bucket.layout.shard_numel
            codes = self.codes_of(bucket)
            self._states[bucket] = {name: PackedState.zeros(numel, code, bucket.tier) for name, code in codes.items()}
        return self._states[bucket]

    def there_already(self, bucket: Bucket) -> dict[str, PackedState]:
        """The same; empty where nothing has been packed yet."""
        return self._states.get(bucket, {})

    def clear(self) -> None:
        """Gives the memory back."""
        self._states.clear()

    def packable(self, row: Row, state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """What of a row's state in the register is to be packed, or is."""
        if not is_in_blocks(row.slot.parameter.numel()):
            return []
        codes = self.codes_of(row.slot.bucket)
        return [(name, value) for name, value in elementwise_state(state, row).items() if name in codes]

    def lent_bytes(self, bucket: Bucket) -> int:
        """Bytes of all moments of the bucket in float32."""
        return len(self.codes_of(bucket)) * bucket.layout.shard_numel * torch.float32.itemsize

    def lend(self, bucket: Bucket, states: States, packed: Mapping[str, PackedState]) -> None:
        """Puts float32 tensors with the values of `packed` into `states` in place of stand-ins."""
        lent = self._lent[bucket] = {}
        for row, state in states.items():
            for name, value in self.packable(row, state):
                if not self.is_stand_in(value):
                    continue
                if name not in lent:
                    lent[name] = bucket.tier.scratch(bucket.layout.shard_numel, torch.float32)
                    packed[name].unpack(lent[name])
                state[name] = row.of(lent[name])

    @torch.no_grad()
    def take_back(self, bucket: Bucket, states: States, packed: Mapping[str, PackedState]) -> None:
        """Packs the moments in `states` into `packed`, as flat tensors that are zero where nothing is, and leaves stand-ins.

        See [Note: blocks of parameters] for why that comes to the same on any layout, and [Note: nothing drifts] for why rows
        that a step leaves alone stay as they are.
        """
        lent = self._lent.pop(bucket)
        for row, state in states.items():
            for name, value in self.packable(row, state):
                if name not in lent:
                    lent[name] = bucket.tier.scratch(bucket.layout.shard_numel, torch.float32).zero_()
                view = row.of(lent[name])
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                state[name] = self.stand_in(row)
        for name, values in lent.items():
            packed[name].pack(values)

    def pack(self, row: Row, state: dict[str, Any]) -> None:
        """Takes the row's moments that `state` has, and leaves stand-ins there."""
        for name, value in self.packable(row, state):
            if not self.is_stand_in(value):
                self.of(row.slot.bucket)[name].pack_part(row.layout.in_shard, value.reshape(-1).float())
                state[name] = self.stand_in(row)

    def settle(self, row: Row, name: str, state: dict[str, Any]) -> bool:
        """Has the row's moment here, zero if the register has none, or in float32 there if the parameter is too small.

        Returns whether it had values, as `FlatState.settle` does.
        """
        had = name in state
        if not is_in_blocks(row.slot.parameter.numel()):
            value = state[name] if had else torch.zeros_like(row.tensor)
            state[name] = value.to(torch.float32).contiguous()
            return had
        if had:
            self.pack(row, state)
        else:
            self.of(row.slot.bucket)[name].clear_part(row.layout.in_shard)
            state[name] = self.stand_in(row)
        return had

    def stand_in(self, row: Row) -> torch.Tensor:
        """For one of the row's moments."""
        return self.stand_ins.of(row.tensor.shape, torch.float32, row.tensor.device)

    def is_stand_in(self, value: Any) -> bool:
        """Whether something in a register is a stand-in, so that its values are here."""
        return self.stand_ins.has(value)


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
