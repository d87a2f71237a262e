"""Masters and optimizer state in a file, in full precision or with moments in 8-bit blocks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..allocation import allocate
from ..buckets.bucket import Bucket, Row
from ..buckets.rows import MASTER, PackedPart, PackedState
from ..layout.blocks import BLOCK_NUMEL, blocks
from ..layout.intervals import Interval
from ..offload.files import Kind, StoredShard
from ..offload.shards import Region
from .bucket_state import MasterAway, Placeholders, Regions, States, StateStorage, is_elementwise
from .moments_in_blocks import MomentStorage, PackedMoments

_HOST = torch.device("cpu")


class MasterInFile(MasterAway):
    """Stores the master in a region of the bucket's file."""

    def __init__(self, bucket: Bucket, shard: StoredShard, placeholders: Placeholders):
        self._shard = shard
        self._device = bucket.master.device
        super().__init__(bucket, placeholders.of((), bucket.precision.master, self._device))

    @property
    def region(self) -> Region | None:
        return None if self._bucket.precision.rounds else (self._shard, MASTER)

    def move_in(self) -> None:
        self._shard.write_part(MASTER, Interval(0, self._bucket.layout.shard_numel), self._bucket.master)
        self._leave()

    def _fetched(self, regions: Regions) -> torch.Tensor:
        return regions[MASTER]

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        buffer = allocate(self._shard.region_bytes(MASTER), torch.uint8, _HOST)
        stored = self._shard.read_region(MASTER, buffer)
        # On the host, this is `stored` itself.
        master = stored.to(self._device)
        self._bucket.fetch(master)
        try:
            yield
        finally:
            self._leave()
            # With the caller's writes.
            stored.copy_(master)
            self._shard.write_region(MASTER, buffer)
            self._shard.written_bytes += buffer.nbytes

    def put(self, row: Row, values: torch.Tensor) -> None:
        if self._bucket.is_away:
            self._shard.write_part(MASTER, row.layout.in_shard, values.reshape(-1))
        else:
            super().put(row, values)

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return self._shard.mapped_part(MASTER, row.layout.in_shard) if self._bucket.is_away else tensor


class StateInFile(StateStorage):
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
        self._exchange(states, regions, lambda view: self._placeholders.of(view.shape, view.dtype, view.device))

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
                kept[name] = self._placeholders.of(row.tensor.shape, self._shard.dtypes[name], row.tensor.device)
        return kept

    def close(self, states: States) -> None:
        _to_rows(states)

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


class MomentsInFile(MomentStorage):
    """Stores a bucket's moments in blocks in its file."""

    def __init__(self, bucket: Bucket, shard: StoredShard, moments: PackedMoments):
        super().__init__(moments)
        self._bucket = bucket
        self._shard = shard
        self._everything = Interval(0, bucket.layout.shard_numel)
        for name in moments.codes:
            # The padding after a parameter shares the scale of its last block, and stays zero.
            self._pack_part(name, self._everything, torch.zeros(self._everything.numel))

    def lend(self, states: States, regions: Regions) -> None:
        self._unpacked = self._moments.unpack(states, self._blocks_in(regions))

    def store(self, states: States, regions: Regions) -> None:
        self._moments.pack(states, self._unpacked, self._blocks_in(regions))
        self._unpacked = {}

    def close(self, states: States) -> None:
        _to_rows(states)

    def _part(self, row: Row, name: str) -> PackedPart:
        codes, scales = (self._shard.mapped_part(region, cut) for region, cut in _regions_of(name, self._everything))
        return PackedPart(PackedState(codes, scales, self._moments.codes[name]), row.layout.in_shard)

    def _pack_part(self, name: str, interval: Interval, values: torch.Tensor) -> None:
        packed = PackedState.zeros(interval.numel, self._moments.codes[name], self._bucket.tier)
        packed.pack(values.to(packed.codes.device))
        for (region, cut), part in zip(_regions_of(name, interval), (packed.codes, packed.scales), strict=True):
            self._shard.write_part(region, cut, part)

    def _packed_bytes(self) -> int:
        return sum(kind.nbytes for kind in kinds_in_blocks(self._moments.codes, self._everything.numel))

    def _blocks_in(self, regions: Regions) -> dict[str, PackedState]:
        found = {}
        for name, code in self._moments.codes.items():
            codes, scales = (regions[region] for region, _ in _regions_of(name, self._everything))
            found[name] = PackedState(codes, scales, code)
        return found


def _to_rows(states: States) -> None:
    """Moves state to the device of its rows, where the optimizer steps without an engine."""
    for row, state in states.items():
        for name, value in state.items():
            if is_elementwise(value, row):
                state[name] = value.to(row.tensor.device)


def kinds_in_blocks(names: Iterable[str], numel: int) -> list[Kind]:
    """Lists the regions of these moments in a file, in blocks."""
    dtypes = (torch.uint8, torch.float32)
    regions = [zip(_regions_of(name, Interval(0, numel)), dtypes, strict=True) for name in names]
    return [Kind(region, dtype, cut.numel) for pair in regions for (region, cut), dtype in pair]


def _regions_of(name: str, interval: Interval) -> tuple[tuple[str, Interval], tuple[str, Interval]]:
    """Returns (region, interval in the region) of codes and of scales of a moment's elements, which begin with a block."""
    scales = Interval(interval.start // BLOCK_NUMEL, blocks(interval.stop))
    return ((f"{name} codes", interval), (f"{name} scales", scales))
