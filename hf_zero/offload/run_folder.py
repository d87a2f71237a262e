"""The folder of one run's files below a path that runs share: nobody else's while the run lives, removed when it is dead."""

import fcntl
import json
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path

from ..config import ConfigError

_PREFIX = "hf_zero-run-"
_LOCK = "lock"
_TURN = ".hf_zero-turn-"
"""Begins the name of a file of each user's, whose number follows: nobody may write to another's, or remove it."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Turns(threading.local):
    """What this thread does under a lock that it would wait for itself.

    Attributes:
        are_held: whether it has a turn, or waits for one.
        postponed: folders to remove, and their locks, as soon as it has none.
    """

    def __init__(self) -> None:
        self.are_held = False
        self.postponed: list[tuple[Path, int]] = []


_turns = _Turns()


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
    with _turn(parent):
        _remove_dead(parent)
        path = parent / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        path.mkdir()
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(lock, json.dumps(_identity()).encode())
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return path, lock


def _identity() -> dict[str, str | int]:
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else "unknown"
    return {"pid": os.getpid(), "host": os.uname().nodename, "boot": boot}


@contextmanager
def _turn(parent: Path) -> Iterator[None]:
    """One process of this user's at a time: a folder that is not locked yet must not look dead to another.

    The last folder to go takes the file along.
    """
    path = parent / f"{_TURN}{os.getuid()}"
    _turns.are_held = True
    try:
        turn = _wait_for(path)
        try:
            yield
            if not _own_folders(parent):
                path.unlink()
        finally:
            os.close(turn)
    finally:
        _turns.are_held = False
        while _turns.postponed:
            _remove_own(*_turns.postponed.pop())


def _wait_for(path: Path) -> int:
    while True:
        turn = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(turn, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(turn), path.stat()):
            return turn
        # Who had it before has taken it away meanwhile.
        os.close(turn)


def _own_folders(parent: Path) -> list[Path]:
    """Those of this user's runs. In a folder that several share, such as /scratch, the others' are not to be removed."""
    return [path for path in sorted(parent.glob(f"{_PREFIX}*")) if path.stat().st_uid == os.getuid()]


def _remove_dead(parent: Path) -> None:
    for folder in _own_folders(parent):
        lock_path = folder / _LOCK
        if lock_path.is_file() and not _is_free(lock_path):
            continue
        owner = lock_path.read_text() if lock_path.is_file() else "unknown"
        nbytes = sum(path.stat().st_size for path in folder.iterdir())
        shutil.rmtree(folder)
        print(
            f"hf_zero: removed {folder} ({nbytes / 2**20:,.1f} MiB), which a run that has ended left behind ({owner}).",
            file=sys.stderr,
            flush=True,
        )


def _is_free(lock_path: Path) -> bool:
    lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _remove_own(path: Path, lock: int) -> None:
    if _turns.are_held:
        # Called by the garbage collector in the midst of making another folder: waiting for that would never end.
        _turns.postponed.append((path, lock))
        return
    # It may be gone already, with the folder that it is in.
    if path.is_dir():
        with _turn(path.parent):
            shutil.rmtree(path)
    os.close(lock)
