"""Moments in 8-bit blocks, rounded masters, optimizer state in files, and the choice for each bucket."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..arithmetic.stochastic import REGION_NUMEL, counters_for, round_stochastically
from ..buckets.bucket import Bucket, Row
from ..buckets.rows import MASTER, SIGNED, UNSIGNED, DynamicCode, PackedPart, PackedState
from ..config import ConfigError, ZeroConfig
from ..device import allocate
from ..layout.blocks import BLOCK_NUMEL, blocks, has_blocks, is_in_blocks
from ..layout.intervals import Interval
from ..offload.files import Kind, StoredShard
from ..offload.shards import Region
from ..offload.tiers import StateFiles, Tier
from .bucket_state import (
    BucketState,
    MasterPlace,
    Placeholders,
    Regions,
    StatePlace,
    States,
    is_elementwise,
    kinds_by_size,
    state_kinds,
)

# ---- Moments in 8-bit blocks, and their conversion ----

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
        lent = {}
        for name, coded in packed.items():
            lent[name] = self._bucket.tier.scratch(self._bucket.layout.shard_numel, torch.float32)
            coded.unpack(lent[name])
        for row, state in states.items():
            for name, value in self.packable(row, state):
                if self.is_placeholder(value):
                    state[name] = row.of(lent[name])
        return lent

    @torch.no_grad()
    def pack(self, states: States, lent: dict[str, torch.Tensor], packed: Mapping[str, PackedState]) -> None:
        """Packs the moments in `states` into `packed`, as flat tensors with zeros in the gaps; leaves placeholders.

        [Note: blocks of parameters] explains why the result does not depend on the layout, and [Note: nothing drifts] why rows
        without a step do not change.

        Args:
            lent: the result of `unpack`.
        """
        for row, state in states.items():
            for name, value in self.packable(row, state):
                # In a first step there were no blocks, and the optimizer has made its own tensors. Scratch memory is not
                # cleared: without `zero_`, its old bytes would become moments of rows without state.
                if name not in lent:
                    lent[name] = self._bucket.tier.scratch(self._bucket.layout.shard_numel, torch.float32).zero_()
                view = row.of(lent[name])
                # Copy if the optimizer has replaced the tensor. An unchanged tensor already has its values in place.
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
    """Returns the code of each moment by name, for a group with these settings."""
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
    """A bucket's moments in blocks, converted to float32 during a step of the bucket.

    Moments of small parameters stay in the optimizer's state.

    Attributes:
        packed: by name; empty before the first step.
    """

    is_away = True

    def __init__(self, moments: PackedMoments):
        self._moments = moments
        self._lent: dict[str, torch.Tensor] = {}
        self.packed: dict[str, PackedState] = {}
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

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        packed = sum(state.nbytes for state in self.packed.values())
        return packed + sum(tensor.nbytes for tensor in tensors if not self._moments.is_placeholder(tensor))

    def close(self) -> None:
        self.packed = {}


# ---- bfloat16 parameters without a master: stepped in a temporary float32 copy, and rounded stochastically ----

STEP = "rounding_step"
"""Number of roundings of a parameter, stored next to the optimizer's own state."""

_KEY_BITS = 63


class RoundedMaster(MasterPlace):
    """Makes a float32 master of a bucket's parameters for a step, and rounds the master into the parameters afterwards.

    [Note: whose random bits]
    An element's bits only depend on the parameter's name, the element's index and the number of roundings, not on the world size,
    the stage or the buckets. The number is in `optimizer.state` as `rounding_step`, so a resumed run draws the same bits.

    With float32 moments, Adam needs 10 bytes per parameter, instead of 14 with a master.
    Stochastic rounding in training: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.

    Args:
        optimizer: steps the bucket; None without one.
    """

    is_away = True

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer | None):
        super().__init__(bucket)
        self._optimizer = optimizer
        self._absent = torch.full((), float("nan"), dtype=bucket.precision.master, device=bucket.device)

    def move_in(self) -> None:
        self._bucket.store(self._absent)

    def fetch(self, regions: Regions) -> None:
        master = self._bucket.tier.scratch(self._bucket.layout.shard_numel, self._bucket.precision.master)
        self._bucket.fetch(master.copy_(self._bucket.own))

    @torch.no_grad()
    def store(self) -> None:
        register = {} if self._optimizer is None else self._optimizer.state
        for row in self._bucket.rows:
            # Only count stepped rows: a count for another row would create an entry in `optimizer.state`, like a step.
            if row.tensor.grad is not None:
                state = register[row.tensor]
                round_row(row, self._bucket.master, self._bucket.own, count=state.get(STEP, 0))
                # Increase the count after rounding, because the old count selects the bits, also in a resumed run.
                state[STEP] = state.get(STEP, 0) + 1
        self._bucket.store(self._absent)

    @contextmanager
    def fetched_master(self) -> Iterator[None]:
        # Inside another of these contexts, the master is already in memory. A second fetch would drop its edits.
        if not self._bucket.is_away:
            yield
            return
        # Edits are written to the parameter itself, with which the next step begins.
        self._bucket.fetch(self._bucket.own.to(self._bucket.precision.master))
        try:
            yield
        finally:
            self._bucket.store(self._absent)

    def put(self, row: Row, values: torch.Tensor) -> None:
        # A saved master of an earlier run is not needed, because its rounded values were loaded as the parameters.
        if not self._bucket.is_away:
            super().put(row, values)


def round_row(row: Row, master: torch.Tensor, own: torch.Tensor, *, count: int) -> None:
    """Rounds one row of `master` into `own`, both with the layout of the rank's shard.

    Args:
        count: number of previous roundings of the parameter.
    """
    source, start = row.layout.in_shard, row.layout.in_parameter.start
    values = master[source.start : source.stop]
    # Random bits are drawn in regions of the parameter, and a row may begin inside a region.
    before = start % REGION_NUMEL
    padded = torch.cat([values.new_zeros(before), values]) if before else values
    rounded = torch.empty_like(padded, dtype=own.dtype)
    # Use the parameter's size instead of the row's, because the bits must not depend on the world size.
    offset = count * counters_for(row.slot.interval.numel) + counters_for(start - before)
    round_stochastically(padded, rounded, seed=_key_of(row.slot.name), offset=offset)
    own[source.start : source.stop].copy_(rounded[before:])


def _key_of(name: str) -> int:
    # Do not use `hash`, which Python salts in each process: ranks and resumed runs must draw the same bits.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> (64 - _KEY_BITS)


# ---- Masters and optimizer state in a file: in full precision, or moments in 8-bit blocks ----

_HOST = torch.device("cpu")


class MasterInFile(MasterPlace):
    """Stores the master in a region of the bucket's file."""

    is_away = True

    def __init__(self, bucket: Bucket, shard: StoredShard, placeholders: Placeholders):
        super().__init__(bucket)
        self._shard = shard
        self._absent = placeholders.of((), bucket.precision.master)

    @property
    def region(self) -> Region | None:
        return None if self._bucket.precision.rounds else (self._shard, MASTER)

    def move_in(self) -> None:
        self._shard.write_part(MASTER, Interval(0, self._bucket.layout.shard_numel), self._bucket.master)
        self._bucket.store(self._absent)

    def fetch(self, regions: Regions) -> None:
        self._bucket.fetch(regions[MASTER])
        # After the fetch and before the step, because the stepped master must include a script's edits of the parameter.
        self._bucket.follow_edits()

    def store(self) -> None:
        # Write the parameters before the master is stored, from the values in memory.
        self._bucket.write_back()
        self._bucket.store(self._absent)

    @contextmanager
    def fetched_master(self) -> Iterator[None]:
        if not self._bucket.is_away:
            yield
            return
        buffer = allocate(self._shard.region_bytes(MASTER), torch.uint8, _HOST)
        self._bucket.fetch(self._shard.read_region(MASTER, buffer))
        try:
            yield
        finally:
            self._bucket.store(self._absent)
            # The master was a view of `buffer`, which therefore contains the caller's writes.
            self._shard.write_region(MASTER, buffer)
            self._shard.written_bytes += buffer.nbytes

    def put(self, row: Row, values: torch.Tensor) -> None:
        if self._bucket.is_away:
            self._shard.write_part(MASTER, row.layout.in_shard, values.reshape(-1))
        else:
            super().put(row, values)

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return self._shard.mapped_part(MASTER, row.layout.in_shard) if self._bucket.is_away else tensor


class StateInFile(StatePlace):
    """Stores tensors with one value per element, each in a region of the bucket's file.

    The state of a parameter without dimensions looks like a scalar, and stays in `optimizer.state` like scalars.

    Args:
        names: the names of the regions.
    """

    is_away = True

    def __init__(self, shard: StoredShard, names: Sequence[str], placeholders: Placeholders):
        self._shard = shard
        self._names = names
        self._placeholders = placeholders

    def lend(self, states: States, regions: Regions) -> None:
        self._exchange(states, regions, lambda view: view)

    def store(self, states: States, regions: Regions) -> None:
        self._exchange(states, regions, lambda view: self._placeholders.of(view.shape, view.dtype))

    def values(self, row: Row, name: str, value: Any) -> Any:
        if not self._placeholders.has(value):
            return value
        return self._shard.read_part(name, row.layout.in_shard).view(row.tensor.shape)

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return self._shard.mapped_part(kind, row.layout.in_shard) if self._placeholders.has(tensor) else tensor

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        kept = dict(state)
        for name in self._names:
            value = kept.get(name)
            if is_elementwise(value, row) and not self._placeholders.has(value):
                self._shard.write_part(name, row.layout.in_shard, value.reshape(-1))
                kept[name] = self._placeholders.of(row.tensor.shape, self._shard.dtypes[name])
        return kept

    def _exchange(self, states: States, regions: Regions, instead: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Copies each state tensor to its view of the buffer, and replaces the tensor in `states` by `instead(view)`."""
        for row, state in states.items():
            for name in self._names:
                value = state.get(name)
                if not is_elementwise(value, row):
                    continue
                view = row.of(regions[name])
                # A placeholder would overwrite the values in the buffer with NaN. State outside of the buffer comes from a first
                # step, from a load, or from an optimizer that replaces its tensors, and must be copied into the file.
                if not self._placeholders.has(value) and value.data_ptr() != view.data_ptr():
                    view.copy_(value.view(view.shape))
                state[name] = instead(view)


class MomentsInFile(StatePlace):
    """Stores moments in the file in 8-bit blocks; moments of small parameters stay in `optimizer.state`."""

    is_away = True

    def __init__(self, bucket: Bucket, shard: StoredShard, moments: PackedMoments):
        self._bucket = bucket
        self._shard = shard
        self._moments = moments
        self._everything = Interval(0, bucket.layout.shard_numel)
        self._lent: dict[str, torch.Tensor] = {}
        self.lent_bytes = moments.float_bytes
        for name in moments.codes:
            # The padding after a parameter shares the scale of its last block, and stays zero.
            self._pack_part(name, self._everything, torch.zeros(self._everything.numel))

    def lend(self, states: States, regions: Regions) -> None:
        self._lent = self._moments.unpack(states, self._blocks_in(regions))

    def store(self, states: States, regions: Regions) -> None:
        self._moments.pack(states, self._lent, self._blocks_in(regions))
        self._lent = {}

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
        packed = sum(kind.nbytes for kind in kinds_in_blocks(self._moments.codes, self._everything.numel))
        return packed + sum(tensor.nbytes for tensor in tensors if not self._moments.is_placeholder(tensor))

    def _part(self, row: Row, name: str) -> PackedPart:
        codes, scales = (self._shard.mapped_part(region, cut) for region, cut in _regions_of(name, self._everything))
        return PackedPart(PackedState(codes, scales, self._moments.codes[name]), row.layout.in_shard)

    def _pack_part(self, name: str, interval: Interval, values: torch.Tensor) -> None:
        packed = PackedState.zeros(interval.numel, self._moments.codes[name], self._bucket.tier)
        packed.pack(values)
        for (region, cut), part in zip(_regions_of(name, interval), (packed.codes, packed.scales), strict=True):
            self._shard.write_part(region, cut, part)

    def _blocks_in(self, regions: Regions) -> dict[str, PackedState]:
        found = {}
        for name, code in self._moments.codes.items():
            codes, scales = (regions[region] for region, _ in _regions_of(name, self._everything))
            found[name] = PackedState(codes, scales, code)
        return found


def kinds_in_blocks(names: Iterable[str], numel: int) -> list[Kind]:
    """Lists the regions of these moments in a file, in blocks."""
    dtypes = (torch.uint8, torch.float32)
    regions = [zip(_regions_of(name, Interval(0, numel)), dtypes, strict=True) for name in names]
    return [Kind(region, dtype, cut.numel) for pair in regions for (region, cut), dtype in pair]


def _regions_of(name: str, interval: Interval) -> tuple[tuple[str, Interval], tuple[str, Interval]]:
    """Returns (region, interval in the region) of codes and of scales of a moment's elements, which begin with a block."""
    scales = Interval(interval.start // BLOCK_NUMEL, blocks(interval.stop))
    return ((f"{name} codes", interval), (f"{name} scales", scales))


# ---- The choice for each bucket ----


class Places:
    """Chooses the storage of each new bucket's state by its tier, precision and moments.

    Args:
        tier: the tier of offloaded buckets.
        optimizers: the engine's optimizers, in order.

    Attributes:
        placeholders: represent state stored elsewhere in `optimizer.state`.

    Raises:
        ConfigError: `moments: 8bit` for an optimizer whose state cannot be stored in blocks.
    """

    def __init__(self, config: ZeroConfig, tier: Tier, optimizers: Sequence[torch.optim.Optimizer]):
        self._tier = tier
        self._optimizers = optimizers
        # Only for `moments: 8bit`, because otherwise an optimizer may keep state unseen by a trial step.
        self._codes = codes_of_groups(optimizers if config.quantises_moments else ())
        self.placeholders = Placeholders()

    def of(self, bucket: Bucket) -> BucketState:
        """Chooses the storage of a bucket, and creates its file if needed.

        Raises:
            ValueError: no trial step shows the state for a file, or two regions would have the same name.
            OffloadError: the disk is full.
        """
        is_stepped = bucket.trained and bucket.key.optimizer >= 0
        optimizer = self._optimizers[bucket.key.optimizer] if is_stepped else None
        codes = self._codes.get((bucket.key.optimizer, bucket.key.group), {})
        is_in_blocks = bucket.trained and has_blocks(bucket.layout)
        moments = PackedMoments(bucket, codes if is_in_blocks else {}, self.placeholders)
        files = self._tier.files
        # With `offload.ratio` below 1, the last buckets use the device's tier, without files.
        if files is None or optimizer is None or bucket.tier is not self._tier:
            return BucketState(bucket, optimizer, self._master_in_memory(bucket, optimizer), _in_memory(moments))
        return self._in_file(bucket, optimizer, moments, files)

    def _in_file(
        self, bucket: Bucket, optimizer: torch.optim.Optimizer, moments: PackedMoments, files: StateFiles
    ) -> BucketState:
        kinds = _kinds_in_file(bucket, optimizer, moments) if files.holds_state else []
        # If the files only belong to parameters, a master is only in a file if its dtype is the parameters' own.
        has_master = bucket.precision.has_master and (files.holds_state or not bucket.precision.rounds)
        masters = [Kind(MASTER, bucket.precision.master, bucket.layout.shard_numel)] if has_master else []
        if not (masters or kinds):
            return BucketState(bucket, optimizer, MasterPlace(bucket), _in_memory(moments))
        if masters and any(kind.name == MASTER for kind in kinds):
            raise ValueError(
                f"hf_zero: {type(optimizer).__name__} keeps state that it calls {MASTER!r}, and so are the fp32 copies of "
                "parameters called in files. Give it another name, or use `offload.optimizer: cpu`."
            )
        shard = files.store(bucket.name, [*masters, *kinds])
        master = MasterInFile(bucket, shard, self.placeholders) if has_master else MasterPlace(bucket)
        state = self._state_in(shard, bucket, kinds, moments) if kinds else _in_memory(moments)
        return BucketState(bucket, optimizer, master, state, shard)

    def _state_in(
        self, shard: StoredShard, bucket: Bucket, kinds: Sequence[Kind], moments: PackedMoments
    ) -> StatePlace:
        if moments.codes:
            return MomentsInFile(bucket, shard, moments)
        return StateInFile(shard, [kind.name for kind in kinds], self.placeholders)

    def _master_in_memory(self, bucket: Bucket, optimizer: torch.optim.Optimizer | None) -> MasterPlace:
        is_rounded = bucket.trained and bucket.precision.stochastic
        return RoundedMaster(bucket, optimizer) if is_rounded else MasterPlace(bucket)


def _in_memory(moments: PackedMoments) -> StatePlace:
    return StateInBlocks(moments) if moments.codes else StatePlace()


def _kinds_in_file(bucket: Bucket, optimizer: torch.optim.Optimizer, moments: PackedMoments) -> list[Kind]:
    """Lists the regions of optimizer state in a bucket's file."""
    numel = bucket.layout.shard_numel
    if moments.codes:
        return kinds_in_blocks(moments.codes, numel)
    kinds = state_kinds(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master)
    if kinds_by_size(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master):
        raise ValueError(
            f"hf_zero: {type(optimizer).__name__} keeps other state for large parameters than for small ones, and a file has one "
            "place for both. Use `offload.optimizer: cpu`, or torch.optim.AdamW with `moments: 8bit`."
        )
    if kinds is None:
        raise ValueError(
            f"hf_zero: what state {type(optimizer).__name__} keeps cannot be seen by a trial step, so no file can be laid out "
            "for it. Use one of torch's optimizers, or `offload.optimizer: cpu`."
        )
    return [Kind(name, dtype, numel) for name, dtype in kinds]
