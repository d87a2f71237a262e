"""The memory of optimizer state: the device's, the host's, or files in a run's folder."""

import errno
import fcntl
import json
import os
import stat
import sys
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

import torch

from ..config import ConfigError
from ..device import PinnedPool, allocate, pin, unpin
from .copies import DeviceToHost, HostToDevice, d2h, h2d
from .files import Kind, StoredShard, Window
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
            print(f"hf_zero: {folder} is of a run that has ended, and stays: {error}.", file=sys.stderr, flush=True)


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


# ---- Tiers: they allocate the master, the reduced gradient and the optimizer state of a shard ----


class StateFiles:
    """Files on a local disk, one for each shard.

    Args:
        path: an existing folder; the files are in a folder of this run below it.
        window: buckets that may be read or written beside the one that is stepped.
        cores: of steps.
        device: of the parameters.

    Attributes:
        folder: of this run.
        window: through which files pass.
        shards: the files.
        moved_bytes: (read, written) from the end of the last step but one to the end of the last step.
        holds_state: the files have optimizer state; else only masters that are parameters as well.
    """

    def __init__(self, path: Path, window: int, cores: HostCores, device: torch.device, *, holds_state: bool = True):
        self.folder = RunFolder(path)
        self.window = Window(window, cores, device)
        self.holds_state = holds_state
        self.shards: list[StoredShard] = []
        self.moved_bytes = (0, 0)
        self._moved_before = (0, 0)

    def store(self, name: str, kinds: Sequence[Kind]) -> StoredShard:
        """Makes a shard's file. Raises `OffloadError` on a full disk."""
        shard = StoredShard(self.folder.path / f"{name.replace(' ', '-')}.state", kinds)
        self.shards.append(shard)
        return shard

    def end_step(self) -> None:
        """Starts `moved_bytes` anew. A second call without a transfer in between changes nothing."""
        now = (sum(shard.read_bytes for shard in self.shards), sum(shard.written_bytes for shard in self.shards))
        if now != self._moved_before:
            self.moved_bytes = (now[0] - self._moved_before[0], now[1] - self._moved_before[1])
        self._moved_before = now

    def close(self) -> None:
        """Removes the files and their contents."""
        # First: its threads may be writing to the files.
        self.window.close()
        for shard in self.shards:
            shard.file.close()
        self.shards.clear()
        self.folder.close()


class Tier:
    """Memory for shards: here the training device's, where a step fetches nothing.

    Attributes:
        name: in the plan and the memory report.
        is_apart: the optimizer steps in other memory than the parameters', on masters and gradients of its own.
        scratch_name: of the memory of `scratch`.
        device: of the parameters.
        cores: of the host, for steps in this memory; None where they are the script's own.
        h2d: copies masters here to parameters on the device.
        d2h: copies gradients from the device here.
        files: for state; None if all state is in memory.
    """

    name = scratch_name = "device"
    is_apart = False
    files: StateFiles | None = None
    cores: HostCores | None = None

    def __init__(self, device: torch.device):
        self.device = device
        self.h2d = HostToDevice()
        self.d2h = DeviceToHost()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a flat tensor of `numel` elements in this tier."""
        return allocate(numel, dtype, self.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a flat tensor of `numel` elements for a part of a step."""
        # By torch's allocator: gradients come as activations go, and reuse their pages. With a mapping of their own, the system
        # would clear as many pages anew in each step.
        return torch.empty(numel, dtype=dtype, device=self.device)


_HOST = torch.device("cpu")


class HostTier(Tier):
    """Host memory, pinned for parameters on an accelerator, so that copies need no buffer in between.

    The optimizer makes its state on the device of its rows, so state is on the host too, and never moves.

    Args:
        device: of the parameters.
        cores: for steps here; this memory is near to them.
    """

    name = scratch_name = "host memory"
    is_apart = True
    cores: HostCores

    def __init__(self, device: torch.device, cores: HostCores):
        self.device = device
        self.cores = cores
        self.h2d = h2d(device)
        self.d2h = d2h(device, cores)
        self._scratches = PinnedPool(device)
        self._pinned: list[torch.Tensor] = []
        # The callback keeps the mappings alive until they have been unpinned: pages may not go back before.
        weakref.finalize(self, _unpin_all, self._pinned, device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Pinned after allocation: the pinned allocator of torch rounds up to a power of two, a quarter too much on average.
        flat = allocate(numel, dtype, _HOST)
        self.cores.touch(flat)
        if pin(flat, self.device):
            self._pinned.append(flat)
        return flat

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self.cores.near():
            if self.device.type == "cpu":
                return torch.empty(numel, dtype=dtype)
            return self._scratches.take(numel * dtype.itemsize).view(dtype)


class NvmeTier(HostTier):
    """Optimizer state, and separate masters, in one file for each shard; in memory for their bucket's step.

    Gradients of parameters on an accelerator are copied to host memory for the step; on the CPU they are there already.

    Files without state are the parameters': an fp32 parameter and its master are one copy there, which is in memory while its
    bucket is stepped, and optimizer state stays in host memory.

    Args:
        device: of the parameters.
        cores: of steps.
        apart: keep masters apart from parameters in host memory, too, which otherwise are their own masters.
    """

    name = "NVMe"

    def __init__(self, device: torch.device, files: StateFiles, cores: HostCores, *, apart: bool = False):
        super().__init__(device, cores)
        self.is_apart = apart or device.type != "cpu"
        self.files = files
        self.name = NvmeTier.name if files.holds_state else HostTier.name

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # A master before it is written to its file: not pinned, since it is used once.
        return allocate(numel, dtype, _HOST)


def _unpin_all(tensors: list[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        unpin(tensor, device)
    tensors.clear()
