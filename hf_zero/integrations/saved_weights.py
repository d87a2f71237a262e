"""Reads saved weights of any layout, shard by shard."""

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

from ..buckets.rows import MASTER
from ..buckets.unread_weights import mark_loaded, wanted_dtype
from ..checkpoint.commit import on_all_ranks
from ..checkpoint.files import CheckpointError, is_inside, no_folder, read_mapping, refuse_links
from ..checkpoint.manifest import WEIGHTS, Manifest, SaveIdentity
from ..checkpoint.reader import CheckpointReader, dtype_named, mapped_tensors
from ..checkpoint.structure import is_foreign, newest_first, weight_shards_of
from ..checkpoint.writer import dtype_name
from ..comm.ledger import Label
from ..engine.assemble import FILES_ATTRIBUTE
from ..engine.engine import ZeroEngine
from ..engine.models import is_of_first
from ..engine.split_model import read_part
from ..extras import extra
from ..layout.boxes import Box
from ..layout.intervals import Interval
from .config_model import expected_tensors, meta_model
from .progress_bars import progress_bar
from .state_io import AFTER_A_FAILED_LOAD, ZERO_FOLDER, refuse_mixed_parts
from .weight_rows import tensors_by_saved_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# ---- Tensors of weights files as blocks of the model's tensors, for example one file tensor per expert ----
#
# transformers merges such tensors when loading a model, and splits them when saving. Here transformers splits tensors whose
# memory is never touched: each piece's offset and strides identify its block of the whole tensor.


@dataclass(frozen=True, kw_only=True)
class FileBlock:
    """A tensor of a file, as a block of a tensor of the model.

    Attributes:
        name: the model tensor's name.
        offsets, sizes: the block's position and sizes in the model tensor.
        shape: the shape in the file, which omits dimensions of one element.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]


class _WithoutCopies(TorchFunctionMode):
    """Returns views unchanged from operations with which transformers would copy them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def blocks_in_files(
    model: "PreTrainedModel", shapes: Mapping[str, tuple[int, ...]], *, then: str
) -> dict[str, FileBlock]:
    """Maps names in weights files to blocks of the model's tensors.

    Args:
        model: the model.
        shapes: shapes of the model's whole tensors, by name.
        then: advice that ends the error message.

    Raises:
        CheckpointError: transformers computes a file's tensors from the model's in a way other than slicing.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # Untouched memory is never allocated by the operating system.
    untouched = {name: torch.empty(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    # Skip empty tensors: without memory, all have the same address and could not be distinguished.
    name_of = {tensor.untyped_storage().data_ptr(): name for name, tensor in untouched.items() if tensor.numel()}
    with _WithoutCopies():
        # Run on untouched memory: offset and strides of the returned views identify each file tensor's block.
        saved = revert_weight_conversion(model, dict(untouched))
    found = {}
    for file_name, view in saved.items():
        name = name_of.get(view.untyped_storage().data_ptr())
        block = None if name is None else _block_of(view, shapes[name])
        if name is None or block is None:
            raise CheckpointError(
                f"hf_zero: the tensor {file_name!r} of a weights file is no block of one of the model's tensors: transformers "
                f"computes {type(model).__name__}'s from it. {then}"
            )
        found[file_name] = FileBlock(name=name, offsets=block[0], sizes=block[1], shape=tuple(view.shape))
    return found


def unloaded(model: "PreTrainedModel") -> "PreTrainedModel":
    """Returns a model of the same class and config, without values and without knowledge of any file."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _block_of(view: torch.Tensor, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns (offsets, sizes) in a contiguous tensor of `shape`; None if the view is not a block."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    left = int(view.storage_offset())
    offsets, sizes = [], [1] * len(shape)
    for stride in strides:
        offset, left = divmod(left, stride)
        offsets.append(offset)
    dim = -1
    for size, stride in zip(view.shape, view.stride()):
        if size == 1:
            continue
        # Search after the dimension found before: a transposed view has the same strides in a different order and is not a
        # block.
        dim = next((d for d in range(dim + 1, len(shape)) if strides[d] == stride and shape[d] >= size), len(shape))
        if dim == len(shape) or offsets[dim] + size > shape[dim]:
            return None
        sizes[dim] = size
    return tuple(offsets), tuple(sizes)


# ---- Weights left in their files until an engine reads its part of each ----

_HEADER_BYTES = 64 * 1024


def leave_in_checkpoint(model: torch.nn.Module, folder: Path) -> bool:
    """Makes each parameter a view of a checkpoint's memory-mapped weights file, as `hf_zero.init` does with pretrained ones.

    Returns:
        False, with the model unchanged, if the files do not contain exactly the model's tensors under their own names.
    """
    files = [folder / name for name in weight_files(folder)]
    views: dict[str, torch.Tensor] = {}
    for file in files:
        views |= mapped_tensors(file)
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    held = {id(tensors[name]) for name in views if name in tensors}
    if not views.keys() <= tensors.keys() or not all(id(p) in held for p in model.parameters()):
        return False
    if any(tensors[name].shape != view.shape for name, view in views.items()):
        return False
    for name, view in views.items():
        tensor = tensors[name]
        if isinstance(tensor, torch.nn.Parameter):
            # Before `data` is replaced, which changes the parameter's dtype.
            wanted = wanted_dtype(tensor)
            tensor.data = view
            mark_loaded(tensor, wanted)
        else:
            tensor.copy_(view)
    model.__dict__[FILES_ATTRIBUTE] = describe_files(files)
    return True


def describe_files(files: Iterable[str | Path]) -> str:
    """Describes the files by sizes and headers, so ranks can check that they read the same model."""
    described = []
    for file in map(Path, files):
        with file.open("rb") as opened:
            # Only the start, with names, dtypes and shapes: otherwise each rank would read all files to use only a part.
            header = hashlib.sha256(opened.read(_HEADER_BYTES)).hexdigest()[:12]
        described.append(f"{file.name} ({file.stat().st_size} bytes, begins {header})")
    return ", ".join(described)


# ---- Weights in the ranks' shards instead of `from_pretrained` files, loaded into a model in training ----


def has_row_weights(checkpoint: Path, folder: str = ZERO_FOLDER) -> bool:
    """Whether one of our checkpoints has layout `sharded`. `folder`: the model's engine folder inside the checkpoint."""
    return (checkpoint / folder).is_dir() and bool(Manifest.read(checkpoint / folder).weights)


def load_row_weights(engine: ZeroEngine, checkpoint: Path, folder: str = ZERO_FOLDER) -> None:
    """Replaces the model's values by those of a checkpoint with layout `sharded`. Collective.

    Every rank reads its own part. Tensors outside of all buckets (buffers, and below stage 3 frozen parameters) are read by
    rank 0 and broadcast.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged, belongs to a different model, or a rank's disk lacks
            files.
    """
    tensors = tensors_by_saved_name(engine.model)
    parameters = engine.state.bucketed_parameters()
    bucketed = {id(parameter) for parameter in parameters}
    saved_here = {id(tensor) for tensor in tensors.values()}
    # The base model of adapters, of which a checkpoint stores only the checksum.
    left_out = {parameter for parameter in parameters if id(parameter) not in saved_here}

    def load_own() -> tuple[list[str], SaveIdentity]:
        with CheckpointReader(checkpoint / folder) as reader:
            saved = {name: weight.shape for name, weight in reader.manifest.weights.items()}
            name_of = names_in(
                saved, tensors, {n: engine.state.box_of(t).shape for n, t in tensors.items()}, checkpoint
            )
            with progress_bar("reading weights", is_main=engine.world_groups.rank == 0) as show:

                def read(parameter: torch.Tensor, interval: Interval) -> torch.Tensor:
                    values = reader.read(WEIGHTS, name_of[id(parameter)], interval)
                    show(values.nbytes)
                    return values

                engine.state.load_weights(read, left_out)
            others = [name for name in reader.manifest.weights if id(tensors[name]) not in bucketed]
            for name in others:
                if engine.state.group_of(tensors[name]).all_groups.rank > 0:
                    continue
                box = engine.state.box_of(tensors[name])
                values = read_part(box, Interval(0, box.numel), partial(reader.read, WEIGHTS, name))
                # Only the first rank with this tensor reads it; the other ranks get the values in the broadcast below.
                tensors[name].detach().copy_(values.view(tensors[name].shape))
            return others, reader.manifest.identity

    # All ranks finish reading before any broadcast: otherwise a rank with a damaged file would leave the others waiting.
    read = on_all_ranks(engine.world.exchange, load_own, doing=f"read {checkpoint}", then=AFTER_A_FAILED_LOAD)
    refuse_mixed_parts(checkpoint, [identity for _, identity in read])
    others, _ = read[0]
    # After the read, each rank has only its own part, and stages 0 to 2 need whole parameters.
    engine.state.share_weights()
    for name in others:
        transport = engine.state.group_of(tensors[name]).all_transport
        transport.broadcast(tensors[name].detach(), Label(kind="broadcast loaded", subject=name))


def names_in(
    saved: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Path,
) -> dict[int, str]:
    """Maps the id of each of the model's tensors to its name in the checkpoint.

    Args:
        saved: the checkpoint's names and shapes.
        tensors: the model's tensors, by name.
        shapes: shapes of the model's whole tensors.
        checkpoint: the checkpoint's folder, for the error.
    """
    name_of = {id(tensors[name]): name for name in saved if name in tensors}
    strange = [name for name, shape in saved.items() if name not in tensors or shapes[name] != shape]
    missing = [name for name, tensor in tensors.items() if id(tensor) not in name_of]
    if strange or missing:
        name = (strange or missing)[0]
        here = shapes.get(name, "no such tensor")
        raise CheckpointError(
            f"{checkpoint} is of another model: {name!r} has shape {saved.get(name, 'none')} there, and the model has {here}. "
            "Resume with the model config that the checkpoint was made with"
        )
    return name_of


# ---- The weights in a folder from any writer: tensors, files and contents ----

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
            raise CheckpointError(f"hf_zero: {index} is damaged: its weight_map is no mapping from tensors to files.")
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
    inside = "" if newest is None else f"; {newest.name} is inside, so give {newest}"
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
            raise CheckpointError(
                f"hf_zero: {checkpoint} has a master of {nameless[0]!r}, which is no name of its weights."
            )
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
