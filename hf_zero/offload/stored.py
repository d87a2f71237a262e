"""One shard's state in one file."""

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from ..device import allocate
from ..layout.intervals import Interval
from .files import ALIGNMENT, AlignedFile, OffloadError, aligned

_HOST = torch.device("cpu")
_CHUNK_BYTES = 256 * ALIGNMENT


@dataclass(frozen=True)
class Kind:
    """A flat tensor, (numel,) of its dtype, that a file has under a name."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class StoredShard:
    """A file with a region for each kind of state.

    [Note: two sides of a file]
    A file may have a second side of the same layout, which holds nothing that counts: what the state will be is written there,
    while all reads, and writes to a part, go to the first. `exchange` makes it the state, and the old state the side that
    holds nothing. Until then the old state is whole, whatever happens to what will be.

    [Note: checksums]
    Each region is a row of chunks, whose xxh3 is kept in memory when they are written. Whoever reads a chunk compares it, in the
    thread that reads. So reads and writes of a part are of whole chunks.

    Args:
        kinds: what has a region.

    Attributes:
        nbytes: of one side.
        edition: grows with each write to the side that counts.
        read_bytes, written_bytes: moved so far.
    """

    def __init__(self, path: Path, kinds: Sequence[Kind]):
        self._regions: dict[str, tuple[int, Kind]] = {}
        offset = 0
        for kind in kinds:
            self._regions[kind.name] = (offset, kind)
            offset += aligned(kind.nbytes)
        self.nbytes = offset
        self.edition = 0
        self._start = 0
        # By the chunk's first byte in the file: its xxh3, and whether what is mapped of it has been compared.
        self._sums: dict[int, int] = {}
        self._is_compared: set[int] = set()
        self.read_bytes = self.written_bytes = 0
        self.file = AlignedFile(path, self.nbytes)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: kind.dtype for name, (_, kind) in self._regions.items()}

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The kinds, (numel,) each, in a buffer (uint8) of at least `nbytes`."""
        return {
            name: buffer[offset : offset + kind.nbytes].view(kind.dtype)
            for name, (offset, kind) in self._regions.items()
        }

    def read(self, buffer: torch.Tensor) -> None:
        self._read(buffer[: self.nbytes], self._start)
        self.read_bytes += self.nbytes

    def write(self, buffer: torch.Tensor) -> None:
        self.edition += 1
        self._write(buffer[: self.nbytes], self._start)
        self.written_bytes += self.nbytes

    def add_side(self) -> None:
        """Makes a second side. Raises `OffloadError` where there is no room for it."""
        self.file.grow(self.nbytes)

    def write_aside(self, buffer: torch.Tensor) -> None:
        """Writes the side that does not count."""
        self._write(buffer[: self.nbytes], self.nbytes - self._start)
        self.written_bytes += self.nbytes

    def exchange(self) -> None:
        """Has the other side count."""
        self._start = self.nbytes - self._start
        self.edition += 1

    def region_bytes(self, kind: str) -> int:
        """Of the buffers that `read_region` and `write_region` take for this kind."""
        return aligned(self._regions[kind][1].nbytes)

    def read_region(self, kind: str, buffer: torch.Tensor) -> torch.Tensor:
        """All of one kind, (numel,), read into a buffer (uint8) of `region_bytes`."""
        self._read(buffer, self._start + self._regions[kind][0])
        self.read_bytes += buffer.nbytes
        return self.region_values(kind, buffer)

    def region_values(self, kind: str, buffer: torch.Tensor) -> torch.Tensor:
        """All of one kind, (numel,), in a buffer that `read_region` has filled."""
        found = self._regions[kind][1]
        return buffer[: found.nbytes].view(found.dtype)

    def write_region(self, kind: str, buffer: torch.Tensor) -> None:
        """Replaces all of one kind by a buffer (uint8) of `region_bytes`, which the caller has counted."""
        self.edition += 1
        self._write(buffer, self._start + self._regions[kind][0])

    def read_part(self, kind: str, interval: Interval) -> torch.Tensor:
        """The elements `interval` of one kind, in memory of their own."""
        return self._read_around(kind, interval)[0].clone()

    def mapped_part(self, kind: str, interval: Interval) -> torch.Tensor:
        """The elements `interval` of one kind as the file has them, read when they are looked at: a view, not a copy.

        The chunks that hold them are compared first, once after each write.

        Raises:
            OffloadError: the file is shorter than it was, or a chunk is not as it was written.
        """
        start, stop, dtype = self._span(kind, interval)
        self.file.refuse_cut()
        mapped = self.file.mapped()
        for begin, end in self._chunks(start, stop):
            if begin not in self._is_compared:
                self._compare(mapped[begin:end], begin)
                self._is_compared.add(begin)
        return mapped[start:stop].view(dtype)

    def write_part(self, kind: str, interval: Interval, values: torch.Tensor) -> None:
        """Replaces the elements `interval` of one kind by the 1-D `values`."""
        part, blocks, first = self._read_around(kind, interval)
        part.copy_(values)
        self.edition += 1
        self._write(blocks, first)
        self.written_bytes += blocks.nbytes

    def _read_around(self, kind: str, interval: Interval) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(the elements, the whole chunks around them, the chunks' offset in the file)."""
        start, stop, dtype = self._span(kind, interval)
        chunks = list(self._chunks(start, stop))
        first = chunks[0][0] if chunks else start
        blocks = allocate(chunks[-1][1] - first if chunks else 0, torch.uint8, _HOST)
        self._read(blocks, first)
        self.read_bytes += blocks.nbytes
        return blocks[start - first : stop - first].view(dtype), blocks, first

    def _span(self, kind: str, interval: Interval) -> tuple[int, int, torch.dtype]:
        """(first byte, the one behind the last, dtype) of the elements `interval` of one kind in the file."""
        offset, dtype = self._regions[kind][0], self._regions[kind][1].dtype
        start = self._start + offset
        return start + interval.start * dtype.itemsize, start + interval.stop * dtype.itemsize, dtype

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(first byte, the one behind the last) of the chunks that have bytes from `start` to `stop`, which are on one side."""
        side = start // self.nbytes * self.nbytes if self.nbytes else 0
        for offset, kind in self._regions.values():
            begin, end = side + offset, side + offset + aligned(kind.nbytes)
            if end <= start:
                continue
            first = begin + max(0, start - begin) // _CHUNK_BYTES * _CHUNK_BYTES
            for each in range(first, min(end, stop), _CHUNK_BYTES):
                yield each, min(each + _CHUNK_BYTES, end)

    def _read(self, buffer: torch.Tensor, offset: int) -> None:
        """Reads whole chunks, and compares them."""
        self.file.read(buffer, offset)
        for begin, end in self._chunks(offset, offset + buffer.nbytes):
            self._compare(buffer[begin - offset : end - offset], begin)

    def _write(self, buffer: torch.Tensor, offset: int) -> None:
        """Writes whole chunks."""
        for begin, end in self._chunks(offset, offset + buffer.nbytes):
            self._sums[begin] = _sum_of(buffer[begin - offset : end - offset])
            self._is_compared.discard(begin)
        self.file.write(buffer, offset)

    def _compare(self, chunk: torch.Tensor, begin: int) -> None:
        """Raises `OffloadError` where a chunk is not as it was written; one that was never written is of no value."""
        expected = self._sums.get(begin)
        if expected is not None and _sum_of(chunk) != expected:
            raise OffloadError(
                errno.EIO,
                f"hf_zero: {self.file.path}: the {chunk.nbytes} bytes at {begin} are not those that were written: the disk or "
                "the way to it has changed them, or another process has. The state of this run is not whole any more: end it, "
                "see to the disk, and resume from the last checkpoint.",
            )


def _sum_of(chunk: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(chunk.numpy())


class ReadRegion:
    """One kind of a shard, for a walk that only reads it."""

    def __init__(self, shard: StoredShard, kind: str):
        self._shard = shard
        self._kind = kind
        self.nbytes = shard.region_bytes(kind)

    def read(self, buffer: torch.Tensor) -> None:
        self._shard.read_region(self._kind, buffer[: self.nbytes])

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        """What has been read into a buffer, (numel,)."""
        return self._shard.region_values(self._kind, buffer)

    def write(self, buffer: torch.Tensor) -> None:
        """It is as it was."""
