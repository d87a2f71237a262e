"""One bucket's state in its file, and what the optimizer's register has in place of it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch

from ...layout.blocks import BLOCK_NUMEL, blocks
from ...layout.intervals import Interval
from ...offload.stored import Kind, StoredShard
from ..buckets.bucket import Bucket, Row
from ..buckets.packed_state import PackedPart, PackedState
from ..buckets.rows import MASTER
from ..state.packed_moments import PackedMoments
from ..state.placeholders import StandIns, States


class FileState:
    """What is no stand-in in the register (freshly loaded, or made by the optimizer) is the state itself, and goes to the
    file with the next step of its bucket.

    A parameter without dimensions has state that looks like a scalar, and stays in memory as scalars do.
    """

    def __init__(self, bucket: Bucket, shard: StoredShard, stand_ins: StandIns):
        self.shard = shard
        self._bucket = bucket
        self._stand_ins = stand_ins

    @property
    def has_master(self) -> bool:
        return MASTER in self.shard.dtypes

    def master(self, buffer: torch.Tensor) -> torch.Tensor:
        """The master, (shard_numel,), in a buffer with the file's contents."""
        return self.shard.views(buffer)[MASTER]

    def absent_master(self) -> torch.Tensor:
        """A stand-in for it, 0-d."""
        return self._stand_ins.of((), self._bucket.precision.master)

    def lend(self, states: States, buffer: torch.Tensor) -> None:
        """Puts the values of `buffer`, which has the file's contents, into `states` in place of stand-ins."""
        self._exchange(states, buffer, lambda view: view)

    def take_back(self, states: States, buffer: torch.Tensor) -> None:
        """Leaves stand-ins in `states`, and in `buffer` what the file is to hold."""
        self._exchange(states, buffer, lambda view: self._stand_ins.of(view.shape, view.dtype))

    def values(self, row: Row, name: str) -> torch.Tensor:
        """What a stand-in of the row stands for, in memory of its own."""
        return self.shard.read_part(name, row.layout.in_shard).view(row.tensor.shape)

    def view(self, row: Row, kind: str) -> torch.Tensor | PackedPart:
        """The same as it is in the file, without taking memory for it."""
        return self.shard.mapped_part(kind, row.layout.in_shard)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Writes a row's state to the file; returns what belongs in the register."""
        kept = dict(state)
        for name, dtype in self.shard.dtypes.items():
            value = kept.get(name)
            if _belongs(value, row) and not self._stand_ins.has(value):
                self.shard.write_part(name, row.layout.in_shard, value.reshape(-1))
                kept[name] = self._stand_ins.of(row.tensor.shape, dtype)
        return kept

    def state_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of the state, of which the register has `tensors`, in the file and beside it."""
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def lent_bytes(self) -> int:
        """Memory beside the buffer that what is lent takes."""
        return 0

    def _exchange(self, states: States, buffer: torch.Tensor, instead: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Puts `instead` of its place in the buffer into the register for each state tensor, whose values then are there."""
        views = self.shard.views(buffer)
        for row, state in states.items():
            for name in views:
                value = state.get(name)
                if not _belongs(value, row):
                    continue
                view = row.of(views[name])
                if not self._stand_ins.has(value) and value.data_ptr() != view.data_ptr():
                    view.copy_(value.view(view.shape))
                state[name] = instead(view)


class PackedFileState(FileState):
    """Moments are in the file in 8-bit blocks; those of parameters that are too small for blocks stay in memory.

    Args:
        packed: what moments of the bucket are kept so.
    """

    def __init__(self, bucket: Bucket, shard: StoredShard, packed: PackedMoments):
        super().__init__(bucket, shard, packed.stand_ins)
        self._packed = packed
        self._codes = packed.codes_of(bucket)
        self._whole = Interval(0, bucket.layout.shard_numel)
        for name in self._codes:
            # Padding behind a parameter shares its last block's scale, and stays zero.
            self._pack_part(name, self._whole, torch.zeros(self._whole.numel))

    @property
    def lent_bytes(self) -> int:
        return self._packed.lent_bytes(self._bucket)

    def lend(self, states: States, buffer: torch.Tensor) -> None:
        self._packed.lend(self._bucket, states, self._packed_in(buffer))

    def take_back(self, states: States, buffer: torch.Tensor) -> None:
        self._packed.take_back(self._bucket, states, self._packed_in(buffer))

    def values(self, row: Row, name: str) -> torch.Tensor:
        return self.view(row, name).detach().view(row.tensor.shape)

    def view(self, row: Row, kind: str) -> torch.Tensor | PackedPart:
        if kind == MASTER:
            return super().view(row, kind)
        codes, scales = (self.shard.mapped_part(name, cut) for name, cut in _regions_of(kind, self._whole))
        return PackedPart(PackedState(codes, scales, self._codes[kind]), row.layout.in_shard)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        kept = dict(state)
        for name, value in self._packed.packable(row, kept):
            if not self._stand_ins.has(value):
                self._pack_part(name, row.layout.in_shard, value.reshape(-1).float())
                kept[name] = self._packed.stand_in(row)
        return kept

    def state_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        packed = sum(kind.nbytes for kind in packed_kinds(self._codes, self._whole.numel))
        return packed + sum(tensor.nbytes for tensor in tensors if not self._stand_ins.has(tensor))

    def _pack_part(self, name: str, interval: Interval, values: torch.Tensor) -> None:
        packed = PackedState.zeros(interval.numel, self._codes[name], self._bucket.tier)
        packed.pack(values)
        for (region, cut), part in zip(_regions_of(name, interval), (packed.codes, packed.scales), strict=True):
            self.shard.write_part(region, cut, part)

    def _packed_in(self, buffer: torch.Tensor) -> dict[str, PackedState]:
        views = self.shard.views(buffer)
        found = {}
        for name, code in self._codes.items():
            codes, scales = (views[region] for region, _ in _regions_of(name, self._whole))
            found[name] = PackedState(codes, scales, code)
        return found


def _belongs(value: Any, row: Row) -> TypeGuard[torch.Tensor]:
    """Whether this is state with one value an element of the row."""
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == row.tensor.shape


def packed_kinds(names: Iterable[str], numel: int) -> list[Kind]:
    """What a file has of these moments, in blocks."""
    dtypes = (torch.uint8, torch.float32)
    regions = [zip(_regions_of(name, Interval(0, numel)), dtypes, strict=True) for name in names]
    return [Kind(region, dtype, cut.numel) for pair in regions for (region, cut), dtype in pair]


def _regions_of(name: str, interval: Interval) -> tuple[tuple[str, Interval], tuple[str, Interval]]:
    """(name in the file, interval there) of the codes and of the scales of a moment's elements, which begin with a block."""
    scales = Interval(interval.start // BLOCK_NUMEL, blocks(interval.stop))
    return ((f"{name} codes", interval), (f"{name} scales", scales))
