"""Files of offloaded shards: reads, writes, and a window of buffers over them."""

import errno
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import xxhash

from ..device import allocate, enter_thread, in_units
from ..layout.slots import Interval
from .host_memory import HostCores

# ---- Files that state is read from and written to, past the page cache where the file system lets us ----

ALIGNMENT = 4096
"""Bytes: offsets, lengths and addresses of direct I/O are multiples of the largest logical block in use."""


class OffloadError(OSError):
    """State that lives in a file could not be read or written; what was in memory is untouched by it."""


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class AlignedFile:
    """A file of fixed size, allocated at once, read and written in aligned pieces whose every length is checked.

    Args:
        path: of a file that is not there yet.
        nbytes: a multiple of ALIGNMENT.

    Raises:
        OffloadError: the file system has no room for it.
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
                raise OffloadError(error.errno, f"hf_zero: {path} cannot be made: {error.strerror}") from error
            self.is_direct = False
            self._fd = os.open(path, flags, 0o600)
        self._closing = weakref.finalize(self, os.close, self._fd)
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Makes the file `nbytes` longer. Raises `OffloadError` where there is no room, and leaves it as it was."""
        try:
            os.posix_fallocate(self._fd, self.nbytes, nbytes)
        except OSError as error:
            raise OffloadError(
                error.errno,
                f"hf_zero: {self.path} needs {in_units(nbytes)}, and its file system has "
                f"{in_units(free_disk_bytes(self._fd))} free ({error.strerror}). Free space, or set "
                "`offload.nvme_path` to a larger disk.",
            ) from error
        self.nbytes += nbytes

    def read(self, buffer: torch.Tensor, offset: int) -> None:
        """Fills `buffer` (uint8, aligned in address and length) from `offset`."""
        self._move(os.preadv, buffer, offset, "read")

    def write(self, buffer: torch.Tensor, offset: int) -> None:
        """Writes all of `buffer` (uint8, aligned in address and length) at `offset`."""
        self._move(os.pwritev, buffer, offset, "written")

    def refuse_cut(self) -> None:
        """Raises `OffloadError` where the file has lost bytes."""
        there = os.fstat(self._fd).st_size
        if there < self.nbytes:
            raise self._error(errno.EIO, "the file is shorter than it was", 0, there, self.nbytes, "read")

    def mapped(self) -> torch.Tensor:
        """The file's bytes, read when they are looked at. By its handle: its name may be gone, and the file is there."""
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
            moved += count

    def _error(self, code: int, reason: str, offset: int, moved: int, wanted: int, done: str) -> OffloadError:
        return OffloadError(
            code,
            f"hf_zero: {self.path}: {moved} of {wanted} bytes at {offset} could be {done} ({reason}); the file has "
            f"{os.fstat(self._fd).st_size} of {self.nbytes} bytes, and {in_units(free_disk_bytes(self._fd))} are free on its "
            "file system. The optimizer state of this run is not whole any more: end it, see to the disk, and resume from the "
            "last checkpoint.",
        )


def free_disk_bytes(place: Path | int) -> int:
    """Bytes that this user may still write on the file system of a folder, or of an open file by its handle."""
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize


# ---- One shard's state in one file ----

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


# ---- A walk over shards in files: the next ones are read while one is at hand, and those behind are written ----

WINDOW = 2
"""Shards on their way from or to files while another is stepped: one that is read ahead, one that is written."""


_Passing = TypeVar("_Passing", StoredShard, ReadRegion)
_Result = TypeVar("_Result")


class Window:
    """Moves shards through `size` + 1 buffers: one at hand, the others being read into or written from.

    Buffers exist during a walk only, and are shared by shards of all sizes.

    Args:
        size: how many shards may be on their way beside the one at hand.
        cores: that step on what is at hand.
        device: of the gradients that some calls beside the caller wait for.
    """

    def __init__(self, size: int, cores: HostCores, device: torch.device = _HOST):
        self.size = size
        self._cores = cores
        enter = partial(enter_thread, device)
        self._threads = ThreadPoolExecutor(size + 1, thread_name_prefix="hf_zero-nvme", initializer=enter)

    def nbytes(self, shards: Sequence[StoredShard]) -> int:
        """Bytes that the buffers of a walk over these take at most."""
        return min(self.size + 1, len(shards)) * max((shard.nbytes for shard in shards), default=0)

    def walk(
        self, shards: Sequence[_Passing], *, spared: int = 0
    ) -> Generator[tuple[_Passing, torch.Tensor], None, None]:
        """(shard, buffer with its contents), one after another. What the caller leaves in the buffer is written.

        The last writes have ended when the iterator has.

        Args:
            spared: buffers to do without, up to `size`: memory that the caller takes for itself meanwhile.

        Raises:
            OffloadError: of the first read or write that failed.
        """
        largest = max((shard.nbytes for shard in shards), default=0)
        free = [self.make_buffer(largest) for _ in range(min(self.size + 1 - spared, len(shards)))]
        to_read = deque(shards)
        reading: deque[tuple[_Passing, torch.Tensor, Future]] = deque()
        writing: deque[tuple[torch.Tensor, Future]] = deque()

        def read_ahead() -> None:
            while writing and (writing[0][1].done() or (not free and not reading)):
                buffer, written = writing.popleft()
                written.result()
                free.append(buffer)
            while to_read and free:
                shard, buffer = to_read.popleft(), free.pop()
                reading.append((shard, buffer, self._threads.submit(shard.read, buffer)))

        try:
            while to_read or reading:
                read_ahead()
                shard, buffer, read = reading.popleft()
                read.result()
                yield shard, buffer
                writing.append((buffer, self._threads.submit(shard.write, buffer)))
            for _, written in writing:
                written.result()
        finally:
            # No thread may still use a buffer, or a file that is closed next.
            wait([*(read for *_, read in reading), *(written for _, written in writing)])

    def make_buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, for what is at hand during a step."""
        buffer = allocate(nbytes, torch.uint8, _HOST)
        self._cores.touch(buffer)
        return buffer

    def submit(self, call: Callable[..., _Result], *arguments) -> Future[_Result]:
        """Has `call` run beside the caller, between walks, which use the same threads: `size` + 1 such calls at a time."""
        return self._threads.submit(call, *arguments)

    def close(self) -> None:
        self._threads.shutdown()
