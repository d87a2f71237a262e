"""Commits a folder whole or not at all, on every rank, and locks a run's folder."""

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
from pathlib import Path

import torch

from ..comm.all_or_none import Exchange, Result, all_results_or_none
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

# ---- A step of a checkpoint succeeds on all ranks, or raises the first failure's reason on all ----


def on_all_ranks(exchange: Exchange, work: Callable[[], Result], *, doing: str, then: str) -> list[Result]:
    """Runs `work` on this rank; returns every rank's result, in rank order. Collective.

    Args:
        work: returns something picklable.
        doing: what failed, in words ("write to checkpoint-5/zero").
        then: what that means and what to do.

    Raises:
        CheckpointError: on every rank, with the first failing rank's reason.
    """
    return all_results_or_none(
        exchange,
        work,
        # Every error: with one that is not expected, this rank would raise another class of error than the others.
        expected=(Exception,),
        tell=lambda error: str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}",
        error=lambda rank, reason: CheckpointError(
            f"hf_zero: rank {rank} could not {doing}: {reason.rstrip('.')}. {then}"
        ),
    )


# ---- Which ranks write to the same disk: one that all hosts share, or one of each host's own ----

_PROBE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The ranks that see one folder. The first of them does the work that a disk needs once.

    Attributes:
        ranks: in order; this one is among them.
        rank: this one.
        world_size: ranks of all disks.
    """

    ranks: tuple[int, ...]
    rank: int
    world_size: int

    @classmethod
    def shared(cls, rank: int = 0, world_size: int = 1) -> "Disk":
        return cls(ranks=tuple(range(world_size)), rank=rank, world_size=world_size)

    @property
    def leads(self) -> bool:
        """Whether this rank makes folders, manifests and renames here."""
        return self.rank == self.ranks[0]

    @property
    def index(self) -> int:
        """Counts this rank among those of the disk, from 0."""
        return self.ranks.index(self.rank)

    @property
    def is_of_all(self) -> bool:
        return len(self.ranks) == self.world_size


@contextmanager
def disk_asked(folder: Path) -> Iterator[None]:
    """Raises the disk's own error in place of torch.save's "unexpected pos", which hides a full disk.

    Raises:
        OSError: the disk refuses to write to `folder` at all, for this reason.
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
    """Finds the ranks to which `path` is the same file or folder. Collective; writes nothing."""

    def identity() -> tuple[int, int] | None:
        # A copy has another inode, or one of another time; no tool can set the time of an inode's change.
        return (path.stat().st_ino, path.stat().st_ctime_ns) if path.exists() else None

    found = exchange(identity())
    ranks = tuple(number for number, theirs in enumerate(found) if theirs == found[rank])
    return Disk(ranks=ranks, rank=rank, world_size=len(found))


def find_disk(folder: Path, rank: int, exchange: Exchange, *, then: str) -> Disk:
    """Makes `folder` and finds the ranks that see this rank's mark in it. Collective.

    Args:
        then: what a failure means, in words.

    Raises:
        CheckpointError: on every rank, where one cannot write there.
    """
    mark = folder / f"{MARK}{uuid.uuid4().hex}"

    def put() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)
        return mark.name

    try:
        names = on_all_ranks(exchange, put, doing=f"write to {folder}", then=then)
        seen = tuple(number for number, name in enumerate(names) if (folder / name).exists())
        # After this all ranks have looked. A mark that went earlier would hide its rank from a rank that looks later.
        exchange(None)
    finally:
        # Also if another rank could not write: this rank's mark is there. In a folder that is none, the error above says so.
        with suppress(OSError):
            mark.unlink()
    return Disk(ranks=seen, rank=rank, world_size=len(names))


# ---- A checkpoint folder is there whole or not at all ----
#
# Everything is written to `.tmp-NAME` beside the final folder; there each file is hashed and put on the disk, the manifest
# that lists them all is written last, and one rename makes it the checkpoint.

_THEN = (
    "The former checkpoints are as they were, and training state is unharmed. Free space or make the folder writable."
)


def temporary_of(final: Path) -> Path:
    """Names the folder in which the checkpoint `final` is written before the commit."""
    return final.parent / f".tmp-{final.name}"


def former_of(final: Path) -> Path:
    """Names the folder in which `commit` keeps the checkpoint that it replaces."""
    return final.parent / f".old-{final.name}"


def begin(final: Path, *, needed_bytes: int, disk: Disk, exchange: Exchange) -> Path:
    """Makes an empty temporary folder for the checkpoint `final`. Collective.

    Args:
        needed_bytes: that the ranks of this disk together are about to write.

    Raises:
        CheckpointError: on every rank, when the folder cannot be made or the disk has too little room.
    """
    temporary = temporary_of(final)

    def make() -> None:
        if not disk.leads:
            return
        final.parent.mkdir(parents=True, exist_ok=True)
        # Asked before the first byte: a disk that fills up in the middle has cost the others their time.
        free = shutil.disk_usage(final.parent).free
        if free < needed_bytes:
            raise CheckpointError(
                f"{final} needs about {in_units(needed_bytes)} and {final.parent} has {in_units(free)} free: "
                f"{in_units(needed_bytes - free)} too little"
            )
        # A former run that was killed may have left a folder of that name: its files would be sealed with ours.
        _take_away(temporary)
        temporary.mkdir()

    try:
        on_all_ranks(exchange, make, doing=f"begin {final}", then=_THEN)
    except BaseException:
        # Another disk may have refused.
        abandon(temporary, disk=disk)
        raise
    return temporary


def seal(root: Path, manifest: Manifest, *, folder: str, within: str, disk: Disk, exchange: Exchange) -> None:
    """Puts the files of a checkpoint on the disk and writes, last, the manifest that vouches for them. Collective.

    Args:
        root: the checkpoint.
        manifest: without its files, which are recorded here; the ranks of a disk share the hashing. Its `written` is compared.
        folder: below the root, in which the manifest lies.
        within: vouch for the files below this folder of the root; "" is all of them.

    Raises:
        CheckpointError: on every rank, with the first failing rank's reason; the manifest is then not there.
    """
    own_name = f"{folder}/{MANIFEST_NAME}"

    def hash_own_part() -> dict[Chunk, str]:
        # What has a name that no manifest may have is not ours.
        names = [n for n in files_below(root) if n.startswith(within) and n != own_name and is_inside(n)]
        hashes: dict[Chunk, str] = {}
        own = share_of({name: (root / name).stat().st_size for name in names}, disk.index, len(disk.ranks))
        for name, indices in by_file(own).items():
            # The bytes must be on the disk before the manifest vouches for them. After a power cut, the manifest would
            # otherwise be there and the values not.
            sync(root / name)
            # A file that another library wrote, and cut off, would get a good hash of bad content.
            if name.endswith(".safetensors") and not is_whole_safetensors(root / name):
                raise CheckpointError(f"{name} is shorter than its header says: it was cut off while it was written")
            hashes.update(((name, index), value) for index, value in hashes_of(root / name, indices).items())
        return hashes

    # No rank writes the manifest before all ranks have hashed and synced their share.
    parts = on_all_ranks(exchange, hash_own_part, doing=f"put {root} on the disk", then=_THEN)
    # After all hashes: a bit that changed on the way into the file would have a good hash. If it changes later, its hash is bad.
    on_all_ranks(exchange, lambda: refuse_changed(manifest.written), doing=f"write {root}", then=_THEN)

    def write() -> None:
        there = {name for part in parts for name, _ in part}
        # Against the parts of all ranks: each disk may have some of the files, and a file that is on none has been taken away.
        written = [row_file(rank, manifest.world_size) for rank in manifest.writers()]
        lost = [f"{folder}/{file}" for file in written if f"{folder}/{file}" not in there]
        if lost:
            raise CheckpointError(f"{lost[0]} has been written and is gone")
        if disk.leads:
            files = _records(root, [parts[rank] for rank in disk.ranks])
            elsewhere = [file for file in written if f"{folder}/{file}" not in files]
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            replace(manifest, files=files, elsewhere=tuple(elsewhere), written_at=now).write(root / folder)
            # A folder's names are data of their own: without a sync of the folder, a power cut loses files that are
            # synced. Behind the manifest, whose name belongs to a folder too.
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
    """Makes a sealed `temporary` the checkpoint `final`, in the place of one of that name. Collective.

    Raises:
        CheckpointError: on every rank; `final` is then as it was.
    """

    def rename() -> None:
        if not disk.leads:
            return
        replaced = former_of(final)
        if os.path.lexists(final) and not final.is_dir():
            _move_file_aside(final)
        # A rename cannot replace a folder with files, so the old one steps aside. Between the two renames only `.old-`
        # has the old one: `put_back` and `clear_leftovers` undo that.
        if final.exists():
            # A killed run's: it had put a new one in this one's place, and not taken this one away.
            _take_away(replaced)
            final.rename(replaced)
        try:
            temporary.rename(final)
        except OSError:
            if replaced.exists():
                replaced.rename(final)
            raise
        # The rename is in the folder's list of names. The old checkpoint may only go once the new name is on the disk.
        sync(final.parent)
        _take_away(replaced)

    on_all_ranks(exchange, rename, doing=f"commit {final}", then=_THEN)


def _move_file_aside(final: Path) -> None:
    """Gives a file that has a checkpoint's name another name. It may be the user's, and no rename replaces it by a folder."""
    aside = final.with_name(f"{final.name}.file-{uuid.uuid4().hex[:8]}")
    final.rename(aside)
    warnings.warn(f"hf_zero: {final} was a file and no checkpoint. It is {aside.name} now.", stacklevel=2)


def put_back(finals: Iterable[Path], *, exchange: Exchange) -> None:
    """Undoes each `commit` of one of `finals` that was killed between the two renames. Collective."""

    def rename() -> None:
        for final in finals:
            # The old checkpoint is then the only whole one, and nothing reads `.old-`.
            if former_of(final).is_dir() and not final.exists():
                # On every rank, since hosts may have disks of their own. Another rank of this disk may have been faster.
                with suppress(FileNotFoundError):
                    former_of(final).rename(final)

    then = "Nothing was trained. Make the folder writable, or take `.old-` out of the name yourself."
    on_all_ranks(exchange, rename, doing="put back a checkpoint that a killed run was replacing", then=then)


def abandon(temporary: Path, *, disk: Disk) -> None:
    """Removes the temporary folder of a failed save."""
    if disk.leads:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(final: Path) -> None:
    """Removes a checkpoint. A kill meanwhile leaves no half of a checkpoint under its name."""
    temporary = temporary_of(final)
    # Renamed first: removing files takes time, and half of a checkpoint under its name would be resumed from.
    _take_away(temporary)
    # To the name of an unfinished checkpoint: the next run clears those away, should this one be killed below.
    final.rename(temporary)
    _take_away(temporary)


def _take_away(folder: Path) -> None:
    """Removes a folder or a file if it exists; of a link, removes only the link."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def clear_marks(folder: Path) -> None:
    """Removes the marks of killed runs. Only for a folder in which no other run is."""
    for left in folder.glob(f"{MARK}*"):
        left.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Removes unfinished and half-replaced checkpoints of killed runs from a folder of checkpoints.

    A `.old-NAME` without NAME was renamed and not yet replaced, so the rename is undone.
    """
    for old in folder.glob(".old-checkpoint-*"):
        final = folder / old.name.removeprefix(".old-")
        if final.exists():
            _take_away(old)
        elif old.is_dir():
            # Killed between the two renames of `commit`: the old checkpoint is the newest whole one.
            old.rename(final)
    for temporary in folder.glob(".tmp-checkpoint-*"):
        _take_away(temporary)


# ---- One run at a time writes into a folder of checkpoints: a lock that the system drops when the process ends ----
#
# [Note: the lock of an open file]
# The lock belongs to the open file. lockf's lock belongs to the process, and the system drops it as soon as the process closes
# any handle of the file, as a copy or a hash of the folder does. flock's lock is not seen by a process on the host that exports
# the folder, if the lock was set through NFS.

LOCK_NAME = ".hf_zero.lock"

PATIENCE_S = 5.0
"""For a run that is about to end, such as the one that a launcher has just killed to start this."""

ELASTIC_PATIENCE_S = 120.0
"""The same under a launcher that restarts runs: a rank on a host that is lost, or whose agent was killed, may hold the lock until
its collectives fail, or until the file system's server gives up on its host."""

_GLANCE_S = 0.2

_HELD: set[int] = set()
"""Handles of the locks of this process."""

_WRITE_LOCK_OF_ALL = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""Linux's `struct flock`: a write lock from the first byte to the end, whatever the length. The process number has to be 0."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system says that has no locks, or a server of one whose locks are off: some of clusters, and of object stores."""


@contextmanager
def held_alone(folder: Path, *, disk: Disk, exchange: Exchange) -> Iterator[None]:
    """Keeps other runs from writing checkpoints to `folder` meanwhile. Collective.

    The leading process of the disk holds the lock. Where the file system has no locks, a warning says so.

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
        # Inside `try`: this raises on all ranks where one has no lock, and the locks that other disks' ranks have taken must
        # go.
        on_all_ranks(exchange, take, doing=f"have {folder} for its checkpoints alone", then=then)
        yield
    finally:
        # A forked child that leaves this block, by sys.exit in a callback, must not remove its parent's file.
        for lock in _HELD.intersection(held):
            # Removed while the lock is held: a waiting process then finds the file gone, and makes another.
            # On a disk that refuses, the file stays and locks nothing.
            with suppress(OSError):
                path.unlink()
            _HELD.remove(lock)
            os.close(lock)


def _close_in_child() -> None:
    # A child that outlives a killed run, such as a DataLoader's worker, would keep the open file, and with it the lock.
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_close_in_child)


def _taken(path: Path) -> int:
    """Opens and locks the file; waits while another run holds the lock."""
    deadline_s = time.monotonic() + _patience_s()
    while True:
        lock = _opened(path)
        try:
            _lock(lock)
        # POSIX lets a system raise either if another open file has the lock.
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
        # The lock is on an inode. If the former holder has unlinked the file, this lock keeps nobody out.
        try:
            if os.path.samestat(os.fstat(lock), path.stat()):
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps(_own_name()).encode(), 0)
                _HELD.add(lock)
                return lock
        except FileNotFoundError:
            # The last holder has removed the file since it was opened here.
            continue
        finally:
            # Also if the disk refuses the write: an open file would keep the folder locked until this process ends.
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
        # Kernels of some sandboxes have only flock.
        if error.errno != errno.EINVAL:
            raise
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _own_name() -> dict[str, str | int]:
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": os.uname().nodename, "since": since}


def _opened(path: Path) -> int:
    """Opens the lock file, and makes one where there is none.

    Raises:
        CheckpointError: it is a link or no plain file, or it is another user's.
    """
    try:
        # The file is cut and written to. A link that another user made in a shared folder could name any file of this user.
        return open_in_place(path, os.O_RDWR)
    except PermissionError as error:
        # A file that is there and refused is another user's. Without a file, the folder itself refuses.
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


# ---- A save that goes on behind training, and whose failure surfaces at the next one or at the end ----


class Background:
    """Runs one job at a time in a thread of its own. `device`: of what it saves."""

    def __init__(self, device: torch.device):
        self._device = device
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Starts `job`; the one before must have been finished."""
        if self._thread is not None:
            raise AssertionError(
                "hf_zero: bug: a save was started before the last one was finished. Open an issue with this traceback."
            )

        def run() -> None:
            try:
                # A new thread begins on device 0, whatever device the main thread uses.
                enter_thread(self._device)
                job()
            # All errors: a thread prints an error, or ends in silence on SystemExit, and the save would pass for done.
            except BaseException as fault:
                self._fault = fault

        self._thread = threading.Thread(target=run, name="hf_zero save")
        self._thread.start()

    def is_done(self, patience_s: float) -> bool:
        """Whether the job has ended, within `patience_s`."""
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Waits for the job and raises its error."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        # Raised once only: the next save begins without the error of this one.
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
