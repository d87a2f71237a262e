"""Reading a DeepSpeed ZeRO-1, -2 or -3 checkpoint by parameter and interval. The layout is written down in FORMATS.md.

Both layouts come to one picture: a *bank* (a parameter group at stages 1 and 2, a sub-group at stage 3) is a flat tensor
on each rank, and a parameter is a list of runs, each a part of its elements in one bank of one rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...layout.intervals import Interval
from ...layout.reshard import pieces_for
from ..format.manifest import CheckpointError
from .deepspeed_files import DeepSpeedFiles, open_files
from .pickles import load_deepspeed_file
from .states import MASTER, ForeignCheckpoint, ForeignGroup


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A part of a parameter's elements: `interval` of it, from element `start` of a bank on a rank."""

    interval: Interval
    rank: int
    bank: int
    start: int


class DeepSpeedCheckpoint(ForeignCheckpoint):
    """One step of a DeepSpeed ZeRO run; its files stay mapped while it lives.

    Raises:
        CheckpointError: not whole, or of a variant that is not covered.
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
            # Fused optimizers count in the group.
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
                    f"hf_zero: {files.step_folder}: the frozen parameter {name!r} of shape {tuple(shape)} is not there as a "
                    f"whole ({error}). Resume from another checkpoint."
                ) from error

    def _bank_of(self, name: str) -> int:
        return self._runs[name][0].bank

    def _refuse_short(self) -> None:
        """Every run must lie inside every kind of its bank: a state that is elsewhere (NVMe) has no elements here."""
        for name, runs in self._runs.items():
            kinds = self.kinds_of(name)
            for run in runs:
                for kind in kinds:
                    value = self._banks[run.rank][run.bank].get(kind)
                    there = value.numel() if isinstance(value, torch.Tensor) else 0
                    if there < run.start + run.interval.numel:
                        raise CheckpointError(
                            f"hf_zero: {self.folder} ({self.origin}): rank {run.rank} has {there} elements of {kind} in bank "
                            f"{run.bank}, and {name!r} needs {run.start + run.interval.numel}. State offloaded to NVMe and "
                            "compressed optimizers are not covered; otherwise the file is damaged, resume from another "
                            "checkpoint."
                        )


def _banks_of(state: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """One rank's banks: kind → flat tensor, or a value that holds for all of the bank."""
    if int(state["zero_stage"]) == 3:
        masters, saved = state.get("fp32_flat_groups"), state.get("optimizer_state_dict")
    else:
        masters, saved = state.get("single_partition_of_fp32_groups"), state.get("base_optimizer_state")
    if not isinstance(masters, list | tuple) or saved is None:
        raise CheckpointError(
            f"hf_zero: {folder}: a rank's file has no fp32 masters or no optimizer state, so the run cannot go on from it (saved "
            "without optimizer state?). Export its weights with DeepSpeed's zero_to_fp32.py and start from those."
        )
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"hf_zero: {folder} was written with elastic_checkpoint, which is not covered. Continue it with DeepSpeed, and "
            "save it there without that setting."
        )
    order = [index for group in saved["param_groups"] for index in group["params"]]
    states = [saved["state"].get(index, {}) for index in order]
    if len(states) != len(masters):
        raise CheckpointError(
            f"hf_zero: {folder}: a rank's file has masters of {len(masters)} groups and state of {len(states)}; it is damaged, "
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
    """Stages 1 and 2: a group's parameters one after another, padded, and cut into equal partitions, one a rank."""
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
                f"the model file names {len(group)} parameters in group {number} and the optimizer's {len(between[number])}",
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
                files, f"group {number} has {offset} elements and {size} on each of {files.world_size} ranks"
            )
    return runs


def _per_parameter(files: DeepSpeedFiles, banks: Sequence[list[dict[str, Any]]]) -> dict[str, list[_Run]]:
    """Stage 3: each parameter is cut into ceil(numel / ranks) elements a rank, and a sub-group is those one after another."""
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
                    f"sub-group {number} has {start} elements a rank and rank {rank}'s file {there} (state offloaded to NVMe "
                    "is not covered)",
                )
    return runs


def _same_number(files: DeepSpeedFiles, expected: int, banks: Sequence[list[dict[str, Any]]]) -> None:
    for rank, of_rank in enumerate(banks):
        if len(of_rank) != expected:
            raise _unfitting(files, f"the model file names {expected} groups and rank {rank}'s file has {len(of_rank)}")


def _unfitting(files: DeepSpeedFiles, fault: str) -> CheckpointError:
    return CheckpointError(
        f"hf_zero: {files.step_folder}: {fault}. The files are not of one checkpoint, are damaged, or are of a variant that is "
        "not covered; resume from another checkpoint."
    )
