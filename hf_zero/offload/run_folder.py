"""The folder of one run's files, inside a folder that runs share."""

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
from ..config.checks import spelled

# [Note: who may remove a folder] The first and the last file of a folder is its lock, held by the process of the run. Another
# process of this user may remove a folder if the lock is free or missing. After a process has created a folder and locked the
# lock, the process checks whether the folder still exists, and creates another one if not. So no process waits for another, and
# files put into the shared folder by other users have no effect.

_PREFIX = "hf_zero-run-"
_LOCK = "lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ATTEMPTS = 20


class RunFolder:
    """A new folder in `parent`. This process owns the folder through a lock until the process ends.

    Folders of this user without a held lock belong to dead runs, and are removed first, with a message.

    Args:
        parent: must exist.

    Raises:
        ConfigError: `parent` is not a folder, or this process may not write there.
    """

    def __init__(self, parent: Path):
        if not parent.is_dir():
            raise ConfigError(
                f"hf_zero config: `offload.nvme_path` is {str(parent)!r}, which is not a folder on this host. Create it on the "
                "NVMe disk, or name another."
            )
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"hf_zero config: `offload.nvme_path` is {str(parent)!r}, which this user cannot write to. Change its owner or "
                "mode, or name another."
            )
        try:
            # Make the path absolute, because a script may change its working folder during training.
            self.path, lock = _new_folder(parent.absolute())
        except OSError as error:
            raise ConfigError(
                f"hf_zero config: `offload.nvme_path` is {str(parent)!r}, but no folder for this run could be created in it: "
                f"{error}. Name a folder on a writable local NVMe disk, not a system folder (/proc, /sys)."
            ) from error
        # Use multiprocessing's Finalize instead of atexit, because processes started by multiprocessing skip atexit. A forked
        # process (such as a DataLoader's worker) inherits the object but must not remove the folder, and Finalize checks this.
        self._finalizer = Finalize(self, _remove_own, args=(self.path, lock), exitpriority=0)

    def close(self) -> None:
        """Removes the folder. This also happens when the process exits normally."""
        self._finalizer()


def _new_folder(parent: Path) -> tuple[Path, int]:
    """Creates a run's folder; returns its path and the held lock."""
    # Remove folders of dead runs first, because their files may fill the disk.
    _remove_dead(parent)
    for _ in range(_ATTEMPTS):
        path = parent / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        path.mkdir(mode=0o700)
        lock = _locked(path / _LOCK)
        if lock is not None:
            os.write(lock, json.dumps(_identity()).encode())
            return path, lock
    raise OSError(errno.EBUSY, f"{_ATTEMPTS} new folders were removed right after they were created")


def _locked(path: Path) -> int | None:
    """Creates and locks the file; returns None if another process has removed the file since."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A lock on a deleted file protects nothing.
        is_held = os.path.samestat(os.fstat(lock), path.lstat())
    except (BlockingIOError, FileNotFoundError):
        # Another process is removing the file: either the file is locked, or its name is already deleted.
        is_held = False
    if is_held:
        return lock
    os.close(lock)
    return None


def _identity() -> dict[str, str | int]:
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else "unknown"
    return {"pid": os.getpid(), "host": os.uname().nodename, "boot": boot}


def _own_folders(parent: Path) -> Iterator[Path]:
    """Yields the folders of this user's runs. Other users may put anything into a shared folder such as /scratch."""
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
            # Print instead of raising, because this run can train next to the folder while the disk has room.
            said = f"hf_zero: {folder} belongs to a run that has ended, but could not be removed: {error}."
            print(spelled(said), file=sys.stderr, flush=True)


def _remove_if_dead(folder: Path) -> None:
    lock, owner = None, "unknown"
    try:
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            # The lock decides, not the process id: a process in another container may have the same id.
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
        said = f"hf_zero: removed {folder} ({size}), the files of a run that has ended ({owner})."
        print(spelled(said), file=sys.stderr, flush=True)


def _removed_bytes(folder: Path, *, is_held: bool) -> int:
    """Removes a folder, its lock last; returns the bytes of its files. See [Note: who may remove a folder].

    Args:
        is_held: this process holds the lock. If not, a folder with a lock belongs to a run that is just starting.
    """
    nbytes = 0
    # Another process may be removing the folder as well.
    with suppress(FileNotFoundError):
        # Delete through the folder's handle: another folder created at the same path in the meantime keeps its files.
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # Delete the lock last: without a lock, another process would treat the folder as abandoned.
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
