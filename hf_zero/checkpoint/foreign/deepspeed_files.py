"""The files of a DeepSpeed ZeRO checkpoint: which there are, and which variants are refused by name."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..format.files import is_inside
from ..format.json_files import read_text
from ..format.manifest import CheckpointError
from .pickles import load_deepspeed_file

_OPTIMIZER_FILE = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL_FILE = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_VERSION = re.compile(r"^0\.(\d+)\.")
_MINORS = range(16, 20)
"""Of DeepSpeed 0.x: those whose checkpoints have the fields that are read here."""

_LARGEST_TAG_BYTES = 1024

_THEN = "Continue it with DeepSpeed, or export its weights with DeepSpeed's zero_to_fp32.py and start from those."


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFiles:
    """One step's files, opened.

    Attributes:
        step_folder: `global_stepN`.
        version: of the DeepSpeed that wrote them.
        stage: 1, 2 or 3.
        optimizer: each data-parallel rank's `optimizer_state_dict`, in rank order; tensors are memory-mapped.
        model: rank 0's model file.
        model_paths: of all ranks at stage 3, else the one that there is.
    """

    step_folder: Path
    version: str
    stage: int
    optimizer: tuple[dict[str, Any], ...]
    model: dict[str, Any]
    model_paths: tuple[Path, ...]

    @property
    def world_size(self) -> int:
        return len(self.optimizer)


def step_folder_of(folder: Path) -> Path | None:
    """The folder of the step that `latest` names, `folder` itself where it is one, or None: not DeepSpeed's."""
    latest = folder / "latest"
    if latest.is_file():
        tag = read_text(latest, most_bytes=_LARGEST_TAG_BYTES).strip()
        if not is_inside(tag) or Path(tag).name != tag or not (folder / tag).is_dir():
            raise CheckpointError(f"hf_zero: {latest} names {tag!r}, and {folder} has no such folder; copy it there.")
        return folder / tag
    if folder.is_dir() and any(_OPTIMIZER_FILE.match(path.name) for path in folder.iterdir()):
        return folder
    return None


def open_files(step_folder: Path) -> DeepSpeedFiles:
    """Opens all ranks' files.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or the checkpoint is of a variant that is not covered.
    """
    names = sorted(path.name for path in step_folder.iterdir())
    _refuse_by_name(step_folder, names)
    of_rank = {int(match[1]): name for name in names if (match := _OPTIMIZER_FILE.match(name))}
    if not of_rank:
        raise _not_covered(step_folder, "has no file of optimizer state, so it was not made with ZeRO stage 1, 2 or 3")
    first = min(of_rank)
    content = load_deepspeed_file(step_folder / of_rank[first])
    state = _state_of(content, step_folder / of_rank[first])
    world_size = _world_size(state, step_folder)
    missing = sorted(set(range(world_size)) - set(of_rank))
    if missing:
        raise CheckpointError(
            f"hf_zero: {step_folder} has no optimizer file of rank {missing[0]} of {world_size} ({len(missing)} missing). Each "
            "machine writes its own ranks' files: copy all of them into one folder."
        )
    if len(of_rank) != world_size:
        raise _not_covered(
            step_folder,
            f"has optimizer files of {len(of_rank)} ranks and is partitioned over {world_size}: sub-groups of ranks (MiCS), or "
            "files of two checkpoints",
        )
    opened = [state]
    for rank in range(1, world_size):
        path = step_folder / of_rank[rank]
        opened.append(_state_of(load_deepspeed_file(path), path))
    stage = int(state["zero_stage"])
    model_names = {int(m[1] or 0): name for name in names if (m := _MODEL_FILE.match(name))}
    needed = range(world_size if stage == 3 else 1)
    lost = [rank for rank in needed if rank not in model_names]
    if lost:
        raise CheckpointError(
            f"hf_zero: {step_folder} has no model file (…_model_states.pt) of rank {lost[0]}. Copy all ranks' files into one "
            "folder."
        )
    model_paths = tuple(step_folder / model_names[rank] for rank in needed)
    model = load_deepspeed_file(model_paths[0])
    _check_model(model, model_paths[0])
    version = _checked_version(model.get("ds_version") or content.get("ds_version"), step_folder)
    return DeepSpeedFiles(
        step_folder=step_folder,
        version=version,
        stage=stage,
        optimizer=tuple(opened),
        model=model,
        model_paths=model_paths,
    )


def _refuse_by_name(step_folder: Path, names: list[str]) -> None:
    for name in names:
        match = _OPTIMIZER_FILE.match(name)
        rank = int((match or _MODEL_FILE.match(name) or [0, 0, 0])[2])
        if rank > 0:
            raise _not_covered(step_folder, f"is of a tensor-parallel run ({name})")
        if "expert" in name or name.startswith("expp_rank_"):
            raise _not_covered(step_folder, f"is of a mixture-of-experts run with expert parallelism ({name})")
        if re.match(r"^layer_\d+-", name):
            raise _not_covered(step_folder, f"is of a pipeline-parallel run ({name})")
    if "zero" in names and (step_folder / "zero").is_dir():
        raise _not_covered(step_folder, "is a universal checkpoint")


def _state_of(content: dict[str, Any], path: Path) -> dict[str, Any]:
    state = content.get("optimizer_state_dict")
    if not isinstance(state, dict) or "zero_stage" not in state or "partition_count" not in state:
        raise _not_covered(path, "is no file of ZeRO stage 1, 2 or 3 (bf16 without ZeRO is not covered)")
    if state["zero_stage"] not in (1, 2, 3):
        raise _not_covered(path, f"is of ZeRO stage {state['zero_stage']!r}")
    return state


def _world_size(state: dict[str, Any], step_folder: Path) -> int:
    counts = state["partition_count"]
    counts = {int(count) for count in counts} if isinstance(counts, list | tuple) else {int(counts)}
    if len(counts) != 1 or state.get("ds_zero_partition_groups") is not None:
        raise _not_covered(step_folder, f"has groups partitioned over {sorted(counts)} ranks (mixture of experts)")
    return counts.pop()


def _check_model(model: dict[str, Any], path: Path) -> None:
    if not isinstance(model.get("param_shapes"), list | tuple):
        raise _not_covered(path, "has no param_shapes")
    degrees = model.get("checkpoint_parallel_dimensions") or {}
    degrees = {**degrees, "mp_world_size": model.get("mp_world_size") or 1}
    for key, degree in degrees.items():
        if isinstance(degree, int) and degree > 1:
            raise _not_covered(path, f"is of a run with {key} {degree}")


def _checked_version(version: object, step_folder: Path) -> str:
    match = _VERSION.match(str(version))
    if match is None or int(match[1]) not in _MINORS:
        raise _not_covered(
            step_folder, f"was written by DeepSpeed {version}, and 0.{_MINORS[0]} to 0.{_MINORS[-1]} are known"
        )
    return str(version)


def _not_covered(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"hf_zero: {path} {fault}, which is not covered. {_THEN}")
