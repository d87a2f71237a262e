"""Commits a checkpoint folder completely or not at all, on every rank, and locks a run's folder against other runs."""

import errno
import fcntl
import json
import os
import shutil
import struct
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

from ..comm.all_or_none import Exchange, Merge, Merged, Result, all_results_or_none, merged_or_none
from ..device import enter_thread, in_units
from .files import (
    MARK,
    CheckpointError,
    Chunk,
    FileRecord,
    by_file,
    files_below,
    hashes_of,
    is_inside,
    is_whole_safetensors,
    open_in_place,
    refuse_changed,
    share_of,
    shown,
    sync,
)
from .manifest import MANIFEST_NAME, Manifest, row_file

# ---- Each step of a save succeeds on all ranks, or raises the first failure on all ----


def on_all_ranks(exchange: Exchange, work: Callable[[], Result], *, doing: str, then: str) -> list[Result]:
    """Runs `work` on this rank; returns every rank's result, in rank order. Collective.

    Args:
        work: returns something picklable.
        doing: the action, in words, that the error says could not be done ("write to checkpoint-5/zero").
        then: the consequence and the remedy, in words.

    Raises:
        CheckpointError: on every rank, with the first failing rank's reason.
    """
    return all_results_or_none(exchange, work, expected=_ANY, tell=_reason, error=partial(_failed, doing, then))


def merged_on_all_ranks(merge: Merge, rank: int, work: Callable[[], Merged], *, doing: str, then: str) -> Merged:
    """Works like `on_all_ranks`, and returns the merged results of all ranks. Collective."""
    return merged_or_none(merge, rank, work, expected=_ANY, tell=_reason, error=partial(_failed, doing, then))


_ANY = (Exception,)
"""Expect every error. With an unexpected one, this rank would raise a different class from the other ranks."""


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _failed(doing: str, then: str, rank: int, reason: str) -> CheckpointError:
    return CheckpointError(f"hf_zero: rank {rank} could not {doing}: {reason.rstrip('.')}. {then}")


# ---- Which ranks write to the same disk: all hosts may share one, or each host has its own ----

_PROBE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The ranks with access to the same folder. The first of them does the work needed once per disk.

    Attributes:
        ranks: in order, including this rank.
        rank: this rank.
        world_size: the number of ranks of all disks.
    """

    ranks: tuple[int, ...]
    rank: int
    world_size: int

    @classmethod
    def shared(cls, rank: int = 0, world_size: int = 1) -> "Disk":
        return cls(ranks=tuple(range(world_size)), rank=rank, world_size=world_size)

    @property
    def leads(self) -> bool:
        """Whether this rank makes the folders, manifests and renames on its disk."""
        return self.rank == self.ranks[0]

    @property
    def index(self) -> int:
        """The index of this rank among the ranks of its disk, from 0."""
        return self.ranks.index(self.rank)

    @property
    def is_of_all(self) -> bool:
        return len(self.ranks) == self.world_size


@contextmanager
def disk_asked(folder: Path) -> Iterator[None]:
    """Raises the disk's own error instead of torch.save's "unexpected pos", which hides a full disk.

    Raises:
        OSError: the disk refuses any write to `folder`, for this reason.
    """
    try:
        yield
    except RuntimeError as error:
        probe = folder / f"{MARK}{uuid.uuid4().hex}"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        except OSError as refusal:
            raise refusal from error
        finally:
            probe.unlink(missing_ok=True)
        raise


def disk_with(path: Path, rank: int, exchange: Exchange) -> Disk:
    """Finds the ranks with the same file or folder at `path`. Collective; writes nothing."""

    def identity() -> tuple[int, int] | None:
        # A copy has another inode number, or another change time: no tool can set an inode's change time.
        return (path.stat().st_ino, path.stat().st_ctime_ns) if path.exists() else None

    found = exchange(identity())
    ranks = tuple(number for number, theirs in enumerate(found) if theirs == found[rank])
    return Disk(ranks=ranks, rank=rank, world_size=len(found))


def find_disk(folder: Path, rank: int, exchange: Exchange, *, then: str) -> Disk:
    """Makes `folder`, puts a mark file there and finds the ranks which see the file. Collective.

    Args:
        then: what a failure means, in words.

    Raises:
        CheckpointError: on every rank, if one of them cannot write there.
    """
    mark = folder / f"{MARK}{uuid.uuid4().hex}"

    def put() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)
        return mark.name

    try:
        names = on_all_ranks(exchange, put, doing=f"write to {folder}", then=then)
        seen = tuple(number for number, name in enumerate(names) if (folder / name).exists())
        # Wait until all ranks have looked. Removing a mark earlier would hide its rank from slower ranks.
        exchange(None)
    finally:
        # Remove this rank's mark also if another rank could not write. If `folder` is a file, the error above names the folder.
        with suppress(OSError):
            mark.unlink()
    return Disk(ranks=seen, rank=rank, world_size=len(names))


# ---- A checkpoint folder is complete or absent ----
#
# All files are written to `.tmp-NAME`, next to the final folder. There each file is hashed and synced to the disk, and the
# manifest that lists them is written last. One rename then turns the folder into the checkpoint.

_THEN = (
    "The former checkpoints are as they were, and training state is unharmed. Free space or make the folder writable."
)


def temporary_of(final: Path) -> Path:
    """Names the folder in which the checkpoint `final` is written before the commit."""
    return final.parent / f".tmp-{final.name}"


def former_of(final: Path) -> Path:
    """Names the folder in which `commit` keeps the replaced checkpoint."""
    return final.parent / f".old-{final.name}"


def begin(final: Path, *, needed_bytes: int, disk: Disk, exchange: Exchange) -> Path:
    """Makes an empty temporary folder for the checkpoint `final`. Collective.

    Args:
        needed_bytes: how much all ranks of this disk together are about to write.

    Raises:
        CheckpointError: on every rank, if the folder cannot be made or the disk has too little room.
    """
    temporary = temporary_of(final)

    def make() -> None:
        if not disk.leads:
            return
        final.parent.mkdir(parents=True, exist_ok=True)
        # Ask before the first write: a disk which fills up halfway has wasted the time of all ranks.
        free = shutil.disk_usage(final.parent).free
        if free < needed_bytes:
            raise CheckpointError(
                f"{final} needs about {in_units(needed_bytes)} and {final.parent} has {in_units(free)} free: "
                f"{in_units(needed_bytes - free)} too little"
            )
        # A killed run may have left a folder of this name. Its files would be sealed with the new ones.
        _take_away(temporary)
        temporary.mkdir()

    try:
        on_all_ranks(exchange, make, doing=f"begin {final}", then=_THEN)
    except BaseException:
        # The begin may have failed on another disk only.
        abandon(temporary, disk=disk)
        raise
    return temporary


def seal(root: Path, manifest: Manifest, *, folder: str, within: str, disk: Disk, exchange: Exchange) -> None:
    """Syncs the files of a checkpoint to the disk, then writes the manifest with their hashes. Collective.

    Args:
        root: the checkpoint folder.
        manifest: without `files`, which are recorded here; the ranks of a disk divide the hashing. The files are compared
            with its `written`.
        folder: the subfolder of the root for the manifest.
        within: record only the files below this folder of the root; "" records all.

    Raises:
        CheckpointError: on every rank, with the first failing rank's reason. There is no manifest then.
    """
    own_name = f"{folder}/{MANIFEST_NAME}"

    def hash_own_part() -> dict[Chunk, str]:
        # Skip names which are invalid in a manifest: hf_zero did not write such files.
        names = [n for n in files_below(root) if n.startswith(within) and n != own_name and is_inside(n)]
        hashes: dict[Chunk, str] = {}
        own = share_of({name: (root / name).stat().st_size for name in names}, disk.index, len(disk.ranks))
        for name, indices in by_file(own).items():
            # The bytes must be on the disk before the manifest vouches for them: otherwise, a power cut could leave the
            # manifest without the values.
            sync(root / name)
            # Another library may have written and truncated a file. The hash of its bad content would be valid.
            if name.endswith(".safetensors") and not is_whole_safetensors(root / name):
                raise CheckpointError(f"{name} is shorter than its header says: it was cut off while it was written")
            hashes.update(((name, index), value) for index, value in hashes_of(root / name, indices).items())
        return hashes

    # No rank writes the manifest before all ranks have hashed and synced their shares.
    parts = on_all_ranks(exchange, hash_own_part, doing=f"put {root} on the disk", then=_THEN)
    # Compare the files with memory after the hashes are made. A bit that flips before the hash is found here, and a bit that
    # flips later fails the hash.
    on_all_ranks(exchange, lambda: refuse_changed(manifest.written), doing=f"write {root}", then=_THEN)

    def write() -> None:
        there = {name for part in parts for name, _ in part}
        # Look in the parts of all ranks: each disk may have only some of the files. A file on no disk has been removed.
        written = [row_file(rank, manifest.world_size) for rank in manifest.writers()]
        lost = [f"{folder}/{file}" for file in written if f"{folder}/{file}" not in there]
        if lost:
            raise CheckpointError(f"{lost[0]} has been written and is gone")
        if disk.leads:
            files = _records(root, [parts[rank] for rank in disk.ranks])
            elsewhere = [file for file in written if f"{folder}/{file}" not in files]
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            replace(manifest, files=files, elsewhere=tuple(elsewhere), written_at=now).write(root / folder)
            # A folder's list of names is data, too: without a sync of the folder, a power cut loses synced files.
            # Sync after the manifest is written, as its name is in such a list as well.
            for each in [*(path for path in root.rglob("*") if path.is_dir()), root]:
                sync(each)

    on_all_ranks(exchange, write, doing=f"write the manifest of {root}", then=_THEN)


def _records(root: Path, parts: Sequence[Mapping[Chunk, str]]) -> dict[str, FileRecord]:
    hashes = {chunk: value for part in parts for chunk, value in part.items()}
    found: dict[str, list[str]] = {}
    for name, index in sorted(hashes):
        found.setdefault(name, []).append(hashes[name, index])
    return {n: FileRecord(size=(root / n).stat().st_size, xxh3=tuple(values)) for n, values in found.items()}


def commit(temporary: Path, final: Path, *, disk: Disk, exchange: Exchange) -> None:
    """Replaces the checkpoint `final` by a sealed `temporary`, with one rename. Collective.

    Raises:
        CheckpointError: on every rank. `final` is unchanged then.
    """

    def rename() -> None:
        if not disk.leads:
            return
        replaced = former_of(final)
        if os.path.lexists(final) and not final.is_dir():
            _move_file_aside(final)
        # A rename cannot replace a folder with files in it, so the old one is renamed first. If the run is killed
        # between the two renames, only `.old-` is left: `put_back` and `clear_leftovers` then restore the name.
        if final.exists():
            # Left by a run killed after its second rename, before it removed the old checkpoint.
            _take_away(replaced)
            final.rename(replaced)
        try:
            temporary.rename(final)
        except OSError:
            if replaced.exists():
                replaced.rename(final)
            raise
        # A rename changes the parent folder's list of names. Remove the old checkpoint only after the new name is on the disk.
        sync(final.parent)
        _take_away(replaced)

    on_all_ranks(exchange, rename, doing=f"commit {final}", then=_THEN)


def _move_file_aside(final: Path) -> None:
    """Renames a plain file with a checkpoint's name. It may be the user's, and a rename cannot replace a file by a folder."""
    aside = final.with_name(f"{final.name}.file-{uuid.uuid4().hex[:8]}")
    final.rename(aside)
    warnings.warn(f"hf_zero: {final} was a file and no checkpoint. It is {aside.name} now.", stacklevel=2)


def put_back(finals: Iterable[Path], *, exchange: Exchange) -> None:
    """Undoes each `commit` to one of `finals` if its run was killed between the two renames. Collective."""

    def rename() -> None:
        for final in finals:
            # The old checkpoint is then the only complete one, and nothing reads `.old-`.
            if former_of(final).is_dir() and not final.exists():
                # Every rank tries, since hosts may have separate disks. Another rank of this disk may have been faster.
                with suppress(FileNotFoundError):
                    former_of(final).rename(final)

    then = "Nothing was trained. Make the folder writable, or take `.old-` out of the name yourself."
    on_all_ranks(exchange, rename, doing="put back a checkpoint that a killed run was replacing", then=then)


def abandon(temporary: Path, *, disk: Disk) -> None:
    """Removes the temporary folder of a failed save."""
    if disk.leads:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(final: Path) -> None:
    """Removes a checkpoint. If the process is killed during the removal, no partial checkpoint keeps the name."""
    temporary = temporary_of(final)
    # Rename first: removing files takes time, and a partial checkpoint under the final name would be resumed from.
    _take_away(temporary)
    # Use the name of an unfinished checkpoint, which the next run removes if this process is killed below.
    final.rename(temporary)
    _take_away(temporary)


def _take_away(folder: Path) -> None:
    """Removes a folder, a file or a link, if there is one. The target of a link remains."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def clear_marks(folder: Path) -> None:
    """Removes the mark files of killed runs. Call only for a folder without other runs."""
    for left in folder.glob(f"{MARK}*"):
        left.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Removes the unfinished and half-replaced checkpoints of killed runs from a folder of checkpoints.

    A folder `.old-NAME` without a NAME is renamed back: its run was killed before the new checkpoint got the name.
    """
    for old in folder.glob(".old-checkpoint-*"):
        final = folder / old.name.removeprefix(".old-")
        if final.exists():
            _take_away(old)
        elif old.is_dir():
            # Killed between the two renames of `commit`: the old checkpoint is the newest complete one.
            old.rename(final)
    for temporary in folder.glob(".tmp-checkpoint-*"):
        _take_away(temporary)


# ---- One run at a time writes into a folder of checkpoints. The system drops the lock when the process ends ----
#
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

    then = "Nothing was trained. Give this run an output_dir of its own, or end the other first."
    try:
        # Inside `try`: if one rank gets no lock, this raises on all ranks, and the other disks' ranks must release theirs.
        on_all_ranks(exchange, take, doing=f"have {folder} for its checkpoints alone", then=then)
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
                holder = "another Trainer of this process"
            os.close(lock)
            if time.monotonic() > deadline_s:
                raise CheckpointError(f"another run writes there now ({holder})") from error
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
                f"{path} is user {path.lstat().st_uid}'s, whose run writes there or has left it"
            ) from error
        raise


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
        return shown(f"process {known['pid']} on {known['host']}, since {known['since']}")
    except (ValueError, KeyError, TypeError):
        return "a process that does not say its number"


# ---- A save in a thread while training continues. Its failure is raised by the next save or at the end ----


class Background:
    """Runs one job at a time in a thread. `device`: the device of the saved tensors."""

    def __init__(self, device: torch.device):
        self._device = device
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Starts `job`. The previous job must have been finished with `finish`."""
        if self._thread is not None:
            raise AssertionError(
                "hf_zero: bug: a save was started before the last one was finished. Open an issue with this traceback."
            )

        def run() -> None:
            try:
                # A new thread starts with device 0 as its current device, whatever device the main thread uses.
                enter_thread(self._device)
                job()
            # Catch every error: a thread prints an error or exits silently on SystemExit, and the save would count as done.
            except BaseException as fault:
                self._fault = fault

        self._thread = threading.Thread(target=run, name="hf_zero save")
        self._thread.start()

    def is_done(self, patience_s: float) -> bool:
        """Waits up to `patience_s` seconds for the job; returns whether the job has ended."""
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Waits for the job and raises its error."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        # Raise the error only once: the next save starts without the error of this one.
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
