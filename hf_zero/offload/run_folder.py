"""The folder of one run's files below a path that runs share: nobody else's while the run lives, removed when it is dead.

[Note: who may remove a folder]
A folder's first file and its last is its lock, which the process holds whose run it is. Another process of this user may remove a
folder whose lock it can take, and one without a lock. A process that has made a folder looks, once it holds the lock, whether the
folder is still there, and makes another where it is not. So no process waits for another, and files that other users have put
beside the folders decide nothing.
"""

import errno
import fcntl
import json
import os
import stat
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from ..config import ConfigError

_PREFIX = "hf_zero-run-"
_LOCK = "lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ATTEMPTS = 20


class RunFolder:
    """A new folder below `parent` that this process holds by a lock which the system drops when the process ends.

    This user's folders whose lock nobody holds are of dead runs; they are removed first, with a message. The lock decides and
    not the process id, which another container's process may have too; the file says for people who held it.

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
                f"hf_zero config: `offload.nvme_path` is {str(parent)!r}, in which no folder could be made for this run: "
                f"{error}. "
                "The system's own folders (/proc, /sys) and read-only disks take no files. Name a folder on a local NVMe disk."
            ) from error
        # Of multiprocessing, since it also runs at the end of processes that multiprocessing started, which skip atexit; a
        # process forked from this one (a DataLoader's worker) has the object, and not the folder.
        self._finalizer = Finalize(self, _remove_own, args=(self.path, lock), exitpriority=0)

    def close(self) -> None:
        """Removes the folder. Also done when the process ends by itself."""
        self._finalizer()


def _new_folder(parent: Path) -> tuple[Path, int]:
    """A run's folder, and the lock that it holds."""
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
    """A new lock file, held; None where another process has removed it before it was held."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.lstat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _identity() -> dict[str, str | int]:
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else "unknown"
    return {"pid": os.getpid(), "host": os.uname().nodename, "boot": boot}


def _own_folders(parent: Path) -> Iterator[Path]:
    """Those of this user's runs. In a folder that several share, such as /scratch, others may put anything beside them."""
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
            print(f"hf_zero: {folder} is of a run that has ended, and stays: {error}.", file=sys.stderr, flush=True)


def _remove_if_dead(folder: Path) -> None:
    lock, owner = None, "unknown"
    try:
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = os.pread(lock, 500, 0).decode(errors="replace")
        nbytes = _removed_bytes(folder, is_held=lock is not None)
    except BlockingIOError:
        return
    finally:
        if lock is not None:
            os.close(lock)
    if nbytes:
        print(
            f"hf_zero: removed {folder} ({nbytes / 2**20:,.1f} MiB), which a run that has ended left behind ({owner}).",
            file=sys.stderr,
            flush=True,
        )


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
