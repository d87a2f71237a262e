"""Checks whether the parts of a checkpoint, model or run folder agree and are undamaged."""

import fnmatch
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any

from ..comm.all_or_none import Exchange
from ..extras import MissingExtraError, extra
from ..layout.boxes import Box
from ..layout.intervals import Interval, doubly_covered, joined_intervals, uncovered
from .commit import Disk
from .files import (
    CHUNK_BYTES,
    CheckpointError,
    Chunk,
    FileRecord,
    Progress,
    TensorSpan,
    chunks_in,
    entry_faults,
    faults_of,
    files_below,
    hashes_of,
    is_whole_safetensors,
    no_folder,
    read_mapping,
    save_in,
    shown,
    spans_in,
    sync,
    tensors_in,
    untold,
)
from .manifest import (
    MANIFEST_NAME,
    WEIGHTS,
    Manifest,
    SavedRow,
    SavedRows,
    SaveIdentity,
    named_save,
    rank_of,
    row_file,
)
from .run_log import POSITION_NAME, STATE_NAME, read_history, read_position, read_run

LOG_NAME = "zero_log.jsonl"
PAGE_NAME = "zero_report.html"
"""The log of a run, and the HTML page that is made from the log."""

_READ_BACK = (
    "model.safetensors",
    "model_[0-9].safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.*",
    "pytorch_model.bin",
    "optimizer*.bin",
    "optimizer.pt",
    "scheduler*.bin",
    "scheduler.pt",
    "scaler.pt",
    "sampler*.bin",
    "rng_state*.pth",
    "random_states_*.pkl",
    "custom_checkpoint_*.pkl",
    STATE_NAME,
    POSITION_NAME,
)
"""Files outside the manifest's folder that a resume or `from_pretrained` would read."""


_SMALL_PICKLES = (
    "scheduler.pt",
    "scheduler*.bin",
    "scaler.pt",
    "sampler*.bin",
    "rng_state*.pth",
    "random_states_*.pkl",
    "training_args.bin",
)
"""Pickles of Trainer and accelerate that hold no tensor of the model or the optimizer."""

_TENSOR_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".npz", ".distcp", ".index.json")
"""Name endings of files that may hold such tensors, or an index of them."""


def may_be_edited(name: str, folder: str) -> bool:
    """Whether a resume accepts this checkpoint file after a person has edited or removed the file, as plain Trainer does.

    Args:
        folder: the subfolder of the checkpoint that contains the manifest.
    """
    first, _, rest = name.partition("/")
    if rest and first.startswith(folder):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _SMALL_PICKLES) or not name.endswith(_TENSOR_SUFFIXES)


def structure_faults(
    checkpoint: Path, folder: str, manifest: Manifest, *, rank: int = 0, world_size: int = 1
) -> list[str]:
    """Describes each contradiction between the manifest and the files of this rank's share. Checksums are not compared here.

    The row files are divided among the ranks, since their headers have an entry for each row. Rank 0 checks everything else.

    Args:
        folder: the subfolder of the checkpoint that contains the manifest. The folders of further models (`folder_1`, ...)
            are checked as well.
    """

    def of_rows(zero: Path, its: Manifest) -> list[str]:
        # Check the files only if the manifest's rows are consistent: otherwise each fault would be reported twice.
        return row_faults(its) or list(_row_file_faults(zero, its, rank, world_size))

    faults = of_rows(checkpoint / folder, manifest)
    for other in sorted(path for path in checkpoint.glob(f"{folder}_*") if path.is_dir()):
        try:
            further = Manifest.read(other)
        except CheckpointError as error:
            faults.append(in_words(error))
            continue
        if further.save != manifest.save:
            faults.append(f"{other.name} is of {named_save(further.save)}, and {folder} of {manifest.identity}")
        faults += of_rows(other, further)
    if rank:
        return faults
    return [
        *faults,
        *_strange_files(checkpoint, folder, manifest),
        *_step_faults(checkpoint, manifest),
    ]


def described_faults(folder: Path) -> list[str]:
    """Lists the faults of the JSON files next to a model's weights, which cards, tables and resumes are made from."""
    faults = []
    for read in (read_run, read_history, read_position):
        try:
            read(folder)
        except CheckpointError as error:
            faults.append(in_words(error))
    # Without a trainer state, `read_history` reads the run's record again and finds the same fault, so drop duplicates.
    return list(dict.fromkeys(faults))


def row_faults(manifest: Manifest) -> list[str]:
    """Lists the parameter states with an element in no row, or in several."""
    rows: dict[tuple[str, str], dict[Box, list[Interval]]] = {}
    for saved in manifest.rows:
        of_box = rows.setdefault((saved.kind, saved.name), {})
        of_box.setdefault(manifest.box_of(saved), []).append(saved.cuts.whole)
    wanted = [(kind, name) for name, kinds in manifest.kinds.items() for kind in kinds]
    wanted += [(WEIGHTS, name) for name in manifest.weights]
    faults = []
    for kind, name in wanted:
        whole_numel = math.prod(manifest.whole_shape(kind, name) or ())
        parts = rows.get((kind, name), {})
        # Boxes cover each element once if no two overlap and their sizes add up to the whole, so compare sizes and pairs.
        once = sum(box.numel for box in parts) == whole_numel and not any(
            one.shares_with(other) for one, other in combinations(parts, 2)
        )
        if not once or any(
            uncovered(Interval(0, box.numel), held) or doubly_covered(held) for box, held in parts.items()
        ):
            faults.append(f"{kind} of {name} is not there once for each element")
    return faults


def _strange_files(checkpoint: Path, folder: str, manifest: Manifest) -> Iterator[str]:
    """Yields truncated files, and files without a checksum which a resume would read."""
    from_elsewhere = {f"{folder}/{file}" for file in manifest.elsewhere}
    for name in files_below(checkpoint):
        if name in manifest.files:
            if name.endswith(".safetensors") and not is_whole_safetensors(checkpoint / name):
                yield f"{name} is cut off or damaged"
        elif name not in from_elsewhere and _is_read_back(name, folder) and not may_be_edited(name, folder):
            yield f"{name} is not among the files that {MANIFEST_NAME} vouches for"


def _added(checkpoint: Path, folder: str, manifest: Manifest) -> list[str]:
    """Lists the tensor-free files which a resume would read although the manifest does not list them."""
    return [
        name
        for name in files_below(checkpoint)
        if name not in manifest.files and _is_read_back(name, folder) and may_be_edited(name, folder)
    ]


def _unreadable(checkpoint: Path) -> list[str]:
    """Lists the faults of config files. A person may have edited them, and a model's loader parses them."""
    faults = []
    for path in (checkpoint / name for name in ("config.json", "adapter_config.json")):
        try:
            if path.is_file():
                read_mapping(path)
        except CheckpointError as error:
            faults.append(in_words(error))
    return faults


def accept_edits(checkpoint: Path, folder: str) -> None:
    """Updates the manifest's records of all editable files to the files' present content. All other files must be verified."""
    manifest = Manifest.read(checkpoint / folder)
    files = {name: record for name, record in manifest.files.items() if not may_be_edited(name, folder)}
    for name in [*(n for n in manifest.files if n not in files), *_added(checkpoint, folder, manifest)]:
        path = checkpoint / name
        if path.is_file():
            sync(path)
            size = path.stat().st_size
            files[name] = FileRecord(size=size, xxh3=tuple(hashes_of(path, range(chunks_in(size))).values()))
    manifest.with_files(dict(sorted(files.items()))).write(checkpoint / folder)
    sync(checkpoint / folder)


def _row_file_faults(folder: Path, manifest: Manifest, rank: int, world_size: int) -> Iterator[str]:
    """Yields the rows whose file disagrees with the manifest, for this rank's share of the files. Reads headers only."""
    for writer in manifest.writers()[rank::world_size]:
        file = row_file(writer, manifest.world_size)
        spans = spans_in(folder / file)
        if spans is not None:
            save = save_in(folder / file)
            if save != manifest.save:
                yield f"{folder.name}/{file} is of {named_save(save)}, and the manifest of {manifest.identity}"
            in_file = [saved.row(saved.ranks.index(writer)) for saved in manifest.rows if writer in saved.ranks]
            yield from _faults_of_rows(f"{folder.name}/{file}", in_file, spans, manifest)
        elif not (folder / file).exists() and file not in manifest.elsewhere:
            yield f"{folder.name}/{file} is missing"


def _faults_of_rows(
    file: str, rows: list[SavedRow], spans: Mapping[str, TensorSpan], manifest: Manifest
) -> Iterator[str]:
    seen: set[str] = set()
    for row in rows:
        span, numel = spans.get(row.key), row.interval.numel
        weight = manifest.weights.get(row.name) if row.kind == WEIGHTS else None
        if span is None:
            yield f"{file} has no {row.key}"
        elif row.key in seen:
            yield f"{row.kind} of {row.name} is under {row.key} in {file}, which is another row's"
        elif span.shape != (numel,):
            yield f"{row.key} has shape {span.shape} in {file}, and {numel} elements are due"
        elif span.dtype != row.dtype:
            yield f"{row.key} has dtype {span.dtype} in {file}, and {row.dtype} is due"
        elif weight is not None and weight.dtype != row.dtype:
            yield f"{row.key} has dtype {row.dtype} in {file}, and the model's {row.name} is {weight.dtype}"
        seen.add(row.key)
    for key in spans.keys() - seen:
        yield f"{file} has {key}, which is no row"


def _is_read_back(name: str, folder: str) -> bool:
    parts = PurePosixPath(name).parts
    if len(parts) > 1:
        return len(parts) == 2 and parts[0] == folder and parts[1].endswith(".safetensors")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _READ_BACK)


def _step_faults(checkpoint: Path, manifest: Manifest) -> list[str]:
    if STATE_NAME not in manifest.files or not (checkpoint / STATE_NAME).is_file():
        return []
    try:
        step = read_mapping(checkpoint / STATE_NAME).get("global_step")
    except CheckpointError as error:
        return [in_words(error)]
    if type(step) is not int or step < 0:
        return [f"{STATE_NAME} has the global_step {shown(step)}, which is no number of steps"]
    if manifest.step is not None and step != manifest.step:
        return [f"{STATE_NAME} is of step {shown(step)}, and the checkpoint of {manifest.step}"]
    return []


# ---- Which library wrote a checkpoint, by the names of its files ----

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
METADATA_NAME = ".metadata"
"""Names in folders of FSDP and torch.distributed.checkpoint."""

OPTIMIZER_FILE = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
"""DeepSpeed's optimizer files, one per rank."""

_WEIGHT_SHARD = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")


def is_foreign(folder: Path) -> bool:
    """Whether a folder looks like a DeepSpeed or FSDP checkpoint. `open_foreign` checks whether the checkpoint is good."""
    if not folder.is_dir():
        return False
    return is_dcp(folder) or (folder / "pytorch_model_fsdp.bin").is_file() or _is_deepspeed(folder)


def is_dcp(folder: Path) -> bool:
    """Whether a folder looks like an FSDP or torch.distributed.checkpoint checkpoint, or has one weight file per rank."""
    named = (folder / MODEL_FOLDER).is_dir() or (folder / OPTIMIZER_FOLDER).is_dir()
    return named or (folder / METADATA_NAME).is_file() or bool(weight_shards_of(folder))


def _is_deepspeed(folder: Path) -> bool:
    # `latest` may name a missing folder; `open_foreign` raises the error for this.
    return (folder / "latest").is_file() or any(OPTIMIZER_FILE.match(path.name) for path in folder.iterdir())


def weight_shards_of(folder: Path) -> list[Path]:
    """Lists the files of `save_pretrained(..., distributed_checkpoint=True)`, one per rank; empty without the folder."""
    return sorted(path for path in folder.glob("*.safetensors") if _WEIGHT_SHARD.fullmatch(path.name))


# ---- Which chunks of a checkpoint a rank verifies: if possible, the ones the rank will load ----
#
# [Note: whoever loads it checks it] A resume reads a checkpoint twice: first to verify, then to load. Ranks of one host share
# the system's page cache, ranks of different hosts do not. So each rank verifies the bytes it will probably load: a file in
# `zero/` is verified by the rank at the relative position of the file's writer, and a part of a weights file by the rank at
# the relative position of the owner of the parameter's state. With the same number of ranks and the same stage as before,
# the rank loads exactly these bytes. Otherwise a wrong guess only costs a second read: some rank still verifies each byte.


def own_chunks(root: Path, manifest: Manifest, *, rank: int, world_size: int) -> list[Chunk]:
    """Returns the chunks of a checkpoint's recorded files for one of `world_size` ranks to verify.

    If several ranks will load parts of a chunk, each of them verifies it. All ranks verify the headers of safetensors files.
    The time depends on the number of parameters and on this rank's chunks, not on the number of ranks that wrote the
    checkpoint.

    Args:
        root: the checkpoint folder.
    """
    writers = sorted({number for name in manifest.files if (number := _writer(name, manifest)) is not None})
    owned = _owned_rows(manifest, writers)
    chunks = []
    for name, whole in _whole_files(manifest, writers).items():
        tensors = tensors_in(root / name) if name.endswith(".safetensors") else {}
        runs = [
            _Run(begin=begin, itemsize=itemsize, rows=rows, place=place, writers=writers)
            for tensor, (begin, itemsize) in tensors.items()
            for rows, place in owned.get(tensor, ())
        ]
        # Every rank checks the headers: with a damaged header, a rank would load bytes outside of its verified chunks.
        header_bytes = min((begin for begin, _ in tensors.values()), default=0)
        indices = set(range(min(chunks_in(whole.nbytes), -(-header_bytes // CHUNK_BYTES))))
        for run in runs:
            indices.update(run.chunks_of(rank, world_size, whole.nbytes))
        for gap in _chunks_between([run.bytes for run in runs], whole.nbytes):
            indices.update(whole.chunks_of(gap, rank, world_size))
        chunks += [(name, index) for index in sorted(indices)]
    return chunks


def _writer(name: str, manifest: Manifest) -> int | None:
    """Returns the rank whose rows a recorded file holds. Further models' files have the same names, in other folders."""
    return rank_of(PurePosixPath(name).name, manifest.world_size)


def _reader(position: float, world_size: int) -> int:
    return min(world_size - 1, int(position * world_size))


def _chunks_between(runs: Iterable[Interval], nbytes: int) -> Iterator[range]:
    """Yields the ranges of a file's chunks without a byte of the runs."""
    at = 0
    for run in joined_intervals(run for run in runs if run.numel):
        yield range(at, run.start // CHUNK_BYTES)
        at = -(-run.stop // CHUNK_BYTES)
    yield range(at, chunks_in(nbytes))


@dataclass(frozen=True, kw_only=True)
class _WholeFile:
    """A file of `nbytes`. `first` to `last`: its relative position among the bytes of all ranks, within 0 to 1."""

    nbytes: int
    first: float
    last: float

    def chunks_of(self, chunks: range, rank: int, world_size: int) -> range:
        """Returns the part of `chunks` for this rank to verify."""

        def reader(index: int) -> int:
            middle = (index * CHUNK_BYTES + min(self.nbytes, (index + 1) * CHUNK_BYTES)) // 2
            return _reader(self.first + (self.last - self.first) * middle / max(1, self.nbytes), world_size)

        return chunks[bisect_left(chunks, rank, key=reader) : bisect_right(chunks, rank, key=reader)]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The bytes of one tensor in a weights file, and the rows of the parameter's state.

    Attributes:
        begin: the tensor's first byte.
        place: the relative position of the parameter's elements among all parameters' elements, within 0 to 1. A rank writes
            its parts of all parameters in the same order, so a part has about this position in any rank's file.
        writers: the ranks that wrote rows, in order.
    """

    begin: int
    itemsize: int
    rows: SavedRows
    place: tuple[float, float]
    writers: Sequence[int]

    @property
    def bytes(self) -> Interval:
        start, stop = self.rows.cuts.whole
        return Interval(self.begin + start * self.itemsize, self.begin + stop * self.itemsize)

    def chunks_of(self, rank: int, world_size: int, file_bytes: int) -> Iterator[int]:
        """Yields the chunks whose writer's relative position is this rank's."""
        every = range(len(self.rows.ranks))
        first, last = self.place
        # Ranks ascend along the rows, and so do the readers, so bisect finds this rank's rows.
        own = every[
            bisect_left(every, rank, key=lambda index: _reader(self._position(index, last), world_size)) : bisect_right(
                every, rank, key=lambda index: _reader(self._position(index, first), world_size)
            )
        ]
        for index in own:
            start, stop = self.rows.cuts.interval(index)
            begin, end = self.begin + start * self.itemsize, self.begin + stop * self.itemsize
            for chunk in range(begin // CHUNK_BYTES, -(-min(end, file_bytes) // CHUNK_BYTES)):
                middle = (max(begin, chunk * CHUNK_BYTES) + min(end, (chunk + 1) * CHUNK_BYTES)) // 2
                fraction = first + (last - first) * (middle - begin) / max(1, end - begin)
                if _reader(self._position(index, fraction), world_size) == rank:
                    yield chunk

    def _position(self, index: int, fraction: float) -> float:
        return (bisect_left(self.writers, self.rows.ranks[index]) + fraction) / max(1, len(self.writers))


def _whole_files(manifest: Manifest, writers: Sequence[int]) -> dict[str, _WholeFile]:
    """Returns each recorded file's position: the writer's for a rank's row file, otherwise one in proportion to bytes."""
    files: dict[str, _WholeFile] = {}
    numbers = {writer: number for number, writer in enumerate(writers)}
    others = {n: r.size for n, r in sorted(manifest.files.items()) if _writer(n, manifest) is None}
    total, before = max(1, sum(others.values())), 0
    for name, record in sorted(manifest.files.items()):
        writer = _writer(name, manifest)
        if writer is None:
            first, last = before / total, (before + record.size) / total
            before += record.size
        else:
            first, last = numbers[writer] / len(writers), (numbers[writer] + 1) / len(writers)
        files[name] = _WholeFile(nbytes=record.size, first=first, last=last)
    return files


def _owned_rows(manifest: Manifest, writers: Sequence[int]) -> dict[str, list[tuple[SavedRows, tuple[float, float]]]]:
    """Parameter → the rows of one kind of its state, each with its relative position among all parameters, within 0 to 1."""
    rows = list(_one_kind_of_each(manifest)) if writers else []
    total, before = max(1, sum(each.cuts.whole.numel for each in rows)), 0
    found: dict[str, list[tuple[SavedRows, tuple[float, float]]]] = {}
    for each in rows:
        first, before = before, before + each.cuts.whole.numel
        found.setdefault(each.name, []).append((each, (first / total, before / total)))
    return found


def _one_kind_of_each(manifest: Manifest) -> Iterator[SavedRows]:
    """Yields, for each parameter, the rows of one kind of state with one value per element."""
    kind_of = {
        name: next((kind for kind in kinds if kind not in manifest.own_shapes.get(name, {})), None)
        for name, kinds in manifest.kinds.items()
    }
    for rows in manifest.rows:
        if rows.kind == kind_of.get(rows.name, WEIGHTS) and rows.cuts.whole.numel:
            yield rows


# ---- Verification of a checkpoint, and the newest good one ----

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
            f"hf_zero: {checkpoint} is not as it was written: {shown('; '.join(self.edits), 1000)}. Its files are read as "
            f"they are now. `hf-zero verify --accept {checkpoint}` accepts the edits."
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
            here, there = (identity or "no save of hf_zero" for identity in (first, theirs.identity))
            return Findings(
                faults=(f"the ranks have parts of different saves: rank 0 of {here}, rank {rank} of {there}",)
            )
    edits = dict.fromkeys(edit for theirs in everyones for edit in theirs.edits)
    return Findings(edits=tuple(edits), identity=first)


def in_words(error: Exception) -> str:
    """Formats an error as a fault: without the package's prefix and the final full stop."""
    return str(error).removeprefix("hf_zero: ").rstrip(".")


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
            added = _added(checkpoint, folder, manifest)
            edits += [f"{name} is not among the files that {MANIFEST_NAME} vouches for" for name in added]
            faults = faults or _unreadable(checkpoint)
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
