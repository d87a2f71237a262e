"""Files that state is read from and written to, past the page cache where the file system lets us."""

import errno
import os
import weakref
from pathlib import Path

import torch

from ..device import in_units

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
