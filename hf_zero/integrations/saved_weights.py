"""The weights in a folder from any writer: tensors, files and contents."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from safetensors import safe_open

from ..buckets.rows import MASTER
from ..checkpoint.faults import CheckpointError
from ..checkpoint.files import is_inside, no_folder, refuse_links
from ..checkpoint.json_files import read_mapping
from ..checkpoint.live_pieces import dtype_name
from ..checkpoint.manifest import WEIGHTS
from ..checkpoint.mapped_tensors import dtype_named
from ..checkpoint.origin import is_foreign, weight_shards_of
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.verify import newest_first
from ..engine.models import is_of_first
from ..extras import extra
from ..layout.boxes import Box
from ..layout.intervals import Interval
from .config_model import expected_tensors, meta_model
from .state_io import ZERO_FOLDER

if TYPE_CHECKING:
    pass
from .file_blocks import blocks_in_files
from .row_weights import has_row_weights

ADAPTER_SAFE_WEIGHTS_NAME = "adapter_model.safetensors"
"""peft's file name. transformers defines the same name, but importing transformers takes half a second."""


_ROOT = "model"
"""The key under which weights in per-rank files are read."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor in a weights file: name, file, shape, dtype as spelled by safetensors ("F32"), and bytes."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @classmethod
    def packed(cls, name: str, file: str, shape: tuple[int, ...], dtype: str) -> "SavedTensor":
        """Describes a tensor whose bytes are its number of elements times its dtype's size."""
        return cls(
            name=name, file=file, shape=shape, dtype=dtype, nbytes=math.prod(shape) * dtype_named(dtype).itemsize
        )


def weight_files(folder: Path, number: int = 0) -> list[str]:
    """Returns the names of the safetensors files with a folder's model, in order.

    Args:
        folder: the folder.
        number: index of the model among those of `accelerator.save_state`, which numbers files from the second model on.

    Raises:
        CheckpointError: there is no such file, or the index names files that are missing or outside of the folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"hf_zero: {no_folder(folder)}.")
    index = folder / SAFETENSORS_INDEX_FILE
    if index.is_file() and not number:
        # Before the index is opened, because a folder from the Hub may contain a link to any file.
        refuse_links(folder, [index])
        weight_map = read_mapping(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(
                f"hf_zero: {index} is damaged: its weight_map is not a mapping from tensors to files."
            )
        names = sorted(set(weight_map.values()))
        # Open only files of this folder, because an index from the Hub may name any path.
        bad = [n for n in names if not is_inside(n) or Path(n).name != n or not (folder / n).is_file()]
        if bad:
            raise CheckpointError(f"hf_zero: {index} names {bad[0][:200]!r}, which is not a file of {folder}.")
        return names
    names = [f"model_{number}.safetensors"] if number else [SAFETENSORS_SINGLE_FILE, ADAPTER_SAFE_WEIGHTS_NAME]
    for name in names:
        if (folder / name).is_file():
            return [name]
    pickled = f"pytorch_model_{number}.bin" if number else "pytorch_model.bin"
    if (folder / pickled).is_file():
        raise CheckpointError(
            f"hf_zero: {folder} holds no {names[0]}, only {pickled}, which runs code when loaded. Save with "
            "`safe_serialization=True`, the default."
        )
    newest = next(newest_first(folder), None)
    inside = "" if newest is None else f"; it holds checkpoints: pass the newest, {newest}"
    raise CheckpointError(f"hf_zero: {folder} holds no {names[0]} and no {SAFETENSORS_INDEX_FILE}{inside}.")


def saved_tensors(folder: Path) -> list[SavedTensor]:
    """Returns all tensors of a folder's model, from headers and manifest only."""
    with open_weights(folder) as weights:
        return weights.tensors


class Weights(ABC):
    """A folder's model, read one tensor at a time. A context manager.

    Attributes:
        tensors: all tensors of the model.
        as_in_files: whether tensors are named and split as `save_pretrained` does; otherwise like the model's own parameters.
    """

    tensors: list[SavedTensor]
    as_in_files = True

    @abstractmethod
    def read(self, tensor: SavedTensor) -> torch.Tensor:
        """Returns a tensor's values in its shape, in host memory or mapped from a file."""

    def __enter__(self) -> "Weights":
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...


class FileWeights(Weights):
    """Weights in files for `from_pretrained`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.tensors = []
        for file in weight_files(folder):
            refuse_links(folder, [folder / file])
            try:
                opened = self._files[file] = self._stack.enter_context(safe_open(folder / file, framework="pt"))
                for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                    view = opened.get_slice(name)
                    shape = tuple(view.get_shape())
                    nbytes = opened.get_tensor(name).nbytes
                    self.tensors.append(
                        SavedTensor(name=name, file=file, shape=shape, dtype=view.get_dtype(), nbytes=nbytes)
                    )
            except Exception as error:
                # safetensors raises various errors for a damaged header.
                self._stack.close()
                raise CheckpointError(f"hf_zero: {folder / file} cannot be read ({error}).") from error

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        return self._files[tensor.file].get_tensor(tensor.name)

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._stack.close()


class RowWeights(Weights):
    """Weights in the ranks' shards of a checkpoint with layout `sharded`.

    Args:
        checkpoint: the checkpoint's folder.
        others: the checkpoint's folders on other hosts' disks.
    """

    def __init__(self, checkpoint: Path, others: Sequence[Path] = ()):
        self._reader = CheckpointReader(checkpoint / ZERO_FOLDER, [other / ZERO_FOLDER for other in others])
        self.tensors = [
            SavedTensor.packed(name, ZERO_FOLDER, weight.shape, weight.dtype)
            for name, weight in self._reader.manifest.weights.items()
        ]

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        return self._reader.read(WEIGHTS, tensor.name, Interval(0, math.prod(tensor.shape))).view(tensor.shape)

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)


class ForeignWeights(Weights):
    """Weights in a checkpoint of DeepSpeed ZeRO or FSDP; trained weights in the optimizer's precision."""

    as_in_files = False

    def __init__(self, folder: Path):
        self._foreign = extra("foreign", "open_foreign")(folder)
        self.tensors = [
            SavedTensor.packed(name, folder.name, shape, dtype_name(name, self._foreign.weight_dtype(name)))
            for name, shape in self._foreign.weight_shapes().items()
        ]

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        whole = self._foreign.read_weight(tensor.name, Box.whole(tensor.shape), Interval(0, math.prod(tensor.shape)))
        return whole.view(tensor.shape)

    def __exit__(self, *error: object) -> None:
        pass


class ShardWeights(Weights):
    """Weights in one file per rank, as written by `save_pretrained(..., distributed_checkpoint=True)`."""

    as_in_files = False

    def __init__(self, folder: Path):
        refuse_links(folder, weight_shards_of(folder))
        self._shards = extra("foreign", "WeightShards")(folder, _ROOT)
        for path in self._shards.entries:
            self._shards.refuse_uncovered(path)
        self.tensors = [
            SavedTensor.packed(name, folder.name, shape, dtype_name(name, dtype))
            for name, (shape, dtype) in self._shards.weights.items()
        ]

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        return self._shards.read((_ROOT, tensor.name), Interval(0, math.prod(tensor.shape))).view(tensor.shape)

    def __exit__(self, *error: object) -> None:
        pass


class MasterWeights(Weights):
    """The fp32 master weights of a 16-bit run, and the weights of parameters without a master.

    Args:
        weights: the weights of the same checkpoint.
        checkpoint, others: see `RowWeights`.
    """

    def __init__(self, weights: Weights, checkpoint: Path, others: Sequence[Path] = ()):
        self._weights = weights
        self._reader = CheckpointReader(checkpoint / ZERO_FOLDER, [other / ZERO_FOLDER for other in others])
        manifest = self._reader.manifest
        self._mastered = {name for name, kinds in manifest.kinds.items() if MASTER in kinds}
        # A checkpoint may also contain masters of further models, and of parameters outside of all models.
        self._mastered = {name for name in self._mastered if is_of_first(name)}
        nameless = sorted(self._mastered - {tensor.name for tensor in weights.tensors})
        if nameless:
            raise CheckpointError(f"hf_zero: {checkpoint} has a master of {nameless[0]!r}, but no weight of that name.")
        self.tensors = [
            replace(tensor, dtype="F32", nbytes=4 * math.prod(tensor.shape))
            if tensor.name in self._mastered
            else tensor
            for tensor in weights.tensors
        ]

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        if tensor.name not in self._mastered:
            return self._weights.read(tensor)
        return self._reader.read(MASTER, tensor.name, Interval(0, math.prod(tensor.shape))).view(tensor.shape)

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)


class InFiles(Weights):
    """A model's own tensors as named and split by `save_pretrained`: a layer's experts are many tensors in a file.

    Args:
        weights: weights under the model's own names.
        folder: the folder with the model's config.
    """

    def __init__(self, weights: Weights, folder: Path):
        self._weights = weights
        self._whole = {tensor.name: tensor for tensor in weights.tensors}
        # First in a separate process, because building the model of an untrusted config may never end.
        expected_tensors(folder, len(self._whole))
        model = meta_model(folder, len(self._whole))
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        blocks = blocks_in_files(model, shapes, then="`hf-zero convert` writes it with its optimizer.")
        self._blocks = {name: block for name, block in blocks.items() if block.name in self._whole}
        self._last: tuple[str, torch.Tensor] | None = None
        self.tensors = [
            SavedTensor.packed(name, folder.name, block.shape, self._whole[block.name].dtype)
            # Blocks of one model tensor follow each other, so each tensor is read once.
            for name, block in sorted(self._blocks.items(), key=lambda item: item[1].name)
        ]

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        block = self._blocks[tensor.name]
        if self._last is None or self._last[0] != block.name:
            self._last = (block.name, self._weights.read(self._whole[block.name]))
        _, whole = self._last
        part = whole[tuple(slice(at, at + size) for at, size in zip(block.offsets, block.sizes))]
        return part.reshape(tensor.shape)

    def __exit__(self, *error: object) -> None:
        pass


def open_weights(folder: Path, others: Sequence[Path] = ()) -> Weights:
    """Opens a folder's model in any layout."""
    if has_row_weights(folder):
        return RowWeights(folder, others)
    if is_checkpoint_of_ours(folder):
        return FileWeights(folder)
    # Before the last line, because these files also end in .safetensors, and FileWeights would look for one file or an index.
    if weight_shards_of(folder):
        return ShardWeights(folder)
    return (
        ForeignWeights(folder) if not any(folder.glob("*.safetensors")) and is_foreign(folder) else FileWeights(folder)
    )


def is_checkpoint_of_ours(folder: Path) -> bool:
    """Whether a folder contains a manifest to check the files against."""
    return (folder / ZERO_FOLDER).is_dir()
