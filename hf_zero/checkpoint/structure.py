"""Checks whether the parts of a checkpoint, model or run folder agree, without reading the tensors."""

import fnmatch
import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path, PurePosixPath

from ..layout.boxes import Box
from ..layout.intervals import Interval, doubly_covered, uncovered
from .faults import CheckpointError, shown
from .files import files_below, sync
from .hashes import record_of
from .json_files import read_mapping
from .manifest import (
    MANIFEST_NAME,
    WEIGHTS,
    Manifest,
    SavedRow,
    named_save,
    row_file,
)
from .run_log import POSITION_NAME, STATE_NAME, read_history, read_position, read_run
from .safetensors_headers import TensorSpan, is_whole_safetensors, save_in, spans_in

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
            faults.append(f"{other.name} is from {named_save(further.save)}, but {folder} is from {manifest.identity}")
        faults += of_rows(other, further)
    faults += _cut_files(checkpoint, manifest, rank, world_size)
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
            faults.append(f"{kind} of {name} is missing or duplicated for some elements")
    return faults


def _cut_files(checkpoint: Path, manifest: Manifest, rank: int, world_size: int) -> Iterator[str]:
    """Yields the truncated files of this rank's share."""
    names = sorted(name for name in manifest.files if name.endswith(".safetensors"))
    for name in names[rank::world_size]:
        if (checkpoint / name).is_file() and not is_whole_safetensors(checkpoint / name):
            yield f"{name} is cut off or damaged"


def _strange_files(checkpoint: Path, folder: str, manifest: Manifest) -> Iterator[str]:
    """Yields files without a checksum which a resume would read."""
    from_elsewhere = {f"{folder}/{file}" for file in manifest.elsewhere}
    for name in files_below(checkpoint):
        if name in manifest.files:
            continue
        if name not in from_elsewhere and _is_read_back(name, folder) and not may_be_edited(name, folder):
            yield f"{name} is not among the files listed in {MANIFEST_NAME}"


def added_files(checkpoint: Path, folder: str, manifest: Manifest) -> list[str]:
    """Lists the tensor-free files which a resume would read although the manifest does not list them."""
    return [
        name
        for name in files_below(checkpoint)
        if name not in manifest.files and _is_read_back(name, folder) and may_be_edited(name, folder)
    ]


def unreadable_files(checkpoint: Path) -> list[str]:
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
    for name in [*(n for n in manifest.files if n not in files), *added_files(checkpoint, folder, manifest)]:
        path = checkpoint / name
        if path.is_file():
            sync(path)
            files[name] = record_of(path)
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
                yield f"{folder.name}/{file} is from {named_save(save)}, but the manifest is from {manifest.identity}"
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
            yield f"{row.kind} of {row.name} is stored as {row.key} in {file}, which is also the key of other values"
        elif span.shape != (numel,):
            yield f"{row.key} has shape {span.shape} in {file}; expected: {numel} elements"
        elif span.dtype != row.dtype:
            yield f"{row.key} has dtype {span.dtype} in {file}; expected: {row.dtype}"
        elif weight is not None and weight.dtype != row.dtype:
            yield f"{row.key} has dtype {row.dtype} in {file}, but the model's {row.name} is {weight.dtype}"
        seen.add(row.key)
    for key in spans.keys() - seen:
        yield f"{file} has {key}, which is not in the manifest"


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
        return [f"{STATE_NAME} has the global_step {shown(step)}, which is not a number of steps"]
    if manifest.step is not None and step != manifest.step:
        return [f"{STATE_NAME} is from step {shown(step)}, but the checkpoint is from step {manifest.step}"]
    return []


def in_words(error: Exception) -> str:
    """Formats an error as a fault: without the package's prefix and the final full stop."""
    return str(error).removeprefix("hf_zero: ").rstrip(".")
