"""One run at a time writes into a folder of checkpoints. The system drops the lock when the process ends."""

import errno
import fcntl
import json
import os
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from ..comm.all_or_none import Exchange
from .commit import clear_marks
from .disks import Disk
from .faults import CheckpointError, shown
from .files import open_in_place
from .on_all_ranks import on_all_ranks

# [Note: the lock of an open file]
# The lock belongs to the open file (an "open file description lock"). A lock of lockf would belong to the process, and the
# system drops such a lock as soon as the process closes any handle of the file, as a copy or a hash of the folder does. A
# lock of flock that was set through NFS is invisible to processes on the host that exports the folder.
LOCK_NAME = ".hf_zero.lock"


PATIENCE_S = 5.0
"""How long to wait for a run that is about to end, such as one that a launcher has just killed in order to start this one."""


ELASTIC_PATIENCE_S = 120.0
"""The wait under a launcher that restarts runs. A rank on a lost host, or one whose agent was killed, may hold the lock until
its collectives fail, or until the file system's server gives up on its host."""


_GLANCE_S = 0.2


_HELD: set[int] = set()
"""Handles of the locks of this process."""


_WRITE_LOCK_OF_ALL = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""Linux's `struct flock`: a write lock on the whole file, whatever its length. The process number has to be 0."""


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, or of servers with locks turned off: some on clusters, and on object stores."""


@contextmanager
def held_alone(folder: Path, *, disk: Disk, exchange: Exchange) -> Iterator[None]:
    """Keeps other runs from writing checkpoints to `folder` while the block runs. Collective.

    The first rank of the disk holds the lock. If the file system has no locks, a warning says so.

    Raises:
        CheckpointError: on every rank, if another run holds the lock.
    """
    held: list[int] = []
    # Make the path absolute: the script may change its working directory.
    path = folder.absolute() / LOCK_NAME

    def take() -> None:
        if disk.leads:
            held.append(_taken(path))
            clear_marks(folder)

    then = "Nothing was trained. Give this run its own output_dir, or end the other run first."
    try:
        # Inside `try`: if one rank gets no lock, this raises on all ranks, and the other disks' ranks must release theirs.
        on_all_ranks(exchange, take, doing=f"lock {folder} for its checkpoints", then=then)
        yield
    finally:
        # A forked child may leave this block (a callback calls sys.exit). Then the parent's file must remain.
        for lock in _HELD.intersection(held):
            # Remove the file while the lock is held: a waiting process then finds the file gone and makes a new one.
            # If the disk refuses, the file stays but locks nothing.
            with suppress(OSError):
                path.unlink()
            _HELD.remove(lock)
            os.close(lock)


def _close_in_child() -> None:
    # A child which outlives a killed run, such as a DataLoader worker, would keep the file open, and with the file the lock.
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_close_in_child)


def _taken(path: Path) -> int:
    """Opens and locks the file; waits while another run holds the lock. Returns the handle."""
    deadline_s = time.monotonic() + _patience_s()
    while True:
        lock = _opened(path)
        try:
            _lock(lock)
        # POSIX allows either error if another open file has the lock.
        except (BlockingIOError, PermissionError) as error:
            holder = _in_words(os.pread(lock, 500, 0).decode(errors="replace"))
            if any(os.path.samestat(os.fstat(lock), os.fstat(own)) for own in _HELD):
                holder = "another Trainer in this process"
            os.close(lock)
            if time.monotonic() > deadline_s:
                raise CheckpointError(f"another run is writing there ({holder})") from error
            time.sleep(_GLANCE_S)
            continue
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                _warn_of_no_locks(path.parent, error)
                _HELD.add(lock)
                return lock
            os.close(lock)
            raise
        # A lock belongs to an inode. If the last holder has unlinked the file, this lock would keep nobody out, so compare
        # inodes.
        try:
            if os.path.samestat(os.fstat(lock), path.stat()):
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps(_own_name()).encode(), 0)
                _HELD.add(lock)
                return lock
        except FileNotFoundError:
            # The last holder removed the file in the meantime. Try again.
            continue
        finally:
            # Close also if the disk refuses the write: an open file would keep the folder locked until this process ends.
            if lock not in _HELD:
                os.close(lock)


def _lock(handle: int) -> None:
    """Locks an open file. See [Note: the lock of an open file].

    Raises:
        OSError: another open file has the lock, or the file system has no locks.
    """
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _WRITE_LOCK_OF_ALL)
    except OSError as error:
        # The kernels of some sandboxes only support flock.
        if error.errno != errno.EINVAL:
            raise
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _own_name() -> dict[str, str | int]:
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": os.uname().nodename, "since": since}


def _opened(path: Path) -> int:
    """Opens the lock file, or makes one if there is none.

    Raises:
        CheckpointError: the file is a link, is no plain file, or belongs to another user.
    """
    try:
        # The file is truncated and written to. In a shared folder, another user's link could point to any file of this user.
        return open_in_place(path, os.O_RDWR)
    except PermissionError as error:
        # If the file exists, another user owns the file. If not, the folder itself refuses the write.
        with suppress(FileNotFoundError):
            raise CheckpointError(
                f"{path} belongs to user {path.lstat().st_uid}: a run of that user writes there or left the file behind"
            ) from error
        raise


def _warn_of_no_locks(folder: Path, error: OSError) -> None:
    warnings.warn(
        f"hf_zero: {folder} is on a file system without locks ({error.strerror}), so a second run could also write checkpoints "
        "there. Give each run its own output_dir.",
        stacklevel=2,
    )


def _patience_s() -> float:
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return ELASTIC_PATIENCE_S if restarts not in ("", "0") else PATIENCE_S


def _in_words(holder: str) -> str:
    try:
        known = json.loads(holder)
        return shown(f"process {known['pid']} on {known['host']}, since {known['since']}")
    except (ValueError, KeyError, TypeError):
        return "an unknown process"
