"""Commits a checkpoint folder completely or not at all, on every rank."""

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath

from ..comm.all_or_none import Exchange, Merge
from ..device import in_units
from .disks import Disk
from .faults import CheckpointError
from .files import MARK, files_below, is_inside, replace_file, sync
from .hashes import Chunk, FileRecord, by_file, hashes_of, refuse_changed, share_of, unhashed
from .manifest import MANIFEST_NAME, Manifest, rank_of, row_file
from .on_all_ranks import done_on_all_ranks, merged_on_all_ranks, on_all_ranks
from .safetensors_headers import is_whole_safetensors

# All files are written to `.tmp-NAME`, next to the final folder. There each file is hashed and synced to the disk, and the
# manifest that lists them is written last. One rename then turns the folder into the checkpoint.
_THEN = "Earlier checkpoints and the training state are unchanged. Free space or make the folder writable."


def temporary_of(final: Path) -> Path:
    """Names the folder in which the checkpoint `final` is written before the commit."""
    return final.parent / f".tmp-{final.name}"


def former_of(final: Path) -> Path:
    """Names the folder in which `commit` keeps the replaced checkpoint."""
    return final.parent / f".old-{final.name}"


def begin(final: Path, *, needed_bytes: int, disk: Disk, merge: Merge) -> Path:
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
                f"{final} needs about {in_units(needed_bytes)}, but {final.parent} has {in_units(free)} free: "
                f"{in_units(needed_bytes - free)} too little"
            )
        # A killed run may have left a folder of this name. Its files would be sealed with the new ones.
        _take_away(temporary)
        temporary.mkdir()

    try:
        done_on_all_ranks(merge, disk.rank, make, doing=f"begin {final}", then=_THEN)
    except BaseException:
        # The begin may have failed on another disk only.
        abandon(temporary, disk=disk)
        raise
    return temporary


@dataclass(frozen=True)
class _Lost:
    """The first lost file of some ranks; None without one."""

    file: str | None

    def merged(self, other: "_Lost") -> "_Lost":
        return _Lost(min((each.file for each in (self, other) if each.file is not None), default=None))


def seal(root: Path, manifest: Manifest, *, folder: str, within: str, disk: Disk, merge: Merge) -> None:
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

    files: dict[str, FileRecord] = {}
    hashes: dict[Chunk, str] = {}

    def hash_own_part() -> _Lost:
        # Skip names which are invalid in a manifest: hf_zero did not write such files. Skip marks as well: ranks that are
        # faster have already stored their hashes in such files.
        below = (n for n in files_below(root) if n.startswith(within) and n != own_name and is_inside(n))
        names = [name for name in below if not PurePosixPath(name).name.startswith(MARK)]
        files.update(
            (name, unhashed((root / name).stat().st_size, most_chunks(name, manifest.world_size))) for name in names
        )
        for name, indices in by_file(share_of(files, disk.index, len(disk.ranks))).items():
            # The bytes must be on the disk before the manifest vouches for them: otherwise, a power cut could leave the
            # manifest without the values.
            sync(root / name)
            # Another library may have written and truncated a file. The hash of its bad content would be valid.
            if name.endswith(".safetensors") and not is_whole_safetensors(root / name):
                raise CheckpointError(f"{name} is shorter than its header states: it was not written completely")
            found = hashes_of(root / name, indices, files[name].chunk_bytes)
            hashes.update(((name, index), value) for index, value in found.items())
        if not disk.leads:
            _store_hashes(root, disk.rank, hashes)
        # Each rank looks for its own file, as each disk may have only some of the files. A process that converts a checkpoint
        # looks for all files.
        own_files = [row_file(r, manifest.world_size) for r in manifest.writers() if r % disk.world_size == disk.rank]
        return _Lost(next((file for file in own_files if f"{folder}/{file}" not in names), None))

    def write(lost: _Lost) -> None:
        if lost.file is not None:
            raise CheckpointError(f"{folder}/{lost.file} was written but no longer exists")
        if disk.leads:
            others = [_take_hashes(root, rank) for rank in disk.ranks if rank != disk.rank]
            records = _hashed(files, [hashes, *others])
            written = [row_file(rank, manifest.world_size) for rank in manifest.writers()]
            elsewhere = [file for file in written if f"{folder}/{file}" not in records]
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            replace(manifest, files=records, elsewhere=tuple(elsewhere), written_at=now).write(root / folder)
            # A folder's list of names is data, too: without a sync of the folder, a power cut loses synced files.
            # Sync after the manifest is written, as its name is in such a list as well.
            for each in [*(path for path in root.rglob("*") if path.is_dir()), root]:
                sync(each)

    try:
        # No rank writes the manifest before all ranks have hashed and synced their shares.
        lost = merged_on_all_ranks(merge, disk.rank, hash_own_part, doing=f"write {root} to disk", then=_THEN)
        # Compare the files with memory after the hashes are made. A bit that flips before the hash is found here, and a bit
        # that flips later fails the hash.
        done_on_all_ranks(merge, disk.rank, lambda: refuse_changed(manifest.written), doing=f"write {root}", then=_THEN)
        done_on_all_ranks(merge, disk.rank, lambda: write(lost), doing=f"write the manifest of {root}", then=_THEN)
    except BaseException:
        with suppress(OSError):
            _hashes_file(root, disk.rank).unlink()
        raise


# Only the writer of a disk's manifest needs the hashes of the other ranks of this disk. The hashes pass through the disk, because
# an exchange would send the hashes of all files to every rank.


def _hashes_file(root: Path, rank: int) -> Path:
    return root / f"{MARK}hashes-{rank}"


def _store_hashes(root: Path, rank: int, hashes: Mapping[Chunk, str]) -> None:
    replace_file(_hashes_file(root, rank), json.dumps([[*chunk, value] for chunk, value in hashes.items()]))


def _take_hashes(root: Path, rank: int) -> dict[Chunk, str]:
    """Reads and removes the hashes of another rank of this disk."""
    path = _hashes_file(root, rank)
    hashes = {(name, index): value for name, index, value in json.loads(path.read_text())}
    path.unlink()
    return hashes


def _hashed(files: Mapping[str, FileRecord], parts: Sequence[Mapping[Chunk, str]]) -> dict[str, FileRecord]:
    hashes = {chunk: value for part in parts for chunk, value in part.items()}
    due = {(name, index) for name, record in files.items() for index in range(record.chunks)}
    # With too few or too many hashes of a file, the manifest could never be read.
    if odd := sorted(due ^ hashes.keys()):
        raise CheckpointError(
            f"{odd[0][0]} changed while it was hashed. Make sure that no other process writes to this folder"
        )
    return {
        name: replace(record, xxh3=tuple(hashes[name, index] for index in range(record.chunks)))
        for name, record in sorted(files.items())
    }


_MOST_ROW_CHUNKS = 2**16
"""Limit of the checksums of all row files, while a file has more than `_FEWEST_ROW_CHUNKS`: 1 MiB of a manifest."""
_FEWEST_ROW_CHUNKS = 16


def most_chunks(name: str, world_size: int) -> int | None:
    """Returns the limit of the number of a file's checksums; None without one."""
    # Every rank reads the checksums of all files, and with error feedback the row files grow with the model times the ranks. Few
    # checksums suffice, because usually one rank verifies a whole row file. Each rank verifies many small parts of a weights
    # file.
    is_row_file = rank_of(PurePosixPath(name).name, world_size) is not None
    return max(_FEWEST_ROW_CHUNKS, _MOST_ROW_CHUNKS // world_size) if is_row_file else None


def commit(temporary: Path, final: Path, *, disk: Disk, merge: Merge) -> None:
    """Replaces the checkpoint `final` by a sealed `temporary`, with one rename. Collective.

    Raises:
        CheckpointError: on every rank. `final` is unchanged then.
    """

    def rename() -> None:
        if not disk.leads:
            return
        replaced = former_of(final)
        if os.path.lexists(final) and not final.is_dir():
            _rename_file(final)
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

    done_on_all_ranks(merge, disk.rank, rename, doing=f"commit {final}", then=_THEN)


def _rename_file(final: Path) -> None:
    """Renames a plain file with a checkpoint's name. It may be the user's, and a rename cannot replace a file by a folder."""
    renamed = final.with_name(f"{final.name}.file-{uuid.uuid4().hex[:8]}")
    final.rename(renamed)
    warnings.warn(
        f"hf_zero: {final} was a file, not a checkpoint folder. It was renamed to {renamed.name}.", stacklevel=2
    )


def put_back(finals: Iterable[Path], *, exchange: Exchange) -> None:
    """Undoes each `commit` to one of `finals` if its run was killed between the two renames. Collective."""

    def rename() -> None:
        for final in finals:
            # The old checkpoint is then the only complete one, and nothing reads `.old-`.
            if former_of(final).is_dir() and not final.exists():
                # Every rank tries, since hosts may have separate disks. Another rank of this disk may have been faster.
                with suppress(FileNotFoundError):
                    former_of(final).rename(final)

    then = "Nothing was trained. Make the folder writable, or remove `.old-` from the name yourself."
    on_all_ranks(exchange, rename, doing="restore a checkpoint that a killed run was replacing", then=then)


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
