"""Reads a folder of a checkpoint, a model or a run: whose it is, whether its parts fit together and its bytes are as written."""

import fnmatch
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from ..comm.all_or_none import Exchange
from ..extras import MissingExtraError, extra
from ..layout.boxes import Box
from ..layout.intervals import Interval, doubly_covered, uncovered
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
from .manifest import MANIFEST_NAME, WEIGHTS, Manifest, SavedRow, SaveIdentity, named_save

# ---- Do a checkpoint's parts fit together? Checksums say that files are as written, not that they were right ----

STATE_NAME = "trainer_state.json"
POSITION_NAME = "data_position.json"
RUN_NAME = "training_run.json"
"""Settings, set-up and hardware of the run that trained the model, for its card; without paths and secrets."""

LOG_NAME = "zero_log.jsonl"
PAGE_NAME = "zero_report.html"
"""The log of a run, and the page that is made of it."""

RUN_FIELDS = ("arguments", "zero", "data", "hardware", "versions")
_NUMBERS = ("loss", "eval_loss", "step", "epoch", "zero/peak_mib")
"""What is calculated with, of what a Trainer logs."""

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
"""Files beside the manifest's folder that a resume or `from_pretrained` would read."""


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
"""Ends of names of files that may hold such tensors, or that say where they are."""


def may_be_edited(name: str, folder: str) -> bool:
    """Whether a resume goes on, as with plain Trainer, after a person has edited or removed this file of a checkpoint.

    Args:
        folder: below the checkpoint, in which the manifest lies.
    """
    first, _, rest = name.partition("/")
    if rest and first.startswith(folder):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _SMALL_PICKLES) or not name.endswith(_TENSOR_SUFFIXES)


def structure_faults(checkpoint: Path, folder: str, manifest: Manifest) -> list[str]:
    """Lists in words the contradictions to the manifest, checksums aside.

    Args:
        folder: below the checkpoint, in which the manifest lies. Those of further models, `folder_1` and so on, too.
    """
    # Files are looked at only for rows that make sense: else each fault would be told twice.
    faults = row_faults(manifest) or list(_row_file_faults(checkpoint / folder, manifest))
    for other in sorted(path for path in checkpoint.glob(f"{folder}_*") if path.is_dir()):
        try:
            further = Manifest.read(other)
        except CheckpointError as error:
            faults.append(in_words(error))
            continue
        if further.save != manifest.save:
            faults.append(f"{other.name} is of {named_save(further.save)}, and {folder} of {manifest.identity}")
        faults += row_faults(further) or _row_file_faults(other, further)
    return [
        *faults,
        *_lost_files(manifest, folder),
        *_strange_files(checkpoint, folder, manifest),
        *_step_faults(checkpoint, manifest),
    ]


def described_faults(folder: Path) -> list[str]:
    """Lists the faults of the JSON files beside a model's weights, from which cards, tables and resumes are made."""
    faults = []
    for read in (read_run, read_history, read_position):
        try:
            read(folder)
        except CheckpointError as error:
            faults.append(in_words(error))
    # Without a trainer's state, `read_history` reads the record of the run again, and finds the same fault.
    return list(dict.fromkeys(faults))


def read_run(folder: Path) -> dict[str, Any]:
    """Reads a folder's record of the run that trained its model; {} without one. Those of `RUN_FIELDS` are mappings.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    path = folder / RUN_NAME
    run = read_mapping(path) if path.is_file() else {}
    for name in RUN_FIELDS:
        if not isinstance(run.get(name) or {}, dict):
            raise CheckpointError(f"hf_zero: {path}: {name} is a {type(run[name]).__name__}, where a mapping is due.")
    return {**run, **{name: run.get(name) or {} for name in RUN_FIELDS}} if run else {}


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Reads a Trainer's log from its state in the folder, or from the record of a model folder; see `log_history`."""
    path = folder / STATE_NAME
    return log_history(read_mapping(path), path) if path.is_file() else log_history(read_run(folder), folder / RUN_NAME)


_LAST_STEP = 2**53
_LEAST, _MOST = 1e-150, 1e150


def log_history(state: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """Returns the log in a Trainer's state: entries in order, with numbers in the known fields.

    Raises:
        CheckpointError: it has something else there; `path` is the file that the state is of.
    """
    history = state.get("log_history") or []
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise CheckpointError(f"hf_zero: {path}: log_history is no list of mappings.")
    for entry in history:
        wrong = [name for name, value in entry.items() if name in _NUMBERS and not is_number(value)]
        if wrong:
            raise CheckpointError(f"hf_zero: {path}: log_history has a {wrong[0]} that is no number.")
    return history


def is_number(value: object) -> bool:
    """Whether a JSON value is a number that a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def is_finite(value: object) -> bool:
    """Whether sums, differences and ratios of such values are numbers again: no loss is beyond 1e150, and none below 1e-150."""
    return is_number(value) and (value == 0 or _LEAST <= abs(value) <= _MOST)  # type: ignore[arg-type]  # it is a number


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value counts steps. Beyond 2**53, a float does not tell a step from the next."""
    return type(value) is int and 0 <= value <= _LAST_STEP


def read_position(folder: Path) -> dict[str, int] | None:
    """Reads the position of training in its data: `global_rows`, `epoch` and `rows`; None without a record.

    Raises:
        CheckpointError: the file holds something else.
    """
    path = folder / POSITION_NAME
    if not path.is_file():
        return None
    content = read_mapping(path)
    known = {"global_rows", "epoch", "rows"}
    if content.keys() != known or not all(type(value) is int and value >= 0 for value in content.values()):
        raise CheckpointError(
            f"hf_zero: {path} holds {shown(str(content))}, and whole numbers for {', '.join(sorted(known))} are due; resume "
            "from an earlier checkpoint."
        )
    return content


def row_faults(manifest: Manifest) -> list[str]:
    """Lists elements of a parameter's state without a row, or with several."""
    rows: dict[tuple[str, str], dict[Box, list[Interval]]] = {}
    for row in manifest.rows:
        of_box = rows.setdefault((row.kind, row.name), {})
        of_box.setdefault(manifest.box_of(row), []).append(row.interval)
    wanted = [(kind, name) for name, kinds in manifest.kinds.items() for kind in kinds]
    wanted += [(WEIGHTS, name) for name in manifest.weights]
    faults = []
    for kind, name in wanted:
        whole_numel = math.prod(manifest.whole_shape(kind, name) or ())
        parts = rows.get((kind, name), {})
        # By sizes and pairs: boxes that share nothing and have as many elements as the whole cover each element once.
        once = sum(box.numel for box in parts) == whole_numel and not any(
            one.shares_with(other) for one, other in combinations(parts, 2)
        )
        if not once or any(
            uncovered(Interval(0, box.numel), held) or doubly_covered(held) for box, held in parts.items()
        ):
            faults.append(f"{kind} of {name} is not there once for each element")
    return faults


def _lost_files(manifest: Manifest, folder: str) -> Iterator[str]:
    for file in dict.fromkeys(row.file for row in manifest.rows):
        if file not in manifest.elsewhere and f"{folder}/{file}" not in manifest.files:
            yield f"{folder}/{file} has rows and is not among the files that {MANIFEST_NAME} vouches for"


def _strange_files(checkpoint: Path, folder: str, manifest: Manifest) -> Iterator[str]:
    """Lists files that are cut off, and files without a checksum that a resume would read."""
    from_elsewhere = {f"{folder}/{file}" for file in manifest.elsewhere}
    for name in files_below(checkpoint):
        if name in manifest.files:
            if name.endswith(".safetensors") and not is_whole_safetensors(checkpoint / name):
                yield f"{name} is cut off or damaged"
        elif name not in from_elsewhere and _is_read_back(name, folder) and not may_be_edited(name, folder):
            yield f"{name} is not among the files that {MANIFEST_NAME} vouches for"


def _added(checkpoint: Path, folder: str, manifest: Manifest) -> list[str]:
    """Lists files without tensors that a resume would read, and that the manifest has not."""
    return [
        name
        for name in files_below(checkpoint)
        if name not in manifest.files and _is_read_back(name, folder) and may_be_edited(name, folder)
    ]


def _unreadable(checkpoint: Path) -> list[str]:
    """Lists the faults of configs, which a person may have edited and a model's loader parses."""
    faults = []
    for path in (checkpoint / name for name in ("config.json", "adapter_config.json")):
        try:
            if path.is_file():
                read_mapping(path)
        except CheckpointError as error:
            faults.append(in_words(error))
    return faults


def accept_edits(checkpoint: Path, folder: str) -> None:
    """Makes the manifest vouch for the files that may be edited, as they are now. The others have been found good."""
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


def _row_file_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Lists rows that differ from the manifest. Reads the files' headers."""
    rows: dict[str, list[SavedRow]] = {}
    for row in manifest.rows:
        rows.setdefault(row.file, []).append(row)
    for file, in_file in rows.items():
        spans = spans_in(folder / file)
        if spans is not None:
            save = save_in(folder / file)
            if save != manifest.save:
                yield f"{folder.name}/{file} is of {named_save(save)}, and the manifest of {manifest.identity}"
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
        elif row.key in seen or row.key != f"{row.kind}/{row.name}":
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


# ---- Whose checkpoint a folder is, by the names of its files ----

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
METADATA_NAME = ".metadata"
"""Of FSDP, and of torch.distributed.checkpoint."""

OPTIMIZER_FILE = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
"""Of DeepSpeed, one a rank."""

_WEIGHT_SHARD = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")


def is_foreign(folder: Path) -> bool:
    """Whether a folder looks like DeepSpeed's or FSDP's; `open_foreign` says whether it is good."""
    if not folder.is_dir():
        return False
    return is_dcp(folder) or (folder / "pytorch_model_fsdp.bin").is_file() or _is_deepspeed(folder)


def is_dcp(folder: Path) -> bool:
    """Whether a folder looks like FSDP's, torch.distributed.checkpoint's, or has weights in a file a rank."""
    named = (folder / MODEL_FOLDER).is_dir() or (folder / OPTIMIZER_FOLDER).is_dir()
    return named or (folder / METADATA_NAME).is_file() or bool(weight_shards_of(folder))


def _is_deepspeed(folder: Path) -> bool:
    # Also where what `latest` names is not there: `open_foreign` says so.
    return (folder / "latest").is_file() or any(OPTIMIZER_FILE.match(path.name) for path in folder.iterdir())


def weight_shards_of(folder: Path) -> list[Path]:
    """The files of `save_pretrained(..., distributed_checkpoint=True)` in a folder, one a rank; none where there is no folder."""
    return sorted(path for path in folder.glob("*.safetensors") if _WEIGHT_SHARD.fullmatch(path.name))


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
            # Headers on all ranks: a damaged one would lead a rank to other bytes than those that it has checked.
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


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a rank, or all ranks, have found in a checkpoint's folder.

    Attributes:
        faults: in words; without any, the checkpoint is good.
        edits: in words, the files without tensors of the model or optimizer that are not as they were written. A resume takes
            them as they are, with a warning.
        identity: of the save that wrote the folder; None if none of ours did, or if there are faults.
    """

    faults: tuple[str, ...] = ()
    edits: tuple[str, ...] = ()
    identity: SaveIdentity | None = None

    def warning(self, checkpoint: Path) -> str:
        """Tells a person of the edits, and how to keep them."""
        return (
            f"hf_zero: {checkpoint} is not as it was written: {shown('; '.join(self.edits), 1000)}. Its files are read as "
            f"they are now. `hf-zero verify --accept {checkpoint}` accepts the edits."
        )


def findings_in(
    checkpoint: Path, folder: str, *, rank: int = 0, world_size: int = 1, on_progress: Progress = untold
) -> Findings:
    """Checks this rank's share of a checkpoint's files. Every rank reads a part.

    Args:
        folder: below the checkpoint, in which the manifest lies. A checkpoint without such a folder, of plain Trainer,
            DeepSpeed or FSDP, is checked for whole safetensors files, for all ranks' files, and for a readable trainer state.
        on_progress: called with the bytes of this rank's share that have been read, and all of them.
    """
    try:
        return _findings(checkpoint, folder, rank=rank, world_size=world_size, on_progress=on_progress)
    except CheckpointError as error:
        return Findings(faults=(in_words(error),))
    except OSError as error:
        return Findings(faults=(f"it cannot be read ({error})",))


def checkpoint_faults(checkpoint: Path, folder: str, **share: Any) -> list[str]:
    """Lists faults and edits of `findings_in`, which has the same arguments."""
    found = findings_in(checkpoint, folder, **share)
    return [*found.faults, *found.edits]


def agreed(exchange: Exchange, mine: Findings) -> Findings:
    """Returns the findings of all ranks, the same on each, so that all go on alike. Collective."""
    everyones = exchange(mine)
    faults = dict.fromkeys(fault for theirs in everyones for fault in theirs.faults)
    if faults:
        return Findings(faults=tuple(faults))
    # Each rank has looked at its own disk: parts of different saves are good, each on its own disk.
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
    """Formats an error as a fault: without a prefix, and without a full stop."""
    return str(error).removeprefix("hf_zero: ").rstrip(".")


def _findings(checkpoint: Path, folder: str, *, rank: int, world_size: int, on_progress: Progress) -> Findings:
    if not checkpoint.is_dir():
        return Findings(faults=(no_folder(checkpoint),))
    faults = entry_faults(checkpoint)
    if faults:
        # What these lead to is not looked at.
        return Findings(faults=tuple(faults))
    if not (checkpoint / folder).is_dir():
        return Findings(faults=tuple(_faults_of_plain(checkpoint)))
    manifest = Manifest.read(checkpoint / folder)
    chunks = own_chunks(checkpoint, manifest, rank=rank, world_size=world_size)
    found = faults_of(checkpoint, manifest.files, chunks, on_progress)
    # No Trainer goes on without its own state.
    of_edits = {n for n, _ in found if may_be_edited(n, folder) and (n != STATE_NAME or (checkpoint / n).is_file())}
    edits = [fault for name, fault in found if name in of_edits]
    faults = list(dict.fromkeys(fault for name, fault in found if name not in of_edits))
    # Of files that are not as they were written, no more is asked.
    # The first rank of a disk looks at the structure for all: others would read the same headers and find the same faults.
    if not faults and not rank:
        added = _added(checkpoint, folder, manifest)
        edits += [f"{name} is not among the files that {MANIFEST_NAME} vouches for" for name in added]
        faults = structure_faults(checkpoint, folder, manifest) or _unreadable(checkpoint)
        # An edit that contradicts the rest is a fault, and told once.
        edits = [] if faults else edits
    return Findings(faults=tuple(faults), edits=tuple(dict.fromkeys(edits)), identity=manifest.identity)


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
    on_edits: Callable[[str], None] = lambda warning: None,
    on_progress: Progress = untold,
) -> tuple[Path | None, list[Candidate]]:
    """The newest good checkpoint, and those passed over with their faults. Collective: the ranks share the reading.

    Where ranks have disks of their own, it is good on each.

    Args:
        further_faults: what else is wrong with a checkpoint whose files are good.
        on_edits: called, on each rank, with the warning of edits of the checkpoint that is returned.
        on_progress: called with the bytes of a checkpoint that this rank has read, and all that it reads of it.
    """
    passed: list[Candidate] = []
    # The names on all ranks: each candidate costs an exchange, in which ranks that see other folders would answer for another
    # one.
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
