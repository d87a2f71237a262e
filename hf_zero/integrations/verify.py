"""Verifies checkpoints: every byte by its checksum, every file by its entry."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..checkpoint.commit import Disk
from ..checkpoint.files import (
    CHUNK_BYTES,
    CheckpointError,
    Chunk,
    Progress,
    chunks_in,
    entry_faults,
    faults_of,
    files_below,
    is_whole_safetensors,
    no_folder,
    read_mapping,
    tensors_in,
    untold,
)
from ..checkpoint.manifest import WEIGHTS, Manifest, SavedRow
from ..checkpoint.structure import STATE_NAME, is_foreign, structure_faults
from ..comm.all_or_none import Exchange
from ..extras import MissingExtraError, extra

# ---- The share of a checkpoint's files that a rank verifies: if possible, the part that it will load ----
#
# [Note: whoever loads it checks it] A resume reads a checkpoint twice: to see that it is good, before anything else, and to
# load it. Ranks of one host share what the system has read, ranks of several do not. So a rank's file in `zero/` is looked
# at by the rank that stands where its writer stood, and a part of a weights file by the rank that stands where the owner of
# that parameter's state stood. On as many ranks and at the same stage as before, these are the bytes that a rank loads.
# Otherwise it is a guess, which costs reading and nothing else: every byte is some rank's in any case.


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Bytes of a file, and where they stand among all that the ranks have written, from 0 to 1."""

    begin: int
    end: int
    first: float
    last: float

    def position(self, at: int) -> float:
        return self.first + (self.last - self.first) * (at - self.begin) / max(1, self.end - self.begin)


def own_chunks(root: Path, manifest: Manifest, *, rank: int, world_size: int) -> list[Chunk]:
    """The chunks of a checkpoint's recorded files that one of `world_size` ranks looks at.

    Several look at a chunk of which each will load a part, and all at the headers of safetensors files.

    Args:
        root: the checkpoint.
    """
    owned = _owned_runs(manifest)
    chunks = []
    for name, whole in _whole_runs(manifest).items():
        tensors = tensors_in(root / name) if name.endswith(".safetensors") else {}
        runs = sorted(
            (
                _Run(begin=begin + run.begin * itemsize, end=begin + run.end * itemsize, first=run.first, last=run.last)
                for tensor, (begin, itemsize) in tensors.items()
                for run in owned.get(tensor, ())
            ),
            key=lambda run: run.begin,
        )
        begins, ends = [run.begin for run in runs], [run.end for run in runs]
        header_bytes = min((begin for begin, _ in tensors.values()), default=0)
        for index in range(chunks_in(whole.end)):
            begin, end = index * CHUNK_BYTES, min(whole.end, (index + 1) * CHUNK_BYTES)
            inside = runs[bisect_right(ends, begin) : bisect_left(begins, end)] or [whole]
            positions = [run.position((max(begin, run.begin) + min(end, run.end)) // 2) for run in inside]
            readers = {min(world_size - 1, int(position * world_size)) for position in positions}
            if rank in readers or begin < header_bytes:
                chunks.append((name, index))
    return chunks


def _whole_runs(manifest: Manifest) -> dict[str, _Run]:
    """Returns each file as one run: at a writer's place for a rank's rows, else by its bytes."""
    writers = sorted({row.file for row in manifest.rows})
    runs: dict[str, _Run] = {}
    others = {n: r.size for n, r in sorted(manifest.files.items()) if PurePosixPath(n).name not in writers}
    total, before = max(1, sum(others.values())), 0
    for name, record in sorted(manifest.files.items()):
        if name in others:
            first, last = before / total, (before + record.size) / total
            before += record.size
        else:
            number = writers.index(PurePosixPath(name).name)
            first, last = number / len(writers), (number + 1) / len(writers)
        runs[name] = _Run(begin=0, end=record.size, first=first, last=last)
    return runs


def _owned_runs(manifest: Manifest) -> dict[str, list[_Run]]:
    """Parameter → runs of its elements, each where the rank stands that had their state."""
    writers = sorted({row.file for row in manifest.rows})
    numels = dict.fromkeys(writers, 0)
    rows = list(_one_kind_of_each(manifest))
    for row in rows:
        numels[row.file] += row.interval.numel
    before = dict.fromkeys(writers, 0)
    runs: dict[str, list[_Run]] = {}
    for row in rows:
        start, number = before[row.file], writers.index(row.file)
        before[row.file] += row.interval.numel
        first, last = ((number + at / numels[row.file]) / len(writers) for at in (start, before[row.file]))
        runs.setdefault(row.name, []).append(
            _Run(begin=row.interval.start, end=row.interval.stop, first=first, last=last)
        )
    return runs


def _one_kind_of_each(manifest: Manifest) -> Iterator[SavedRow]:
    """Rows of a state that has one value an element of its parameter."""
    kind_of = {
        name: next((kind for kind in kinds if kind not in manifest.own_shapes.get(name, {})), None)
        for name, kinds in manifest.kinds.items()
    }
    for row in manifest.rows:
        if row.kind == kind_of.get(row.name, WEIGHTS) and row.interval.numel:
            yield row


# ---- Is this checkpoint good? Which is the newest that is? ----

_NUMBERED = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint folder and its faults; good without any."""

    path: Path
    faults: tuple[str, ...]


def checkpoint_faults(
    checkpoint: Path, folder: str, *, rank: int = 0, world_size: int = 1, on_progress: Progress = untold
) -> list[str]:
    """Lists the faults of this rank's share of a checkpoint's files. Every rank reads a part.

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


def in_words(error: Exception) -> str:
    """Formats an error as a fault: without a prefix, and without a full stop."""
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
        mine = checkpoint_faults(path, folder, rank=disk.index, world_size=len(disk.ranks), on_progress=on_progress)
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
        except CheckpointError:
            faults.append(f"{STATE_NAME} is cut off or damaged")
    faults.extend(
        f"{name} is cut off or damaged"
        for name in names
        if name.endswith(".safetensors") and not is_whole_safetensors(checkpoint / name)
    )
    return faults
