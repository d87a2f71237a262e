"""Reading what accelerate and Trainer write of an FSDP run: two folders of torch.distributed.checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...layout.intervals import Interval
from ..format.manifest import CheckpointError
from .dcp_folder import DcpFolder
from .states import MASTER, ForeignCheckpoint, ForeignGroup

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
_THEN = "Continue it with FSDP, or save it there with state_dict_type SHARDED_STATE_DICT."


class DcpCheckpoint(ForeignCheckpoint):
    """A checkpoint with `pytorch_model_fsdp_0/` and `optimizer_0/`. A rank opens only the chunks that hold rows it wants.

    Raises:
        CheckpointError: not finished, of the model alone, or written with settings that are not covered.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for needed in (MODEL_FOLDER, OPTIMIZER_FOLDER):
            if not (folder / needed).is_dir():
                raise CheckpointError(f"hf_zero: {folder} has no {needed}/, so the run cannot go on from it. {_THEN}")
        self._model = DcpFolder(folder / MODEL_FOLDER)
        self._optimizer = DcpFolder(folder / OPTIMIZER_FOLDER)
        self._weights = {".".join(map(str, path[1:])): path for path in self._model.entries if path[0] == "model"}
        self.groups = self._read_groups()
        trained = [name for group in self.groups for name in group.names]
        for name in trained:
            if name not in self._weights:
                raise CheckpointError(
                    f"hf_zero: {folder}: the optimizer has {name!r}, and {MODEL_FOLDER} has not. The two are not of one run; "
                    "resume from another checkpoint."
                )
        self.shapes = {name: self._model.entries[self._weights[name]].shape or () for name in trained}
        self._kinds: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in trained}
        self._scalars: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in trained}
        for path, entry in self._optimizer.entries.items():
            if path[:2] == ("optimizer", "state") and len(path) >= 4:
                name, kind = ".".join(map(str, path[2:-1])), path[-1]
                self._place(name, kind, path, entry.shape)
        ranks = {chunk.file for entry in self._model.entries.values() for chunk in entry.chunks}
        self.origin = f"FSDP, torch.distributed.checkpoint of {len(ranks)} files"

    def kinds_of(self, name: str) -> tuple[str, ...]:
        return (MASTER, *self._kinds[name])

    def scalars_of(self, name: str) -> dict[str, Any]:
        return {kind: self._optimizer.value(path) for kind, path in self._scalars[name].items()}

    def read(self, kind: str, name: str, interval: Interval) -> torch.Tensor:
        if kind == MASTER:
            return self._model.read(self._weights[name], interval)
        return self._optimizer.read(self._kinds[name][kind], interval)

    def other_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, path in self._weights.items():
            shape = self._model.entries[path].shape
            if name not in self.shapes and shape is not None:
                yield name, self._model.read(path, Interval(0, torch.Size(shape).numel())).view(shape)

    def _place(self, name: str, kind: str, path: tuple[Any, ...], shape: tuple[int, ...] | None) -> None:
        if name not in self.shapes:
            raise CheckpointError(
                f"hf_zero: {self.folder}: {OPTIMIZER_FOLDER} has {kind} of {name!r}, which is in none of its groups; the "
                "checkpoint is damaged, resume from another."
            )
        if shape is None or (not shape and (self.shapes[name] or kind == "step")):
            self._scalars[name][kind] = path
        elif shape == self.shapes[name]:
            self._kinds[name][kind] = path
        else:
            raise CheckpointError(
                f"hf_zero: {self.folder}: {kind} of {name!r} has shape {shape} and the parameter {self.shapes[name]}; "
                f"optimizers whose state is no value an element are not covered. {_THEN}"
            )

    def _read_groups(self) -> tuple[ForeignGroup, ...]:
        settings: dict[int, dict[str, Any]] = {}
        for path in self._optimizer.entries:
            if path[:2] == ("optimizer", "param_groups") and len(path) == 4:
                settings.setdefault(path[2], {})[path[3]] = self._optimizer.value(path)
        groups = []
        for _, group in sorted(settings.items()):
            names = group.pop("params", None)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise CheckpointError(f"hf_zero: {self.folder}: the optimizer's groups have no names. {_THEN}")
            groups.append(ForeignGroup(settings=group, names=tuple(names)))
        if not groups:
            raise CheckpointError(f"hf_zero: {self.folder}: {OPTIMIZER_FOLDER} has no groups of parameters. {_THEN}")
        return tuple(group for group in groups if group.names)
