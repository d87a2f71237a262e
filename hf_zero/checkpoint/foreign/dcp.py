"""Reading FSDP runs saved by torch.distributed.checkpoint, as accelerate and Trainer, transformers or a plain loop do it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...layout.boxes import Box
from ...layout.intervals import Interval
from ..format.manifest import CheckpointError
from .chunks import ChunkedFolder
from .dcp_folder import DcpFolder
from .dcp_optimizer import DcpOptimizer
from .states import MASTER, ForeignCheckpoint
from .weight_shards import WeightShards, weight_shards_of

MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
METADATA_NAME = ".metadata"
_MODEL_KEY = "model"
_OPTIMIZER_KEYS = ("optimizer", "optim")
_THEN = "Continue it with FSDP, or save it there with state_dict_type SHARDED_STATE_DICT."


class DcpCheckpoint(ForeignCheckpoint):
    """Parameters and optimizer state by name, sharded over any mesh. A rank opens only the chunks that hold rows it wants.

    Args:
        folder: with `pytorch_model_fsdp_0/` and `optimizer_0/`; with the `.metadata` of a dictionary that has "model" and
            "optimizer" (or "optim"); or with what `save_pretrained(..., distributed_checkpoint=True)` writes, and in it or in
            a folder of its own what `save_optimizer_distributed` writes.

    Raises:
        CheckpointError: not finished, of the model alone, or written with settings that are not covered.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._model, saved = _opened(folder)
        self._weights = {".".join(map(str, path[1:])): path for path in self._model.entries if path[0] == _MODEL_KEY}
        key = next((key for key in _OPTIMIZER_KEYS if any(path[0] == key for path in saved.entries)), None)
        if key is None or not self._weights:
            wanted = f"{_MODEL_KEY!r} and {' or '.join(map(repr, _OPTIMIZER_KEYS))}"
            found = sorted({str(path[0]) for path in (*self._model.entries, *saved.entries)})[:8]
            raise CheckpointError(f"hf_zero: {folder} holds {found}, and {wanted} are needed to go on. {_THEN}")
        self._optimizer = DcpOptimizer(saved, key, tuple(self._weights))
        self.groups = self._optimizer.groups
        trained = [name for group in self.groups for name in group.names]
        for name in trained:
            if name not in self._weights:
                raise CheckpointError(
                    f"hf_zero: {folder}: the optimizer has {name!r}, and {self._model.folder.name} has not. The two are not of "
                    "one run; resume from another checkpoint."
                )
        self.shapes = {name: self._model.entries[self._weights[name]].shape or () for name in trained}
        self._optimizer.sort_states(self.shapes)
        ranks = {chunk.file for entry in self._model.entries.values() for chunk in entry.chunks}
        self.origin = f"FSDP, torch.distributed.checkpoint of {len(ranks)} files"

    def kinds_of(self, name: str) -> tuple[str, ...]:
        return (MASTER, *self._optimizer.kinds[name])

    def scalars_of(self, name: str) -> dict[str, Any]:
        return {kind: self._optimizer.saved.value(path) for kind, path in self._optimizer.scalars[name].items()}

    def read(self, kind: str, name: str, interval: Interval) -> torch.Tensor:
        return self.read_part(kind, name, Box.whole(self.shapes[name]), interval)

    def read_part(self, kind: str, name: str, box: Box, interval: Interval) -> torch.Tensor:
        if kind == MASTER:
            return self._model.read(self._weights[name], interval, box)
        return self._optimizer.saved.read(self._optimizer.kinds[name][kind], interval, box)

    def other_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in self.weight_shapes().items():
            if name not in self.shapes:
                whole = Interval(0, torch.Size(shape).numel())
                yield name, self._model.read(self._weights[name], whole).view(shape)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: self._model.entries[path].shape for name, path in self._weights.items()}
        return self.shapes | {name: shape for name, shape in shapes.items() if shape is not None}

    def weight_dtype(self, name: str) -> torch.dtype:
        dtype = self._model.entries[self._weights[name]].dtype
        return super().weight_dtype(name) if dtype is None else dtype

    def read_weight(self, name: str, box: Box, interval: Interval) -> torch.Tensor:
        return self._model.read(self._weights[name], interval, box)


def _opened(folder: Path) -> tuple[ChunkedFolder, DcpFolder]:
    if weight_shards_of(folder):
        return WeightShards(folder, _MODEL_KEY), DcpFolder(_optimizer_beside(folder))
    if (folder / METADATA_NAME).is_file():
        both = DcpFolder(folder)
        return both, both
    for needed in (MODEL_FOLDER, OPTIMIZER_FOLDER):
        if not (folder / needed).is_dir():
            raise CheckpointError(f"hf_zero: {folder} has no {needed}/, so the run cannot go on from it. {_THEN}")
    return DcpFolder(folder / MODEL_FOLDER), DcpFolder(folder / OPTIMIZER_FOLDER)


def _optimizer_beside(folder: Path) -> Path:
    """Where transformers' `save_optimizer_distributed` was told to save, next to the weights or below them."""
    found = [place for place in (folder, *sorted(folder.iterdir())) if (place / METADATA_NAME).is_file()]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(
            f"hf_zero: {folder} has weights and no optimizer, so the run cannot go on from it. Save it with "
            "transformers.distributed.save_optimizer_distributed, into the same folder or one in it."
        )
    raise CheckpointError(
        f"hf_zero: {folder} has several folders that may be the optimizer's: {', '.join(str(place) for place in found)}. Leave "
        "the one that was saved with these weights."
    )
