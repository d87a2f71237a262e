"""Is this checkpoint good? Which is the newest that is?"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..layout.intervals import Interval, doubly_covered, uncovered
from .disks import Disk
from .files import faults_of, files_below, is_whole_safetensors
from .foreign.find import is_foreign, open_foreign
from .manifest import WEIGHTS, CheckpointError, Manifest
from .shares import own_chunks
from .together import Exchange

_NUMBERED = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint folder and what is wrong with it; good where there is nothing."""

    path: Path
    faults: tuple[str, ...]


def checkpoint_faults(checkpoint: Path, folder: str, *, rank: int = 0, world_size: int = 1) -> list[str]:
    """What this rank's share of a checkpoint's files has wrong, in words. Every rank reads a part of them.

    Args:
        folder: below the checkpoint, in which the manifest lies. A checkpoint without such a folder, of plain Trainer,
            DeepSpeed or FSDP, is checked for whole safetensors files, for all ranks' files, and for a readable trainer state.
    """
    if not checkpoint.is_dir():
        return [f"there is no folder {checkpoint}"]
    if not (checkpoint / folder).is_dir():
        return _faults_of_plain(checkpoint)
    try:
        manifest = Manifest.read(checkpoint / folder)
    except CheckpointError as error:
        return [str(error).removeprefix("hf_zero: ").rstrip(".")]
    chunks = own_chunks(checkpoint, manifest, rank=rank, world_size=world_size)
    return list(dict.fromkeys(faults_of(checkpoint, manifest.files, chunks))) + (
        row_faults(manifest) if rank == 0 else []
    )


def row_faults(manifest: Manifest) -> list[str]:
    """Elements of a parameter's state that no row has, or several have."""
    rows: dict[tuple[str, str], list[Interval]] = {}
    for row in manifest.rows:
        rows.setdefault((row.kind, row.name), []).append(row.interval)
    wanted = [
        (kind, name, manifest.own_shapes.get(name, {}).get(kind, manifest.shapes[name]))
        for name, kinds in manifest.kinds.items()
        for kind in kinds
    ]
    wanted += [(WEIGHTS, name, weight.shape) for name, weight in manifest.weights.items()]
    faults = []
    for kind, name, shape in wanted:
        intervals = rows.get((kind, name), [])
        if uncovered(Interval(0, math.prod(shape)), intervals) or doubly_covered(intervals):
            faults.append(f"{kind} of {name} is not there once for each element")
    return faults


def newest_first(output_dir: Path) -> Iterator[Path]:
    """The folders `checkpoint-N` of a run, the highest N first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.is_dir() and _NUMBERED.match(path.name)]
    yield from sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The N of a folder `checkpoint-N`."""
    return int(_NUMBERED.match(checkpoint.name).group(1))


def find_good(output_dir: Path, folder: str, *, disk: Disk, exchange: Exchange) -> tuple[Path | None, list[Candidate]]:
    """The newest good checkpoint, and those passed over with their faults. Collective: the ranks share the reading.

    Where ranks have disks of their own, it is good on each.
    """
    passed: list[Candidate] = []
    names = exchange([path.name for path in newest_first(output_dir)])[0]
    for path in (output_dir / name for name in names):
        reports = exchange(checkpoint_faults(path, folder, rank=disk.place, world_size=len(disk.ranks)))
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
            faults.append(str(error).removeprefix("hf_zero: ").rstrip("."))
    elif not any(name.endswith((".safetensors", ".bin")) for name in names):
        faults.append("it holds no model weights")
    state = checkpoint / "trainer_state.json"
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except FileNotFoundError:
        faults.append("trainer_state.json is missing")
    except ValueError:
        faults.append("trainer_state.json is cut off or damaged")
    faults.extend(
        f"{name} is cut off or damaged"
        for name in names
        if name.endswith(".safetensors") and not is_whole_safetensors(checkpoint / name)
    )
    return faults
