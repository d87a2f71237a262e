"""Where optimizer state lives: on the device, in host memory, or in files of a run's folder."""

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
from .copies import Downlink, Uplink, downlink, uplink
from .files import Kind, StoredShard, Window
from .host_memory import HostCores

# The folder of one run's files below a path that runs share: nobody else's while the run lives, removed when it is dead.
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


# The tier of one shard's state: master copy, gradient shard and optimizer state live where their tier allocates them.


class StateFiles:
    """Files on a local disk, one for each shard.

    Args:
        path: an existing folder; the files are in a folder of this run below it.
        window: how many buckets may be on their way beside the one that is stepped.
        cores: of steps.
        device: of the parameters.

    Attributes:
        folder: of this run.
        window: through which files pass.
        shards: the files.
        moved_bytes: (read, written) by the last step, with what came before it since the step before.
        holds_state: they have optimizer state; else only masters that are parameters as well.
    """

    def __init__(self, path: Path, window: int, cores: HostCores, device: torch.device, *, holds_state: bool = True):
        self.folder = RunFolder(path)
        self.window = Window(window, cores, device)
        self.holds_state = holds_state
        self.shards: list[StoredShard] = []
        self.moved_bytes = (0, 0)
        self._moved_before = (0, 0)

    def store(self, name: str, kinds: Sequence[Kind]) -> StoredShard:
        """Makes a shard's file. Raises `OffloadError` where there is no room for it."""
        shard = StoredShard(self.folder.path / f"{name.replace(' ', '-')}.state", kinds)
        self.shards.append(shard)
        return shard

    def end_step(self) -> None:
        """Ends what `moved_bytes` counts as one step. A second call in which nothing has moved changes nothing."""
        now = (sum(shard.read_bytes for shard in self.shards), sum(shard.written_bytes for shard in self.shards))
        if now != self._moved_before:
            self.moved_bytes = (now[0] - self._moved_before[0], now[1] - self._moved_before[1])
        self._moved_before = now

    def close(self) -> None:
        """Removes the files; what they hold is lost."""
        self.window.close()
        for shard in self.shards:
            shard.file.close()
        self.shards.clear()
        self.folder.close()


class Tier:
    """Memory that holds shards: here the training device's, where nothing has to be fetched before a step.

    Attributes:
        name: what the plan and the memory report call it.
        is_apart: it is other memory than the parameters': the optimizer steps there, on masters and gradients of its own.
        scratch_name: of the memory in which `scratch` is.
        device: of the parameters.
        cores: of the host, that steps in this memory run on; None where they are the script's own.
        uplink: how masters here become parameters on the device.
        downlink: how gradients come here from it.
        files: that it keeps state in; None where all is in its memory.
    """

    name = scratch_name = "device"
    is_apart = False
    files: StateFiles | None = None
    cores: HostCores | None = None

    def __init__(self, device: torch.device):
        self.device = device
        self.uplink = Uplink()
        self.downlink = Downlink()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements in this tier."""
        return allocate(numel, dtype, self.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements for a part of a step."""
        # From where activations come: gradients come as those go, and on the host then fill pages that are there already.
        # A mapping of their own would have the system clear as many anew in each step.
        return torch.empty(numel, dtype=dtype, device=self.device)


# Host memory and files as tiers: masters, gradient shards and optimizer state beside the CPU that steps on them.

_HOST = torch.device("cpu")


class HostTier(Tier):
    """Host memory, pinned where the parameters are on an accelerator, so that copies need no buffer in between.

    The optimizer's own state is made where its rows are, so it is on the host too, and never moves. Where the training
    device is the CPU, the same memory holds both; the path is the same.

    Args:
        device: of the parameters.
        cores: of steps here, near to which this memory is to be.
    """

    name = scratch_name = "host memory"
    is_apart = True
    cores: HostCores

    def __init__(self, device: torch.device, cores: HostCores):
        self.device = device
        self.cores = cores
        self.uplink = uplink(device)
        self.downlink = downlink(device, cores)
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
    """Optimizer state, and masters where they are kept apart, in one file for each shard; in memory for their bucket's step.

    What passes through memory passes through host memory: gradients of parameters on an accelerator come down there. Where
    the training device is the CPU, gradients and fp32 parameters are there already, and only state is moved.

    Where the files hold no state, it is in host memory, and the files are the parameters': an fp32 parameter and its master
    are one copy there, which passes through memory when its bucket is stepped.

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
        # A master on its way to its file: for a moment, and therefore not pinned.
        return allocate(numel, dtype, _HOST)


def _unpin_all(tensors: list[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        unpin(tensor, device)
    tensors.clear()
