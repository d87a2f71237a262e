"""Moments in 8-bit blocks, which are float32 for the moment in which their bucket is stepped."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..config import ConfigError
from ..kernels.dynamic import SIGNED, UNSIGNED, DynamicCode
from ..layout.blocks import has_blocks, is_in_blocks
from .bucket_steps import OwnStep
from .buckets import Bucket, Row
from .in_turn_holder import SteppedInTurn
from .packed_state import PackedPart, PackedState
from .stand_ins import StandIns
from .state_kinds import state_kinds
from .state_rows import elementwise_state
from .stochastic_holder import RoundedStochastically

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


class InEightBits(SteppedInTurn):
    """State that is packed has a stand-in in the optimizer's register: its shape, without memory, reading as NaN.

    What is no stand-in there (freshly loaded by the script, or made by the optimizer) is the state itself, and is packed
    behind the next step of its bucket. The state of a bucket is packed as one flat tensor laid out as the shard, zero where
    nothing is. See [Note: blocks of parameters] for why that comes to the same on any layout, and [Note: nothing drifts] for
    why rows that a step leaves alone stay as they are.

    Raises:
        ConfigError: an optimizer with other state, or one that a trial step tells nothing about.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        super().__init__(optimizers, OwnStep)
        self._codes = {
            (index, group): _codes_for(optimizer, settings)
            for index, optimizer in enumerate(optimizers)
            for group, settings in enumerate(optimizer.param_groups)
        }
        self._packed: dict[Bucket, dict[str, PackedState]] = {}
        self._lent: dict[Bucket, dict[str, torch.Tensor]] = {}
        self._stand_ins = StandIns()
        self._window_bytes = 0

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        super().step_with(optimizer, buckets)
        for bucket in filter(self._is_packed, buckets):
            moments = len(self._codes_of(bucket)) * bucket.layout.shard_numel * torch.float32.itemsize
            self._window_bytes = max(self._window_bytes, moments)
            for row in bucket.rows:
                if row.tensor in optimizer.state:
                    optimizer.state[row.tensor] = self.put(row, optimizer.state[row.tensor])

    def values(self, row: Row, name: str, value: Any) -> Any:
        if not self._stand_ins.has(value):
            return value
        return self._packed[row.slot.bucket][name].part(row.layout.in_shard).view(row.tensor.shape)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        if not self._stand_ins.has(tensor):
            return tensor
        return PackedPart(self._packed[row.slot.bucket][kind], row.layout.in_shard)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        kept = super().put(row, state)
        for name, value in self._packable(row, kept):
            if not self._stand_ins.has(value):
                self._states_of(row.slot.bucket)[name].pack_part(row.layout.in_shard, value.reshape(-1).float())
                kept[name] = self._stand_in(row)
        return kept

    def state_bytes(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> int:
        packed = sum(state.nbytes for state in self._packed.get(bucket, {}).values())
        return packed + sum(tensor.nbytes for tensor in tensors if not self._stand_ins.has(tensor))

    def window_bytes(self) -> int:
        return self._window_bytes

    def close(self, buckets: Sequence[Bucket]) -> None:
        super().close(buckets)
        for bucket in buckets:
            # Rows of a whole bucket are the parameters, whose state stays with the optimizer.
            for row in bucket.rows if bucket.whole and bucket in self._packed else ():
                state = self._register(bucket).get(row.tensor, {})
                for name, value in state.items():
                    state[name] = self.values(row, name, value)
        self._packed.clear()

    def _passes(self, bucket: Bucket) -> bool:
        return self._is_packed(bucket)

    def _is_packed(self, bucket: Bucket) -> bool:
        return bucket.trained and has_blocks(bucket.layout) and bool(self._codes_of(bucket))

    def _bring(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        lent = self._lent[bucket] = {}
        for name, packed in self._packed.get(bucket, {}).items():
            lent[name] = bucket.tier.scratch(bucket.layout.shard_numel, torch.float32)
            packed.unpack(lent[name])
        for row, name, value in self._moments(bucket):
            if self._stand_ins.has(value):
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
            self._register(bucket)[row.tensor][name] = self._stand_in(row)
        for name, values in lent.items():
            self._states_of(bucket)[name].pack(values)

    def _moments(self, bucket: Bucket) -> Iterator[tuple[Row, str, torch.Tensor]]:
        """What the register has of a bucket that is to be packed, or is: (row, name, tensor)."""
        register = self._register(bucket)
        for row in bucket.rows:
            # By `get`: the register makes an entry for whoever asks, and an empty one would look like a step taken.
            yield from ((row, name, value) for name, value in self._packable(row, register.get(row.tensor, {})))

    def _packable(self, row: Row, state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        if not is_in_blocks(row.slot.parameter.numel()):
            return []
        codes = self._codes_of(row.slot.bucket)
        return [(name, value) for name, value in elementwise_state(state, row).items() if name in codes]

    def _states_of(self, bucket: Bucket) -> dict[str, PackedState]:
        if bucket not in self._packed:
            numel = bucket.layout.shard_numel
            codes = self._codes_of(bucket)
            self._packed[bucket] = {name: PackedState(numel, code, bucket.tier) for name, code in codes.items()}
        return self._packed[bucket]

    def _codes_of(self, bucket: Bucket) -> dict[str, DynamicCode]:
        return self._codes.get(bucket.layout.key[2:], {})

    def _stand_in(self, row: Row) -> torch.Tensor:
        return self._stand_ins.of(row.tensor.shape, torch.float32, row.tensor.device)


class RoundedInEightBits(InEightBits, RoundedStochastically):
    """The same for bfloat16 parameters without masters: masters and moments are float32 for the step alone."""

    def _passes(self, bucket: Bucket) -> bool:
        return RoundedStochastically._passes(self, bucket) or self._is_packed(bucket)

    def _bring(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        RoundedStochastically._bring(self, bucket, _shard, _buffer)
        InEightBits._bring(self, bucket, _shard, _buffer)

    def _put_back(self, bucket: Bucket, _shard: Bucket, _buffer: None) -> None:
        RoundedStochastically._put_back(self, bucket, _shard, _buffer)
        InEightBits._put_back(self, bucket, _shard, _buffer)


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
