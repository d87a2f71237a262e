"""Is this checkpoint good? Which is the newest that is?"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..comm.all_or_none import Exchange
from .folder.disks import Disk
from .foreign.find import is_foreign, open_foreign
from .format.errors import CheckpointError
from .format.files import Progress, faults_of, files_below, no_folder, untold
from .format.headers import is_whole_safetensors
from .format.json_files import read_mapping
from .format.links import entry_faults
from .format.manifest import Manifest
from .shares import own_chunks
from .structure import STATE_NAME, structure_faults

_NUMBERED = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint folder and what is wrong with it; good where there is nothing."""

    path: Path
    faults: tuple[str, ...]


def checkpoint_faults(
    checkpoint: Path, folder: str, *, rank: int = 0, world_size: int = 1, on_progress: Progress = untold
) -> list[str]:
    """What this rank's share of a checkpoint's files has wrong, in words. Every rank reads a part of them.

    Args:
        folder: below the checkpoint, in which the manifest lies. A checkpoint without such a folder, of plain Trainer,
            DeepSpeed or FSDP, is checked for whole safetensors files, for all ranks' files, and for a readable trainer state.
        on_progress: called with the bytes of this rank's share that have been read, and all of them.
    """
    try:
        return _faults(checkpoint, folder, rank=rank, world_size=world_size, on_progress=on_progress)
    except CheckpointError as error:
        return [in_words(error)]
    except OSError as error:
        return [f"it cannot be read ({error})"]


def in_words(error: CheckpointError) -> str:
    """An error as a fault: without whose it is, and without a full stop."""
    return str(error).removeprefix("hf_zero: ").rstrip(".")


def _faults(checkpoint: Path, folder: str, *, rank: int, world_size: int, on_progress: Progress) -> list[str]:
    if not checkpoint.is_dir():
        return [no_folder(checkpoint)]
    faults = entry_faults(checkpoint)
    if faults:
        # What these lead to is not looked at.
        return faults
    if not (checkpoint / folder).is_dir():
        return _faults_of_plain(checkpoint)
    manifest = Manifest.read(checkpoint / folder)
    chunks = own_chunks(checkpoint, manifest, rank=rank, world_size=world_size)
    faults = list(dict.fromkeys(faults_of(checkpoint, manifest.files, chunks, on_progress)))
    # Of files that are not as they were written, no more is asked.
    return faults if faults or rank else structure_faults(checkpoint, folder, manifest)


def newest_first(output_dir: Path) -> Iterator[Path]:
    """The folders `checkpoint-N` of a run, the highest N first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.is_dir() and _NUMBERED.match(path.name)]
    yield from sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The N of a folder `checkpoint-N`."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def find_good(
    output_dir: Path,
    folder: str,
    *,
    disk: Disk,
    exchange: Exchange,
    further_faults: Callable[[Path], list[str]] = lambda checkpoint: [],
    on_progress: Progress = untold,
) -> tuple[Path | None, list[Candidate]]:
    """The newest good checkpoint, and those passed over with their faults. Collective: the ranks share the reading.

    Where ranks have disks of their own, it is good on each.

    Args:
        further_faults: what else is wrong with a checkpoint whose files are good.
        on_progress: called with the bytes of a checkpoint that this rank has read, and all that it reads of it.
    """
    passed: list[Candidate] = []
    names = {path.name for theirs in exchange(list(newest_first(output_dir))) for path in theirs}
    for path in sorted((output_dir / name for name in names), key=step_of, reverse=True):
        mine = checkpoint_faults(path, folder, rank=disk.place, world_size=len(disk.ranks), on_progress=on_progress)
        reports = exchange(mine or further_faults(path))
        faults = tuple(dict.fromkeys(fault for report in reports for fault in report))
        if not faults:
            return path, passed
        passed.append(Candidate(path=path, faults=faults))
    return None, passed


def _faults_of_plain(checkpoint: Path) -> list[str]:
    faults = []
    names = files_below(checkpoint)
    if is_foreign(checkpoint):
        try:
            open_foreign(checkpoint)
        except CheckpointError as error:
            faults.append(in_words(error))
    elif not any(name.endswith((".safetensors", ".bin")) for name in names):
        faults.append("it holds no model weights")
    if not (checkpoint / STATE_NAME).is_file():
        faults.append(f"{STATE_NAME} is missing")
    else:
        try:
            read_mapping(checkpoint / STATE_NAME)
        except CheckpointError:
            faults.append(f"{STATE_NAME} is cut off or damaged")
    faults.extend(
        f"{name} is cut off or damaged"
        for name in names
        if name.endswith(".safetensors") and not is_whole_safetensors(checkpoint / name)
    )
    return faults
