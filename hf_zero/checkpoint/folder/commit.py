"""A checkpoint folder is there whole or not at all.

Everything is written to `.tmp-NAME` beside the final folder; there each file is hashed and put on the disk, the manifest
that lists them all is written last, and one rename makes it the checkpoint.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from ...comm.all_or_none import Exchange
from ...device import in_units
from ..format.files import Chunk, FileRecord, by_file, files_below, hashes_of, is_inside, share_of, sync
from ..format.headers import is_whole_safetensors
from ..format.manifest import MANIFEST_NAME, CheckpointError, Manifest
from .disks import MARK, Disk
from .on_all_ranks import on_all_ranks

_THEN = (
    "The former checkpoints are as they were, and training state is unharmed. Free space or make the folder writable."
)


def temporary_of(final: Path) -> Path:
    """Where the checkpoint `final` is written before it is committed."""
    return final.parent / f".tmp-{final.name}"


def begin(final: Path, *, needed_bytes: int, disk: Disk, exchange: Exchange) -> Path:
    """Makes an empty temporary folder for the checkpoint `final`; returns it. Collective.

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
        free = shutil.disk_usage(final.parent).free
        if free < needed_bytes:
            raise CheckpointError(
                f"{final} needs about {in_units(needed_bytes)} and {final.parent} has {in_units(free)} free: "
                f"{in_units(needed_bytes - free)} too little"
            )
        _take_away(temporary)
        temporary.mkdir()

    on_all_ranks(exchange, make, doing=f"begin {final}", then=_THEN)
    return temporary


def seal(root: Path, manifest: Manifest, *, folder: str, within: str, disk: Disk, exchange: Exchange) -> None:
    """Puts the files of a checkpoint on the disk and writes, last, the manifest that vouches for them. Collective.

    Args:
        root: the checkpoint.
        manifest: without its files, which are recorded here; the ranks of a disk share the hashing.
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
        own = share_of({name: (root / name).stat().st_size for name in names}, disk.place, len(disk.ranks))
        for name, indices in by_file(own).items():
            sync(root / name)
            if name.endswith(".safetensors") and not is_whole_safetensors(root / name):
                raise CheckpointError(f"{name} is shorter than its header says: it was cut off while it was written")
            hashes.update(((name, index), value) for index, value in hashes_of(root / name, indices).items())
        return hashes

    parts = on_all_ranks(exchange, hash_own_part, doing=f"put {root} on the disk", then=_THEN)

    def write() -> None:
        there = {name for part in parts for name, _ in part}
        lost = sorted({f"{folder}/{row.file}" for row in manifest.rows} - there)
        if lost:
            raise CheckpointError(f"{lost[0]} has been written and is gone")
        if disk.leads:
            files = _records(root, [parts[rank] for rank in disk.ranks])
            elsewhere = sorted({row.file for row in manifest.rows if f"{folder}/{row.file}" not in files})
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            replace(manifest, files=files, elsewhere=tuple(elsewhere), written_at=now).write(root / folder)
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
        replaced = final.parent / f".old-{final.name}"
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
        sync(final.parent)
        _take_away(replaced)

    on_all_ranks(exchange, rename, doing=f"commit {final}", then=_THEN)


def abandon(temporary: Path, *, disk: Disk) -> None:
    """Takes away what a failed save has left."""
    if disk.leads:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(final: Path) -> None:
    """Takes a checkpoint away; a run that is killed meanwhile leaves no half of it under its name."""
    temporary = temporary_of(final)
    _take_away(temporary)
    final.rename(temporary)
    _take_away(temporary)


def _take_away(folder: Path) -> None:
    """Removes a folder, if there is one. Of a link, which somebody has put in its place, only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def clear_marks(folder: Path) -> None:
    """Takes away the marks of runs that were killed while they looked at their disk. Only where no other run is in the folder."""
    for left in folder.glob(f"{MARK}*"):
        left.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Takes away what killed runs have left in a folder of checkpoints: unfinished ones, and ones replaced half-way.

    A `.old-NAME` whose NAME is missing was renamed and not yet replaced: it is put back.
    """
    for old in folder.glob(".old-checkpoint-*"):
        final = folder / old.name.removeprefix(".old-")
        if final.exists():
            _take_away(old)
        else:
            old.rename(final)
    for temporary in folder.glob(".tmp-checkpoint-*"):
        _take_away(temporary)
