"""Masters in memory, and masters in files."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...buckets.bucket import Bucket, Row
from ...buckets.packed_state import PackedPart
from ...buckets.rows import MASTER
from ...device import allocate
from ...layout.intervals import Interval
from ...offload.parameter_shards import Region
from ...offload.stored import StoredShard
from ..state.bucket_state import MasterCopy, MasterPlace, Regions
from ..state.placeholders import Placeholders

_HOST = torch.device("cpu")


class MasterInMemory(MasterPlace):
    """The bucket has it, or the parameters themselves are it."""

    is_away = False
    region = None

    def __init__(self, bucket: Bucket):
        self._bucket = bucket

    def move_in(self) -> None:
        """It is where it belongs."""

    def bring(self, regions: Regions) -> None:
        """It is at hand."""

    def put_away(self) -> None:
        """It is where it belongs. The parameters follow behind the step."""

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        yield

    def put(self, row: Row, values: torch.Tensor) -> None:
        put_into_row(row, values)

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return tensor

    def copy(self) -> MasterCopy:
        return _SecondMaster(self._bucket)

    @property
    def copy_bytes(self) -> int:
        return self._bucket.layout.shard_numel * self._bucket.precision.master.itemsize


class _SecondMaster:
    """The master and its copy change places when a step is taken over."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        self._spare: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._spare is None else self._spare.nbytes

    def begin(self, regions: Regions) -> torch.Tensor:
        if self._spare is None:
            self._spare = self._bucket.tier.empty(self._bucket.layout.shard_numel, self._bucket.precision.master)
        # By `data`, which has a version of its own: rows once made as views of this memory count its edits as their own.
        return self._spare.data.copy_(self._bucket.master)

    def take_over(self) -> None:
        stepped, self._spare = self._spare, self._bucket.master
        if stepped is not None:
            self._bucket.exchange_master(stepped.data)


class MasterInFile(MasterPlace):
    """A region of the bucket's file."""

    is_away = True

    def __init__(self, bucket: Bucket, shard: StoredShard, placeholders: Placeholders):
        self._bucket = bucket
        self._shard = shard
        self._absent = placeholders.of((), bucket.precision.master)

    @property
    def region(self) -> Region | None:
        return None if self._bucket.precision.rounds else (self._shard, MASTER)

    def move_in(self) -> None:
        self._shard.write_part(MASTER, Interval(0, self._bucket.layout.shard_numel), self._bucket.master)
        self._bucket.put_away(self._absent)

    def bring(self, regions: Regions) -> None:
        self._bucket.bring(regions[MASTER])
        self._bucket.follow_edits()

    def put_away(self) -> None:
        self._bucket.write_back()
        self._bucket.put_away(self._absent)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        if not self._bucket.is_away:
            yield
            return
        buffer = allocate(self._shard.region_bytes(MASTER), torch.uint8, _HOST)
        self._bucket.bring(self._shard.read_region(MASTER, buffer))
        try:
            yield
        finally:
            self._bucket.put_away(self._absent)
            self._shard.write_region(MASTER, buffer)
            self._shard.written_bytes += buffer.nbytes

    def put(self, row: Row, values: torch.Tensor) -> None:
        if self._bucket.is_away:
            self._shard.write_part(MASTER, row.layout.in_shard, values.reshape(-1))
        else:
            put_into_row(row, values)

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return self._shard.mapped_part(MASTER, row.layout.in_shard) if self._bucket.is_away else tensor

    def copy(self) -> MasterCopy:
        return _InOtherSide()

    @property
    def copy_bytes(self) -> int:
        return 0


class _InOtherSide:
    """A step writes the buffer with the file's contents, which goes to the file's other side."""

    nbytes = 0

    def begin(self, regions: Regions) -> torch.Tensor:
        return regions[MASTER]

    def take_over(self) -> None:
        """The file's sides change places."""


def put_into_row(row: Row, values: torch.Tensor) -> None:
    """Replaces the master that a row has in memory."""
    with torch.no_grad():
        row.tensor.copy_(values.view(row.tensor.shape))
