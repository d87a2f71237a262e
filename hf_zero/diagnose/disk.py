"""Measures how fast the disk of a folder writes and reads, without the page cache if possible."""

import mmap
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, bad, good, hint

_BYTES = 64 * 2**20
_BLOCK = 4 * 2**20
_SLOW_MB = 100.0


def disk(folder: Path) -> Iterator[Finding]:
    """Measures a folder's disk with a small file, and removes the file."""
    subject = f"disk of {folder}"
    path = folder / f".hf-zero-doctor-{uuid.uuid4().hex}"
    try:
        state = os.statvfs(folder)
        if state.f_bavail * state.f_frsize < 2 * _BYTES:
            yield bad(subject, "full", "Make room: checkpoints and offload write there.")
            return
        try:
            write_mb, way = _write(path)
            read_mb = _read(path)
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        yield bad(subject, f"cannot be written: {error}", "Pass a folder that this user can write to: --folder.")
        return
    said = f"writes {write_mb:,.0f} MB/s, reads {read_mb:,.0f} MB/s ({way})"
    if min(write_mb, read_mb) < _SLOW_MB:
        yield hint(subject, said, "Slow for offload to files (`offload.nvme_path`) and for large checkpoints.")
    else:
        yield good(subject, said)


def _write(path: Path) -> tuple[float, str]:
    """Returns megabytes per second, and the method of writing."""
    # A mapping starts at a page boundary, which direct I/O requires.
    with mmap.mmap(-1, _BLOCK) as block:
        block.write(os.urandom(_BLOCK))
        # O_EXCL creates a new file and follows no link, because others may write to the folder.
        flags, way = os.O_WRONLY | os.O_CREAT | os.O_EXCL, "O_DIRECT"
        try:
            file = os.open(path, flags | os.O_DIRECT, 0o600)
        except (OSError, AttributeError):
            # tmpfs and some network disks do not support O_DIRECT.
            file, way = os.open(path, flags, 0o600), "fsync"
        try:
            began_s = time.perf_counter()
            for _ in range(_BYTES // _BLOCK):
                os.write(file, block)
            os.fsync(file)
            return _BYTES / (time.perf_counter() - began_s) / 1e6, way
        finally:
            os.close(file)


def _read(path: Path) -> float:
    with mmap.mmap(-1, _BLOCK) as block:
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError):
            file = os.open(path, os.O_RDONLY)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            began_s = time.perf_counter()
            while os.readv(file, [block]):
                pass
            return _BYTES / (time.perf_counter() - began_s) / 1e6
        finally:
            os.close(file)
