"""Files of offloaded shards, read and written with direct I/O, with a checksum for each chunk."""

import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
import xxhash

from ..allocation import allocate
from ..device import in_units
from ..layout.intervals import Interval

# ---- Files of state, read and written with direct I/O if the file system supports direct I/O ----

ALIGNMENT = 4096
"""In bytes. Offsets, lengths and addresses of direct I/O are multiples of the largest logical block size in use."""


class OffloadError(OSError):
    """A file of state could not be read or written. State in memory is intact."""


def aligned(nbytes: int) -> int:
    """Rounds up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class AlignedFile:
    """A file of fixed size, allocated at once, and read and written in aligned pieces of checked length.

    Args:
        path: the path of a file that does not exist yet.
        nbytes: a multiple of ALIGNMENT.

    Raises:
        OffloadError: the file system has no room for the file.
    """

    def __init__(self, path: Path, nbytes: int):
        self.path = path
        self.nbytes = 0
        self.is_direct = True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OffloadError(error.errno, f"hf_zero: {path} cannot be created: {error.strerror}") from error
            # The file system has no direct I/O, such as tmpfs on older systems. Do not use O_EXCL, because the refused call may
            # have created the file.
            self.is_direct = False
            self._fd = os.open(path, flags, 0o600)
        self._closing = weakref.finalize(self, os.close, self._fd)
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Makes the file `nbytes` longer. Raises `OffloadError` on a full disk, and leaves the file unchanged."""
        try:
            # Allocate now: a disk running full in the middle of a run would end the run with half of a step written.
            os.posix_fallocate(self._fd, self.nbytes, nbytes)
        except OSError as error:
            raise OffloadError(
                error.errno,
                f"hf_zero: {self.path} needs {in_units(nbytes)}, but its file system has {in_units(free_disk_bytes(self._fd))} "
                f"free ({error.strerror}). Free space, or set `offload.nvme_path` to a larger disk.",
            ) from error
        self.nbytes += nbytes

    def read(self, buffer: torch.Tensor, offset: int) -> None:
        """Fills `buffer` (uint8, aligned in address and length) from `offset`."""
        self._move(os.preadv, buffer, offset, "read")

    def write(self, buffer: torch.Tensor, offset: int) -> None:
        """Writes all of `buffer` (uint8, aligned in address and length) at `offset`."""
        self._move(os.pwritev, buffer, offset, "written")

    def refuse_cut(self) -> None:
        """Raises `OffloadError` if the file has lost bytes."""
        there = os.fstat(self._fd).st_size
        if there < self.nbytes:
            raise self._error(errno.EIO, "the file is shorter than it was", 0, there, self.nbytes, "read")

    def mapped(self) -> torch.Tensor:
        """Maps the file's bytes, through the handle, because the name may be deleted while the file still exists."""
        # Map privately: a write to the returned tensor must not change the file and break its checksums.
        return torch.from_file(f"/proc/self/fd/{self._fd}", shared=False, size=self.nbytes, dtype=torch.uint8)

    def close(self) -> None:
        self._closing()

    def _move(self, call, buffer: torch.Tensor, offset: int, done: str) -> None:
        view, moved = buffer.numpy(), 0
        while moved < len(view):
            try:
                count = call(self._fd, [view[moved:]], offset + moved)
            except OSError as error:
                raise self._error(
                    error.errno or errno.EIO, str(error.strerror), offset, moved, len(view), done
                ) from error
            if count == 0:
                raise self._error(errno.EIO, "the file is shorter than it was", offset, moved, len(view), done)
            # The system may move fewer bytes than requested: Linux moves at most 2 GiB in one call.
            moved += count

    def _error(self, code: int, reason: str, offset: int, moved: int, wanted: int, done: str) -> OffloadError:
        return OffloadError(
            code,
            f"hf_zero: {self.path}: only {moved} of {wanted} bytes at {offset} could be {done} ({reason}); the file has "
            f"{os.fstat(self._fd).st_size} of {self.nbytes} bytes, and {in_units(free_disk_bytes(self._fd))} are free on its "
            "file system. The optimizer state of this run is now incomplete: end the run, check the disk, and resume from the "
            "last checkpoint.",
        )


def free_disk_bytes(folder: Path | int) -> int:
    """Returns the bytes this user may still write on the file system of a folder, or of an open file's handle."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


# ---- One shard's state in one file ----

_HOST = torch.device("cpu")
_CHUNK_BYTES = 256 * ALIGNMENT


@dataclass(frozen=True)
class Kind:
    """A flat tensor, (numel,) of its dtype, under a name in a file."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class StoredShard:
    """A file with a region for each kind of state.

    [Note: checksums]
    A region is a sequence of chunks. Each write stores the xxh3 of its chunks in memory, and each read compares them, in the
    reading thread. So parts of a chunk are read and written as whole chunks.

    Args:
        kinds: each kind gets a region.

    Attributes:
        nbytes: bytes of all regions.
        read_bytes, written_bytes: bytes moved so far.
    """

    def __init__(self, path: Path, kinds: Sequence[Kind]):
        self._regions: dict[str, tuple[int, Kind]] = {}
        offset = 0
        for kind in kinds:
            self._regions[kind.name] = (offset, kind)
            # Align each region, so that direct I/O can move one kind without the others.
            offset += aligned(kind.nbytes)
        self.nbytes = offset
        # The xxh3 of each chunk by its offset in the file, and the offsets of mapped chunks that have been compared.
        self._sums: dict[int, int] = {}
        self._is_compared: set[int] = set()
        self.read_bytes = self.written_bytes = 0
        # A thread may read while a script's edit writes. A mix of both would look like a broken disk.
        self._whole = Lock()
        self.file = AlignedFile(path, self.nbytes)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: kind.dtype for name, (_, kind) in self._regions.items()}

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the kinds, (numel,) each, as views of a buffer (uint8) of at least `nbytes`."""
        return {
            name: buffer[offset : offset + kind.nbytes].view(kind.dtype)
            for name, (offset, kind) in self._regions.items()
        }

    def read(self, buffer: torch.Tensor) -> None:
        # The buffers of a walk have the size of its largest shard.
        self._read(buffer[: self.nbytes], 0)
        self.read_bytes += self.nbytes

    def write(self, buffer: torch.Tensor) -> None:
        self._write(buffer[: self.nbytes], 0)
        self.written_bytes += self.nbytes

    def region_bytes(self, kind: str) -> int:
        """Returns the size of buffers for `read_region` and `write_region` of this kind."""
        return aligned(self._regions[kind][1].nbytes)

    def read_region(self, kind: str, buffer: torch.Tensor) -> torch.Tensor:
        """Reads all of one kind, (numel,), into a buffer (uint8) of `region_bytes`."""
        self._read(buffer, self._regions[kind][0])
        self.read_bytes += buffer.nbytes
        return self.region_values(kind, buffer)

    def region_values(self, kind: str, buffer: torch.Tensor) -> torch.Tensor:
        """Returns all of one kind, (numel,), from a buffer filled by `read_region`."""
        found = self._regions[kind][1]
        return buffer[: found.nbytes].view(found.dtype)

    def write_region(self, kind: str, buffer: torch.Tensor) -> None:
        """Replaces all of one kind by a buffer (uint8) of `region_bytes`. The caller counts the bytes."""
        self._write(buffer, self._regions[kind][0])

    def read_part(self, kind: str, interval: Interval) -> torch.Tensor:
        """Reads the elements `interval` of one kind into new memory."""
        return self._read_around(kind, interval)[0].clone()

    def mapped_part(self, kind: str, interval: Interval) -> torch.Tensor:
        """Returns the elements `interval` of one kind as a view of the mapped file.

        The chunks of the view are compared first, once after each write.

        Raises:
            OffloadError: the file has lost bytes, or a chunk differs from its last write.
        """
        start, stop, dtype = self._span(kind, interval)
        # Check the length first: reading a mapped page past the end kills the process with SIGBUS, which Python cannot catch.
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
        # Copy into whole chunks, just read and compared, because a checksum covers a chunk and not a part.
        part.copy_(values)
        self._write(blocks, first)
        self.written_bytes += blocks.nbytes

    def _read_around(self, kind: str, interval: Interval) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns the elements, the whole chunks around them, and the chunks' offset in the file."""
        start, stop, dtype = self._span(kind, interval)
        chunks = list(self._chunks(start, stop))
        first = chunks[0][0] if chunks else start
        blocks = allocate(chunks[-1][1] - first if chunks else 0, torch.uint8, _HOST)
        self._read(blocks, first)
        self.read_bytes += blocks.nbytes
        return blocks[start - first : stop - first].view(dtype), blocks, first

    def _span(self, kind: str, interval: Interval) -> tuple[int, int, torch.dtype]:
        """Returns (first byte, end, dtype) of the elements `interval` of one kind in the file."""
        start, dtype = self._regions[kind][0], self._regions[kind][1].dtype
        return start + interval.start * dtype.itemsize, start + interval.stop * dtype.itemsize, dtype

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields (first byte, end) of the chunks with bytes from `start` to `stop`."""
        for begin, kind in self._regions.values():
            end = begin + aligned(kind.nbytes)
            if end <= start:
                continue
            first = begin + max(0, start - begin) // _CHUNK_BYTES * _CHUNK_BYTES
            for each in range(first, min(end, stop), _CHUNK_BYTES):
                yield each, min(each + _CHUNK_BYTES, end)

    def _read(self, buffer: torch.Tensor, offset: int) -> None:
        """Reads whole chunks, and compares their checksums."""
        with self._whole:
            self.file.read(buffer, offset)
            for begin, end in self._chunks(offset, offset + buffer.nbytes):
                self._compare(buffer[begin - offset : end - offset], begin)

    def _write(self, buffer: torch.Tensor, offset: int) -> None:
        with self._whole:
            for begin, end in self._chunks(offset, offset + buffer.nbytes):
                # Before the write, to detect damage by the disk.
                self._sums[begin] = _sum_of(buffer[begin - offset : end - offset])
                self._is_compared.discard(begin)
            self.file.write(buffer, offset)

    def _compare(self, chunk: torch.Tensor, begin: int) -> None:
        """Raises `OffloadError` if a chunk differs from its last write. A chunk without a write has no checksum."""
        expected = self._sums.get(begin)
        if expected is not None and _sum_of(chunk) != expected:
            raise OffloadError(
                errno.EIO,
                f"hf_zero: {self.file.path}: the {chunk.nbytes} bytes at {begin} differ from the written bytes: the disk "
                "is faulty, or another process wrote to it. The state of this run is damaged: resume from the last checkpoint.",
            )


def _sum_of(chunk: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(chunk.numpy())
