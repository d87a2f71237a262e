"""Verifies a checkpoint, and finds the newest good one."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..comm.all_or_none import Exchange
from ..extras import MissingExtraError, extra
from ..layout.intervals import Interval
from .disks import Disk
from .faults import CheckpointError, shown
from .files import entry_faults, files_below, is_inside, no_folder
from .hashes import Chunk, FileRecord, Progress, by_file, hashes_of, untold
from .json_files import read_mapping
from .manifest import (
    MANIFEST_NAME,
    Manifest,
    SaveIdentity,
)
from .origin import is_foreign
from .own_chunks import own_chunks
from .run_log import STATE_NAME
from .safetensors_headers import is_whole_safetensors, spans_in
from .structure import added_files, in_words, may_be_edited, structure_faults, unreadable_files

_MOST_NAMES = 3
"""How many tensors the fault of a file names."""

_NUMBERED = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint folder and its faults. The checkpoint is good if there are none."""

    path: Path
    faults: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of checking a checkpoint folder, by one rank or by all ranks.

    Attributes:
        faults: in words; the checkpoint is good if there are none.
        edits: in words, the changed files that contain no tensor of the model or optimizer. A resume uses their present
            content and warns.
        identity: of the save that wrote the folder; None if hf_zero did not write the folder, or if there are faults.
    """

    faults: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    identity: SaveIdentity | None = None

    def warning(self, checkpoint: Path) -> str:
        """Words a warning with the edits and the command to accept them."""
        return (
            f"hf_zero: {checkpoint} was changed after it was written: {shown('; '.join(self.edits), 1000)}. Its files are read "
            f"in their current state. `hf-zero verify --accept {checkpoint}` accepts the edits."
        )


def findings_in(
    checkpoint: Path, folder: str, *, rank: int = 0, world_size: int = 1, on_progress: Progress = untold
) -> Findings:
    """Checks this rank's share of a checkpoint's files. The ranks divide the reading.

    Args:
        folder: the subfolder of the checkpoint that contains the manifest. In a checkpoint of plain Trainer, DeepSpeed or FSDP,
            which has no such folder, the safetensors files have to be complete, all ranks' files present, and the trainer
            state readable.
        on_progress: called with the bytes of this rank's share that have been read, and the bytes of the whole share.
    """
    try:
        return _findings(checkpoint, folder, rank=rank, world_size=world_size, on_progress=on_progress)
    except CheckpointError as error:
        return Findings(faults=(in_words(error),))
    except OSError as error:
        return Findings(faults=(f"it cannot be read ({error})",))


def checkpoint_faults(checkpoint: Path, folder: str, **share: Any) -> list[str]:
    """Lists the faults and edits of `findings_in`, which takes the same arguments."""
    found = findings_in(checkpoint, folder, **share)
    return [*found.faults, *found.edits]


def agreed(exchange: Exchange, mine: Findings) -> Findings:
    """Merges the findings of all ranks. Every rank gets the same result, so all make the same decision. Collective."""
    everyones = exchange(mine)
    faults = dict.fromkeys(fault for theirs in everyones for fault in theirs.faults)
    if faults:
        return Findings(faults=tuple(faults))
    # Each rank has checked its own disk. Parts of different saves can each be good, so compare the saves.
    first = everyones[0].identity
    for rank, theirs in enumerate(everyones):
        if theirs.identity != first:
            here, there = (identity or "no hf_zero save" for identity in (first, theirs.identity))
            return Findings(
                faults=(f"the ranks have parts of different saves: rank 0 has {here}, rank {rank} has {there}",)
            )
    edits = dict.fromkeys(edit for theirs in everyones for edit in theirs.edits)
    return Findings(edits=tuple(edits), identity=first)


def _findings(checkpoint: Path, folder: str, *, rank: int, world_size: int, on_progress: Progress) -> Findings:
    if not checkpoint.is_dir():
        return Findings(faults=(no_folder(checkpoint),))
    faults = entry_faults(checkpoint)
    if faults:
        # Do not follow these entries: a link may lead out of the folder, and reading a pipe may never end.
        return Findings(faults=tuple(faults))
    if not (checkpoint / folder).is_dir():
        return Findings(faults=tuple(_faults_of_plain(checkpoint)))
    manifest = Manifest.read(checkpoint / folder)
    chunks = own_chunks(checkpoint, manifest, rank=rank, world_size=world_size)
    found = faults_of(checkpoint, manifest.files, chunks, on_progress)
    # Trainer cannot resume without its state, so a missing one is a fault. An edited one is an edit.
    of_edits = {n for n, _ in found if may_be_edited(n, folder) and (n != STATE_NAME or (checkpoint / n).is_file())}
    edits = [fault for name, fault in found if name in of_edits]
    faults = list(dict.fromkeys(fault for name, fault in found if name not in of_edits))
    # Check the structure only if the bytes are good: a changed file would be reported twice.
    if not faults:
        faults = structure_faults(checkpoint, folder, manifest, rank=rank, world_size=world_size)
        if not rank:
            added = added_files(checkpoint, folder, manifest)
            edits += [f"{name} is not among the files listed in {MANIFEST_NAME}" for name in added]
            faults = faults or unreadable_files(checkpoint)
        # If an edit contradicts other files, the faults already name the contradiction; report only these.
        edits = [] if faults else edits
    return Findings(faults=tuple(faults), edits=tuple(dict.fromkeys(edits)), identity=manifest.identity)


def newest_first(output_dir: Path) -> Iterator[Path]:
    """Yields the folders `checkpoint-N` of a run, the highest N first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.is_dir() and _NUMBERED.match(path.name)]
    yield from sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Returns the N of a folder `checkpoint-N`."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def find_good(
    output_dir: Path,
    folder: str,
    *,
    disk: Disk,
    exchange: Exchange,
    further_faults: Callable[[Path], list[str]] = lambda checkpoint: [],
    on_edits: Callable[[str], None] = lambda warning: None,
    on_progress: Progress = untold,
) -> tuple[Path | None, list[Candidate]]:
    """Returns the newest good checkpoint, and the newer ones with their faults. Collective: the ranks divide the reading.

    If ranks have separate disks, the checkpoint is good on each of them.

    Args:
        further_faults: lists further faults of a checkpoint whose files are good.
        on_edits: called on each rank with a warning if files of the returned checkpoint have been edited.
        on_progress: called with the bytes of a checkpoint that this rank has read, and the bytes that it will read in all.
    """
    passed: list[Candidate] = []
    # Unite the names of all ranks. Each candidate costs one exchange; ranks with different folders would otherwise answer
    # for different candidates.
    names = {path.name for theirs in exchange(list(newest_first(output_dir))) for path in theirs}
    for path in sorted((output_dir / name for name in names), key=step_of, reverse=True):
        mine = findings_in(path, folder, rank=disk.index, world_size=len(disk.ranks), on_progress=on_progress)
        if not mine.faults:
            mine = replace(mine, faults=tuple(further_faults(path)))
        found = agreed(exchange, mine)
        if not found.faults:
            if found.edits:
                on_edits(found.warning(path))
            return path, passed
        passed.append(Candidate(path=path, faults=found.faults))
    return None, passed


def faults_of(
    folder: Path, records: Mapping[str, FileRecord], chunks: Sequence[Chunk], on_progress: Progress = untold
) -> list[tuple[str, str]]:
    """Lists (name, fault in words) for these chunks of recorded files: missing files, wrong sizes, changed content."""
    total = sum(records[name].bytes_of(index) for name, index in chunks)
    done = 0

    def on_read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(min(done, total), total)

    return [
        (name, fault)
        for name, indices in by_file(chunks).items()
        for fault in _faults_of_file(folder, name, records[name], indices, on_read)
    ]


def _faults_of_file(
    folder: Path, name: str, record: FileRecord, indices: Sequence[int], on_read: Callable[[int], None]
) -> list[str]:
    path = folder / name
    # Check in order of cost, and the name first: with `..` in a name, any file of the user's would be read.
    if not is_inside(name):
        return [f"the manifest names {name!r}, which is not inside the folder"]
    if not path.is_file():
        return [f"{name} is missing"]
    if path.stat().st_size != record.size:
        return [f"{name} has {path.stat().st_size} bytes instead of {record.size}"]
    try:
        found = hashes_of(path, indices, record.chunk_bytes, on_read)
    except OSError as error:
        return [f"{name} cannot be read ({error})"]
    bad = [index for index, value in found.items() if value != record.xxh3[index]]
    if not bad:
        return []
    return [
        f"{name} differs from the contents that were written ({len(bad)} damaged pieces of {record.chunk_bytes} bytes, the "
        f"first at {bad[0] * record.chunk_bytes}{_named_tensors(path, record, bad)})"
    ]


def _named_tensors(path: Path, record: FileRecord, indices: Sequence[int]) -> str:
    """Names the tensors of a safetensors file in these chunks, for an error."""
    chunks = [Interval(index * record.chunk_bytes, (index + 1) * record.chunk_bytes) for index in indices]
    spans = (spans_in(path) or {}) if path.suffix == ".safetensors" else {}
    names = [n for n, span in spans.items() if any(Interval(span.begin, span.end).intersect(chunk) for chunk in chunks)]
    further = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f", in {', '.join(shown(name) for name in names[:_MOST_NAMES])}{further}" if names else ""


def _faults_of_plain(checkpoint: Path) -> list[str]:
    faults = []
    names = files_below(checkpoint)
    if is_foreign(checkpoint):
        try:
            extra("foreign", "open_foreign")(checkpoint)
        except (CheckpointError, MissingExtraError) as error:
            faults.append(in_words(error))
    elif not any(name.endswith((".safetensors", ".bin")) for name in names):
        faults.append("it holds no model weights")
    if not (checkpoint / STATE_NAME).is_file():
        faults.append(f"{STATE_NAME} is missing")
    else:
        try:
            read_mapping(checkpoint / STATE_NAME)
        except CheckpointError as error:
            faults.append(in_words(error))
    faults.extend(
        f"{name} is cut off or damaged"
        for name in names
        if name.endswith(".safetensors") and not is_whole_safetensors(checkpoint / name)
    )
    return faults
