"""Files of offloaded shards: a run's folder of them, reads, writes, and a window of buffers over them."""

import errno
import fcntl
import json
import os
import stat
import sys
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Lock
from typing import TypeVar

import torch
import xxhash

from ..config import ConfigError
from ..config.checks import spelt
from ..device import allocate, enter_thread, in_units
from ..layout.intervals import Interval
from .host_memory import HostCores

# ---- The folder of one run's files, below a path that runs share ----
#
# [Note: who may remove a folder] A folder's first file and its last is its lock, which the process holds whose run it is.
# Another process of this user may remove a folder whose lock it can take, and one without a lock. A process that has made a
# folder looks, once it holds the lock, whether the folder is still there, and makes another where it is not. So no process
# waits for another, and files that other users have put beside the folders decide nothing.

_PREFIX = "hf_zero-run-"
_LOCK = "lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ATTEMPTS = 20


class RunFolder:
    """A new folder below `parent`, which this process owns by a lock until the process ends.

    This user's folders without a held lock belong to dead runs, and are removed first, with a message.

    Args:
        parent: has to exist.

    Raises:
        ConfigError: `parent` is no folder that this process may write in.
    """

    def __init__(self, parent: Path):
        if not parent.is_dir():
            raise ConfigError(
                f"hf_zero config: `offload.nvme_path` is {str(parent)!r}, which is no folder on this host. Create it on the "
                "NVMe disk, or name another."
            )
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"hf_zero config: `offload.nvme_path` is {str(parent)!r}, in which this user may not write. Change its owner "
                "or mode, or name another."
            )
        try:
            # A script may go to another folder while it trains.
            self.path, lock = _new_folder(parent.absolute())
        except OSError as error:
            raise ConfigError(
                f"hf_zero config: `offload.nvme_path` is {str(parent)!r}, in which no folder could be made for this "
                f"run: {error}. Name a folder on a writable local NVMe disk, and none of the system's own (/proc, "
                "/sys)."
            ) from error
        # Of multiprocessing, since it also runs at the end of processes that multiprocessing started, which skip atexit; a
        # process forked from this one (a DataLoader's worker) has the object, and not the folder.
        self._finalizer = Finalize(self, _remove_own, args=(self.path, lock), exitpriority=0)

    def close(self) -> None:
        """Removes the folder. Also done when the process ends by itself."""
        self._finalizer()


def _new_folder(parent: Path) -> tuple[Path, int]:
    """Makes a run's folder; returns the path and the held lock."""
    # Before this run's files: a dead run's may fill the disk.
    _remove_dead(parent)
    for _ in range(_ATTEMPTS):
        path = parent / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        path.mkdir(mode=0o700)
        lock = _locked(path / _LOCK)
        if lock is not None:
            os.write(lock, json.dumps(_identity()).encode())
            return path, lock
    raise OSError(errno.EBUSY, f"{_ATTEMPTS} new folders were taken away as soon as they were made")


def _locked(path: Path) -> int | None:
    """Makes and locks the file; None if another process has removed it meanwhile."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A lock on a file whose name is gone keeps nobody out.
        is_held = os.path.samestat(os.fstat(lock), path.lstat())
    except (BlockingIOError, FileNotFoundError):
        # Another process removes the file: it has locked the file first, or has taken its name away.
        is_held = False
    if is_held:
        return lock
    os.close(lock)
    return None


def _identity() -> dict[str, str | int]:
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else "unknown"
    return {"pid": os.getpid(), "host": os.uname().nodename, "boot": boot}


def _own_folders(parent: Path) -> Iterator[Path]:
    """Yields the folders of this user's runs. Others may put anything into a shared folder such as /scratch."""
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                yield path


def _remove_dead(parent: Path) -> None:
    for folder in _own_folders(parent):
        try:
            _remove_if_dead(folder)
        except OSError as error:
            # Told, not raised: this run can train beside that folder while the disk has room.
            said = f"hf_zero: {folder} is of a run that has ended, and stays: {error}."
            print(spelt(said), file=sys.stderr, flush=True)


def _remove_if_dead(folder: Path) -> None:
    lock, owner = None, "unknown"
    try:
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            # The lock decides, not the process id, which a process of another container may have too.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = os.pread(lock, 500, 0).decode(errors="replace")
        nbytes = _removed_bytes(folder, is_held=lock is not None)
    except BlockingIOError:
        return
    finally:
        if lock is not None:
            os.close(lock)
    if nbytes:
        size = f"{nbytes / 2**20:,.1f} MiB"
        said = f"hf_zero: removed {folder} ({size}), which a run that has ended left behind ({owner})."
        print(spelt(said), file=sys.stderr, flush=True)


def _removed_bytes(folder: Path, *, is_held: bool) -> int:
    """Removes a folder, its lock last; returns the bytes of its files. See [Note: who may remove a folder].

    Args:
        is_held: this process has the lock. Where it has none, a folder that has a lock by now is a run's that begins.
    """
    nbytes = 0
    # Another process may be removing it, too.
    with suppress(FileNotFoundError):
        # By its handle: whatever is put in the folder's place meanwhile keeps its files.
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # The lock last: while it is there, no other process takes the folder for one without a run.
            names = sorted(os.listdir(handle), key=lambda name: name == _LOCK)
            if _LOCK in names and not is_held:
                return 0
            for name in names:
                nbytes += os.lstat(name, dir_fd=handle).st_size
                os.unlink(name, dir_fd=handle)
        finally:
            os.close(handle)
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or is_held:
                raise
    return nbytes


def _remove_own(path: Path, lock: int) -> None:
    try:
        _removed_bytes(path, is_held=True)
    finally:
        os.close(lock)


# ---- Files of state, read and written past the page cache if the file system allows that ----

ALIGNMENT = 4096
"""Bytes: offsets, lengths and addresses of direct I/O are multiples of the largest logical block in use."""


class OffloadError(OSError):
    """A file of state could not be read or written. State in memory is intact."""


def aligned(nbytes: int) -> int:
    """Rounds up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class AlignedFile:
    """A file of fixed size, allocated at once, and moved in aligned pieces of checked length.

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
            # A file system without direct I/O, such as tmpfs on older systems. Without
            # O_EXCL: the refused call may have made the file.
            self.is_direct = False
            self._fd = os.open(path, flags, 0o600)
        self._closing = weakref.finalize(self, os.close, self._fd)
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Makes the file `nbytes` longer. Raises `OffloadError` on a full disk, and leaves the file as it was."""
        try:
            # At once: a disk that fills up in the middle of a run would end it with half of a step written.
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
        """Raises `OffloadError` for a file that has lost bytes."""
        there = os.fstat(self._fd).st_size
        if there < self.nbytes:
            raise self._error(errno.EIO, "the file is shorter than it was", 0, there, self.nbytes, "read")

    def mapped(self) -> torch.Tensor:
        """Maps the file's bytes, by its handle: the name may be gone while the file is still there."""
        # Private: a write to the returned tensor must not reach the file, past the checksums.
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
            # The system may move less than it is asked to: Linux moves 2 GiB at most in one call.
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
    """Returns the bytes that this user may still write on a file system, by a folder or the handle of an open file."""
    stat = os.statvfs(place)
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

    [Note: two sides of a file]
    A file may have a second side of the same layout for a step that is not yet taken. Reads, and writes of a part, go to the
    first side, so that the old state stays whole, whatever happens to the new one. `exchange` makes the new one the state.

    [Note: checksums]
    A region is a row of chunks. The xxh3 of each is kept in memory at the write, and compared at the read, in the thread that
    reads. So a part is read and written in whole chunks.

    Args:
        kinds: each gets a region.

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
            # Each region begins at a boundary: direct I/O can then move one kind without the others.
            offset += aligned(kind.nbytes)
        self.nbytes = offset
        self.edition = 0
        self._start = 0
        # By the chunk's first byte in the file: its xxh3, and whether what is mapped of it has been compared.
        self._sums: dict[int, int] = {}
        self._is_compared: set[int] = set()
        self.read_bytes = self.written_bytes = 0
        # An early step reads in a thread while a script's edit writes: half of both would look like a broken disk.
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
        # The buffers of a walk are as long as its largest shard.
        self._read(buffer[: self.nbytes], self._start)
        self.read_bytes += self.nbytes

    def write(self, buffer: torch.Tensor) -> None:
        # For an early step that has read the former values: `optimizer.step()` then drops the early step.
        self.edition += 1
        self._write(buffer[: self.nbytes], self._start)
        self.written_bytes += self.nbytes

    def add_side(self) -> None:
        """Makes a second side. Raises `OffloadError` on a full disk."""
        self.file.grow(self.nbytes)

    def write_aside(self, buffer: torch.Tensor) -> None:
        """Writes the side that does not count."""
        self._write(buffer[: self.nbytes], self.nbytes - self._start)
        self.written_bytes += self.nbytes

    def exchange(self) -> None:
        """Makes the other side the one that counts."""
        self._start = self.nbytes - self._start
        self.edition += 1

    def region_bytes(self, kind: str) -> int:
        """Returns the size of the buffers of `read_region` and `write_region` for this kind."""
        return aligned(self._regions[kind][1].nbytes)

    def read_region(self, kind: str, buffer: torch.Tensor) -> torch.Tensor:
        """Reads all of one kind, (numel,), into a buffer (uint8) of `region_bytes`."""
        self._read(buffer, self._start + self._regions[kind][0])
        self.read_bytes += buffer.nbytes
        return self.region_values(kind, buffer)

    def region_values(self, kind: str, buffer: torch.Tensor) -> torch.Tensor:
        """Returns all of one kind, (numel,), in a buffer that `read_region` has filled."""
        found = self._regions[kind][1]
        return buffer[: found.nbytes].view(found.dtype)

    def write_region(self, kind: str, buffer: torch.Tensor) -> None:
        """Replaces all of one kind by a buffer (uint8) of `region_bytes`, which the caller has counted."""
        self.edition += 1
        self._write(buffer, self._start + self._regions[kind][0])

    def read_part(self, kind: str, interval: Interval) -> torch.Tensor:
        """Reads the elements `interval` of one kind into memory of their own."""
        return self._read_around(kind, interval)[0].clone()

    def mapped_part(self, kind: str, interval: Interval) -> torch.Tensor:
        """Returns the elements `interval` of one kind as a view of the mapped file.

        Their chunks are compared first, once after each write.

        Raises:
            OffloadError: the file is shorter than it was, or a chunk is not as it was written.
        """
        start, stop, dtype = self._span(kind, interval)
        # First: a read of a mapped page behind a file's end kills the process by SIGBUS, and Python can raise nothing.
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
        # Into whole chunks that were just read and compared: a checksum covers a chunk, not a part.
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
        # The second side repeats the regions behind the first.
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
        with self._whole:
            self.file.read(buffer, offset)
            for begin, end in self._chunks(offset, offset + buffer.nbytes):
                self._compare(buffer[begin - offset : end - offset], begin)

    def _write(self, buffer: torch.Tensor, offset: int) -> None:
        with self._whole:
            for begin, end in self._chunks(offset, offset + buffer.nbytes):
                # Before the write: what the disk then does to the bytes must show.
                self._sums[begin] = _sum_of(buffer[begin - offset : end - offset])
                self._is_compared.discard(begin)
            self.file.write(buffer, offset)

    def _compare(self, chunk: torch.Tensor, begin: int) -> None:
        """Raises `OffloadError` for a chunk that differs from its write. A chunk that was never written has no checksum."""
        expected = self._sums.get(begin)
        if expected is not None and _sum_of(chunk) != expected:
            raise OffloadError(
                errno.EIO,
                f"hf_zero: {self.file.path}: the {chunk.nbytes} bytes at {begin} are not those that were written: a "
                "broken disk, or another process. The state of this run is not whole any more: resume from the last "
                "checkpoint.",
            )


def _sum_of(chunk: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(chunk.numpy())


class ReadRegion:
    """One kind of a shard, in a walk without writes."""

    def __init__(self, shard: StoredShard, kind: str):
        self._shard = shard
        self._kind = kind
        self.nbytes = shard.region_bytes(kind)

    def read(self, buffer: torch.Tensor) -> None:
        self._shard.read_region(self._kind, buffer[: self.nbytes])

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the values, (numel,), in a buffer that `read` has filled."""
        return self._shard.region_values(self._kind, buffer)

    def write(self, buffer: torch.Tensor) -> None:
        """Writes nothing."""


# ---- A walk over shards in files: reads the next ones and writes the former ones beside the present one ----

WINDOW = 2
"""Shards that are read or written while another is stepped: one each."""


_Passing = TypeVar("_Passing", StoredShard, ReadRegion)
_Result = TypeVar("_Result")


class Window:
    """Moves shards through `size` + 1 buffers: one in use, the others being read into or written from.

    Buffers exist during a walk only, and are shared by shards of all sizes.

    Args:
        size: shards that may be read or written beside the one in use.
        cores: for the steps.
        device: of the gradients that some calls in its threads wait for.
    """

    def __init__(self, size: int, cores: HostCores, device: torch.device = _HOST):
        self.size = size
        self._cores = cores
        enter = partial(enter_thread, device)
        self._threads = ThreadPoolExecutor(size + 1, thread_name_prefix="hf_zero-nvme", initializer=enter)

    def nbytes(self, shards: Sequence[StoredShard]) -> int:
        """Returns the most bytes of buffers in a walk over these."""
        return min(self.size + 1, len(shards)) * max((shard.nbytes for shard in shards), default=0)

    def walk(
        self, shards: Sequence[_Passing], *, spared: int = 0
    ) -> Generator[tuple[_Passing, torch.Tensor], None, None]:
        """Yields (shard, buffer with its contents), and writes the buffer when the caller goes on.

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
            # Waits for a write only where nothing else can go on: no buffer is free, and no read is under way.
            while writing and (writing[0][1].done() or (not free and not reading)):
                buffer, written = writing.popleft()
                # A buffer is free only behind its write: read into before, it would be written with another shard's
                # values.
                written.result()
                free.append(buffer)
            while to_read and free:
                shard, buffer = to_read.popleft(), free.pop()
                reading.append((shard, buffer, self._threads.submit(shard.read, buffer)))

        try:
            while to_read or reading:
                read_ahead()
                shard, buffer, read = reading.popleft()
                # The error of a read surfaces here, at its own shard, and not at the end of the walk.
                read.result()
                yield shard, buffer
                # Not reached where the caller's step has failed: `close` ends the
                # walk at the `yield`, and half a step is not written.
                writing.append((buffer, self._threads.submit(shard.write, buffer)))
            for _, written in writing:
                written.result()
        finally:
            # No thread may still use a buffer, or a file that is closed next.
            wait([*(read for *_, read in reading), *(written for _, written in writing)])

    def make_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocates host memory, uint8, for the shard in use."""
        buffer = allocate(nbytes, torch.uint8, _HOST)
        self._cores.touch(buffer)
        return buffer

    def submit(self, call: Callable[..., _Result], *arguments) -> Future[_Result]:
        """Runs `call` beside the caller, between walks, in the same threads: at most `size` + 1 calls at a time."""
        return self._threads.submit(call, *arguments)

    def close(self) -> None:
        self._threads.shutdown()
