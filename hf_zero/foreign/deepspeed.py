"""Reads checkpoints of DeepSpeed's ZeRO."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.faults import CheckpointError
from ..checkpoint.files import is_inside
from ..checkpoint.json_files import read_text
from ..checkpoint.origin import OPTIMIZER_FILE
from ..layout.intervals import Interval
from ..layout.pieces import pieces_for
from .pickles import load_deepspeed_file
from .states import MASTER, ForeignCheckpoint, ForeignGroup

# ---- The files of a DeepSpeed ZeRO checkpoint, and the variants that are refused ----

_MODEL_FILE = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_VERSION = re.compile(r"^0\.(\d+)\.")
_MINORS = range(16, 20)
"""Minor versions of DeepSpeed 0.x whose checkpoints have the expected fields."""

_LARGEST_TAG_BYTES = 1024

_THEN = "Continue the run with DeepSpeed, or export its weights with DeepSpeed's zero_to_fp32.py and start from them."


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFiles:
    """The opened files of one step.

    Attributes:
        step_folder: `global_stepN`.
        version: version of DeepSpeed that wrote the files.
        stage: 1, 2 or 3.
        optimizer: `optimizer_state_dict` of each data-parallel rank, in rank order; tensors are memory-mapped.
        model: rank 0's model file.
        model_paths: model files of all ranks at stage 3, otherwise the only one.
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
    """Returns the folder of the step named by `latest`, or `folder` itself; None for a folder of another writer."""
    latest = folder / "latest"
    if latest.is_file():
        tag = read_text(latest, most_bytes=_LARGEST_TAG_BYTES).strip()
        if not is_inside(tag) or Path(tag).name != tag or not (folder / tag).is_dir():
            raise CheckpointError(f"hf_zero: {latest} names {tag!r}, but {folder} has no such folder; copy it there.")
        return folder / tag
    if folder.is_dir() and any(OPTIMIZER_FILE.match(path.name) for path in folder.iterdir()):
        return folder
    return None


def open_files(step_folder: Path) -> DeepSpeedFiles:
    """Opens the files of all ranks.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or the checkpoint is of a variant that is not supported.
    """
    names = sorted(path.name for path in step_folder.iterdir())
    _refuse_by_name(step_folder, names)
    of_rank = {int(match[1]): name for name in names if (match := OPTIMIZER_FILE.match(name))}
    if not of_rank:
        raise _not_covered(step_folder, "has no optimizer state files, as from a run without ZeRO stage 1, 2 or 3")
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
            f"has optimizer files of {len(of_rank)} ranks but is partitioned over {world_size}: sub-groups of ranks (MiCS), or "
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
        match = OPTIMIZER_FILE.match(name)
        rank = int((match or _MODEL_FILE.match(name) or [0, 0, 0])[2])
        if rank > 0:
            raise _not_covered(step_folder, f"is from a tensor-parallel run ({name})")
        if "expert" in name or name.startswith("expp_rank_"):
            raise _not_covered(step_folder, f"is from a mixture-of-experts run with expert parallelism ({name})")
        if re.match(r"^layer_\d+-", name):
            raise _not_covered(step_folder, f"is from a pipeline-parallel run ({name})")
    if "zero" in names and (step_folder / "zero").is_dir():
        raise _not_covered(step_folder, "is a universal checkpoint")


def _state_of(content: dict[str, Any], path: Path) -> dict[str, Any]:
    state = content.get("optimizer_state_dict")
    if not isinstance(state, dict) or "zero_stage" not in state or "partition_count" not in state:
        raise _not_covered(path, "is not a file of ZeRO stage 1, 2 or 3 (but may be of bf16 without ZeRO)")
    if state["zero_stage"] not in (1, 2, 3):
        raise _not_covered(path, f"is from ZeRO stage {state['zero_stage']!r}")
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
            raise _not_covered(path, f"is from a run with {key} {degree}")


def _checked_version(version: object, step_folder: Path) -> str:
    match = _VERSION.match(str(version))
    if match is None or int(match[1]) not in _MINORS:
        raise _not_covered(
            step_folder, f"was written by DeepSpeed {version} (known: 0.{_MINORS[0]} to 0.{_MINORS[-1]})"
        )
    return str(version)


def _not_covered(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"hf_zero: {path} {fault}, which is not supported. {_THEN}")


# ---- A DeepSpeed ZeRO-1, -2 or -3 checkpoint by parameter and interval; FORMATS.md describes the layout ----
#
# Both layouts are described by the same terms: a *bank* (a parameter group at stages 1 and 2, a sub-group at stage 3) is a flat
# tensor on each rank, and a parameter is a list of runs, each a part of its elements in one bank of one rank.


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A part of a parameter: the elements `interval`, which start at element `start` of a bank on a rank."""

    interval: Interval
    rank: int
    bank: int
    start: int


class DeepSpeedCheckpoint(ForeignCheckpoint):
    """One step of a DeepSpeed ZeRO run. Its files stay mapped while this object exists.

    Raises:
        CheckpointError: the checkpoint is incomplete, or of a variant that is not supported.
    """

    def __init__(self, folder: Path, step_folder: Path):
        self.folder = folder
        self._files = open_files(step_folder)
        files = self._files
        self.origin = f"DeepSpeed {files.version}, ZeRO stage {files.stage}, {files.world_size} ranks"
        self.shapes = {
            name: tuple(int(size) for size in shape)
            for bank in files.model["param_shapes"]
            for name, shape in bank.items()
        }
        layout = _per_parameter if files.stage == 3 else _per_group
        self._banks = [_banks_of(state, files.step_folder) for state in files.optimizer]
        self._runs = layout(files, self._banks)
        self._refuse_short()
        self.groups = _groups_of(files)

    def kinds_of(self, name: str) -> tuple[str, ...]:
        bank = self._banks[0][self._bank_of(name)]
        return tuple(kind for kind, value in bank.items() if torch.is_tensor(value) and value.dim() > 0)

    def scalars_of(self, name: str) -> dict[str, Any]:
        bank = self._banks[0][self._bank_of(name)]
        scalars = {kind: value for kind, value in bank.items() if not (torch.is_tensor(value) and value.dim() > 0)}
        settings = next((group.settings for group in self.groups if name in group.names), {})
        if len(bank) > 1 and "step" not in scalars and "step" in settings:
            # Fused optimizers store the step count in the group.
            scalars["step"] = settings["step"]
        if isinstance(scalars.get("step"), int):
            scalars["step"] = torch.tensor(float(scalars["step"]))
        return {kind: value.clone() if torch.is_tensor(value) else value for kind, value in scalars.items()}

    def read(self, kind: str, name: str, interval: Interval) -> torch.Tensor:
        try:
            pieces = pieces_for(interval, [(run.interval, run) for run in self._runs[name]])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"hf_zero: {self.folder}: {kind} of {name!r}: {error}; the checkpoint is damaged, resume from another."
            ) from error
        parts = []
        for piece in pieces:
            flat = self._banks[piece.source.rank][piece.source.bank][kind]
            part = piece.in_source.shift(piece.source.start)
            parts.append(flat.reshape(-1)[part.start : part.stop])
        return torch.cat(parts) if parts else torch.empty(0)

    def other_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        model, files = self._files.model, self._files
        buffers = set(model.get("buffer_names") or ())
        aliases = set(model.get("shared_params") or ())
        frozen = model.get("frozen_param_shapes") or {}
        for name, value in (model.get("module") or {}).items():
            if name in buffers or (
                files.stage < 3 and name not in self.shapes and name not in aliases and name not in frozen
            ):
                yield name, value.clone()
        fragments = [model.get("frozen_param_fragments") or {}]
        if frozen and files.stage == 3:
            others = (load_deepspeed_file(path) for path in files.model_paths[1:])
            fragments += [other.get("frozen_param_fragments") or {} for other in others]
        for name, shape in frozen.items():
            try:
                whole = torch.cat([of_rank[name].reshape(-1) for of_rank in fragments])
                yield name, whole[: torch.Size(shape).numel()].reshape(tuple(shape))
            except (KeyError, RuntimeError) as error:
                raise CheckpointError(
                    f"hf_zero: {files.step_folder}: the frozen parameter {name!r} of shape {tuple(shape)} is incomplete "
                    f"({error}). Resume from another checkpoint."
                ) from error

    def _bank_of(self, name: str) -> int:
        return self._runs[name][0].bank

    def _refuse_short(self) -> None:
        """Refuses a run that exceeds its bank. State on NVMe has no elements in the checkpoint."""
        for name, runs in self._runs.items():
            kinds = self.kinds_of(name)
            for run in runs:
                for kind in kinds:
                    value = self._banks[run.rank][run.bank].get(kind)
                    there = value.numel() if isinstance(value, torch.Tensor) else 0
                    if there < run.start + run.interval.numel:
                        raise CheckpointError(
                            f"hf_zero: {self.folder} ({self.origin}): rank {run.rank} has {there} elements of {kind} in bank "
                            f"{run.bank}, but {name!r} needs {run.start + run.interval.numel}. NVMe state and compressed "
                            "optimizers are not supported. In other cases the checkpoint is damaged: resume from another."
                        )


def _banks_of(state: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Returns one rank's banks: kind → flat tensor, or one value for the whole bank."""
    if int(state["zero_stage"]) == 3:
        masters, saved = state.get("fp32_flat_groups"), state.get("optimizer_state_dict")
    else:
        masters, saved = state.get("single_partition_of_fp32_groups"), state.get("base_optimizer_state")
    if not isinstance(masters, list | tuple) or saved is None:
        raise CheckpointError(
            f"hf_zero: {folder}: a rank's file has no fp32 masters or no optimizer state, so the run cannot resume from it "
            "(saved without optimizer state?). Export its weights with DeepSpeed's zero_to_fp32.py and start from them."
        )
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"hf_zero: {folder} was written with elastic_checkpoint, which is not supported. Continue the run with DeepSpeed, "
            "and save it without that setting."
        )
    order = [index for group in saved["param_groups"] for index in group["params"]]
    states = [saved["state"].get(index, {}) for index in order]
    if len(states) != len(masters):
        raise CheckpointError(
            f"hf_zero: {folder}: a rank's file has masters of {len(masters)} groups but state of {len(states)}; it is damaged, "
            "resume from another checkpoint."
        )
    return [{MASTER: master.detach(), **values} for master, values in zip(masters, states)]


def _groups_of(files: DeepSpeedFiles) -> tuple[ForeignGroup, ...]:
    state = files.optimizer[0]
    saved = state["optimizer_state_dict"] if files.stage == 3 else state["base_optimizer_state"]
    banks = iter(files.model["param_shapes"])
    groups = []
    for group in saved["param_groups"]:
        names = tuple(name for _ in group["params"] for name in next(banks))
        settings = {key: value for key, value in group.items() if key != "params"}
        if names:
            groups.append(ForeignGroup(settings=settings, names=names))
    return tuple(groups)


def _per_group(files: DeepSpeedFiles, banks: Sequence[list[dict[str, Any]]]) -> dict[str, list[_Run]]:
    """Stages 1 and 2: the parameters of a group are concatenated, padded, and cut into equal partitions, one for each rank."""
    shapes = files.model["param_shapes"]
    between = files.optimizer[0].get("param_alignment_paddings")
    runs: dict[str, list[_Run]] = {}
    _same_number(files, len(shapes), banks)
    for number, group in enumerate(shapes):
        sizes = {
            banks[rank][number][MASTER].numel() + int(files.optimizer[rank]["group_paddings"][number])
            for rank in range(files.world_size)
        }
        if len(sizes) != 1:
            raise _unfitting(files, f"group {number} has partitions of {sorted(sizes)} elements")
        [size] = sizes
        if between and len(between[number]) != len(group):
            raise _unfitting(
                files,
                f"the model file names {len(group)} parameters in group {number}, but the optimizer's file has "
                f"{len(between[number])}",
            )
        offset = 0
        for index, (name, shape) in enumerate(group.items()):
            numel = torch.Size(shape).numel()
            runs[name] = []
            for rank in range(files.world_size):
                partition = Interval(rank * size, (rank + 1) * size)
                common = partition.intersect(Interval(offset, offset + numel))
                if common is not None:
                    run = _Run(
                        interval=common.shift(-offset), rank=rank, bank=number, start=common.start - partition.start
                    )
                    runs[name].append(run)
            offset += numel + (int(between[number][index]) if between else 0)
        alignment = 2 * files.world_size
        if -(-offset // alignment) != -(-size * files.world_size // alignment):
            raise _unfitting(
                files, f"group {number} has {offset} elements, but {size} on each of {files.world_size} ranks"
            )
    return runs


def _per_parameter(files: DeepSpeedFiles, banks: Sequence[list[dict[str, Any]]]) -> dict[str, list[_Run]]:
    """Stage 3: each rank has ceil(numel / ranks) elements of each parameter; a sub-group concatenates these."""
    shapes = files.model["param_shapes"]
    runs: dict[str, list[_Run]] = {}
    _same_number(files, len(shapes), banks)
    for number, bank in enumerate(shapes):
        start = 0
        for name, shape in bank.items():
            numel = torch.Size(shape).numel()
            size = -(-numel // files.world_size)
            parts = [Interval(min(r * size, numel), min((r + 1) * size, numel)) for r in range(files.world_size)]
            runs[name] = [
                _Run(interval=part, rank=rank, bank=number, start=start)
                for rank, part in enumerate(parts)
                if part.numel > 0
            ]
            start += size
        for rank in range(files.world_size):
            there = banks[rank][number][MASTER].numel()
            if there != start:
                raise _unfitting(
                    files,
                    f"sub-group {number} has {start} elements per rank, but rank {rank}'s file {there} (state offloaded to "
                    "NVMe is not supported)",
                )
    return runs


def _same_number(files: DeepSpeedFiles, expected: int, banks: Sequence[list[dict[str, Any]]]) -> None:
    for rank, of_rank in enumerate(banks):
        if len(of_rank) != expected:
            raise _unfitting(
                files, f"the model file names {expected} groups, but rank {rank}'s file has {len(of_rank)}"
            )


def _unfitting(files: DeepSpeedFiles, fault: str) -> CheckpointError:
    return CheckpointError(
        f"hf_zero: {files.step_folder}: {fault}. The files are not from one checkpoint, are damaged, or are of a variant that "
        "is not supported; resume from another checkpoint."
    )
