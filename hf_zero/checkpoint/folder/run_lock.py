"""One run at a time writes into a folder of checkpoints: a lock that the system drops when the process ends."""

import errno
import fcntl
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...comm.all_or_none import Exchange
from ..format.errors import CheckpointError
from ..format.text import shown
from .commit import clear_marks
from .disks import Disk
from .on_all_ranks import on_all_ranks

LOCK_NAME = ".hf_zero.lock"

PATIENCE_S = 5.0
"""For a run that is about to end, such as the one that a launcher has just killed to start this."""

ELASTIC_PATIENCE_S = 120.0
"""The same under a launcher that restarts runs: a rank on a host that is lost, or whose agent was killed, may hold the lock until
its collectives fail, or until the file system's server gives up on its host."""

_GLANCE_S = 0.2

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system says that has no locks, or a server of one whose locks are off: some of clusters, and of object stores."""


@contextmanager
def held_alone(folder: Path, *, disk: Disk, exchange: Exchange) -> Iterator[None]:
    """Keeps other runs from writing checkpoints to `folder` meanwhile. Collective.

    The lock is one of the process that leads the disk (POSIX, so that no child has it and network file systems share it): a
    run that is killed leaves the file and no lock. Where the file system has no locks, a warning says so.

    Raises:
        CheckpointError: on every rank, when another run has it.
    """
    held: list[int] = []
    # The script may go to another folder meanwhile.
    path = folder.absolute() / LOCK_NAME

    def take() -> None:
        if disk.leads:
            held.append(_taken(path))
            clear_marks(folder)

    then = "Nothing was trained. Give this run an output_dir of its own, or end the other first."
    try:
        on_all_ranks(exchange, take, doing=f"have {folder} for its checkpoints alone", then=then)
        yield
    finally:
        for lock in held:
            # By its name, while it is held: who waits for it then finds that it is gone, and makes another.
            # On a disk that refuses it stays, and is no lock.
            with suppress(OSError):
                path.unlink()
            os.close(lock)


def _taken(path: Path) -> int:
    """A handle of the file, locked."""
    deadline_s = time.monotonic() + _patience_s()
    while True:
        lock = _opened(path)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(lock, 500, 0).decode(errors="replace")
            os.close(lock)
            if time.monotonic() > deadline_s:
                raise CheckpointError(f"another run writes there now ({_in_words(holder)})") from error
            time.sleep(_GLANCE_S)
            continue
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                _warn_of_no_locks(path.parent, error)
                return lock
            os.close(lock)
            raise
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode(), 0)
            return lock
        # Its last holder has taken the file away meanwhile.
        os.close(lock)


def _opened(path: Path) -> int:
    """A handle of the lock file, which is made where there is none.

    The file is cut and written to. Behind a link that another user of a shared folder has put there, that would be any file.

    Raises:
        CheckpointError: it is a link or no plain file, or it is another user's.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = os.open(path, flags, 0o666)
    except PermissionError as error:
        if os.path.lexists(path):
            raise CheckpointError(
                f"{path} is user {path.lstat().st_uid}'s, whose run writes there or has left it"
            ) from error
        raise
    except OSError as error:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(f"{path} is a link or no plain file, and not hf_zero's. Take it away") from error
        raise
    found = os.fstat(lock)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(lock)
        raise CheckpointError(f"{path} is a link or no plain file, and not hf_zero's. Take it away")
    return lock


def _warn_of_no_locks(folder: Path, error: OSError) -> None:
    warnings.warn(
        f"hf_zero: {folder} is on a file system without locks ({error.strerror}), so that nothing keeps a second run from "
        "writing checkpoints there. Give each run an output_dir of its own.",
        stacklevel=2,
    )


def _patience_s() -> float:
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return ELASTIC_PATIENCE_S if restarts not in ("", "0") else PATIENCE_S


def _in_words(holder: str) -> str:
    try:
        known = json.loads(holder)
        return shown(f"process {known['pid']} on {known['host']}")
    except (ValueError, KeyError, TypeError):
        return "a process that does not say its number"
