"""Reads saved weights of any layout, row by row."""

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

from ..buckets.precision import mark_loaded, wanted_dtype
from ..buckets.rows import MASTER
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
from .state_io import AFTER_A_FAILED_LOAD, ZERO_FOLDER, progress_bar, refuse_mixed_parts, tensors_by_saved_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# ---- Tensors of weights files as blocks of the model's tensors, as with one tensor for each expert ----
#
# transformers puts such tensors together when it loads a model, and takes them apart when it saves one. Here it takes apart
# tensors whose memory is never touched: where a piece begins in that memory, and its strides, tell which block of the whole
# it is.


@dataclass(frozen=True, kw_only=True)
class FileBlock:
    """A tensor of a file, as a block of a tensor of the model.

    Attributes:
        name: of the model's tensor.
        offsets, sizes: of the block in it.
        shape: in the file, which leaves out dimensions of one element.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]


class _WithoutCopies(TorchFunctionMode):
    """Leaves views as they are where transformers would copy them into memory of their own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def blocks_in_files(
    model: "PreTrainedModel", shapes: Mapping[str, tuple[int, ...]], *, then: str
) -> dict[str, FileBlock]:
    """Returns name in a file → blocks of the model in it.

    Args:
        shapes: of the model's whole tensors, by name.
        then: what to do where that cannot be said; ends the error.

    Raises:
        CheckpointError: transformers computes a file's tensors from the model's, beyond taking blocks of them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # Memory that is never touched is never given.
    untouched = {name: torch.empty(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    # Empty tensors have no memory, and all of them the same address: one would be taken for another.
    name_of = {tensor.untyped_storage().data_ptr(): name for name, tensor in untouched.items() if tensor.numel()}
    with _WithoutCopies():
        # Run on empty memory: the views that come back show by offset and stride which block each file has.
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
    """A model of the same class and config that has been loaded from nowhere, without values."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _block_of(view: torch.Tensor, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns (offsets, sizes) in a contiguous tensor of `shape`; None for a view that is no block."""
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
        # Behind the dimension found before: a transposed view has the same strides in another order, and is no block.
        dim = next((d for d in range(dim + 1, len(shape)) if strides[d] == stride and shape[d] >= size), len(shape))
        if dim == len(shape) or offsets[dim] + size > shape[dim]:
            return None
        sizes[dim] = size
    return tuple(offsets), tuple(sizes)


# ---- Weights that stay in their files until an engine takes its part of each ----

_HEADER_BYTES = 64 * 1024


def leave_in_checkpoint(model: torch.nn.Module, folder: Path) -> bool:
    """Makes each parameter a view of a checkpoint's memory-mapped weights file, as `hf_zero.init` does with pretrained ones.

    Returns:
        False, and the model untouched, where the files do not have exactly the model's tensors under their own names.
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
            # Before the exchange of values, which takes the dtype of the model away.
            wanted = wanted_dtype(tensor)
            tensor.data = view
            mark_loaded(tensor, wanted)
        else:
            tensor.copy_(view)
    model.__dict__[FILES_ATTRIBUTE] = describe_files(files)
    return True


def describe_files(files: Iterable[str | Path]) -> str:
    """Sizes and headers of the files, by which ranks see that they read the same model."""
    described = []
    for file in map(Path, files):
        with file.open("rb") as opened:
            # The beginning alone, with names, dtypes and shapes: otherwise each rank would read all files, of which the rank
            # takes a part.
            header = hashlib.sha256(opened.read(_HEADER_BYTES)).hexdigest()[:12]
        described.append(f"{file.name} ({file.stat().st_size} bytes, begins {header})")
    return ", ".join(described)


# ---- Weights in rows, not in files for `from_pretrained`: back into a model that trains ----


def has_row_weights(checkpoint: Path, folder: str = ZERO_FOLDER) -> bool:
    """Whether a checkpoint of ours is of layout `sharded`. `folder`: of the model's engine, inside."""
    return (checkpoint / folder).is_dir() and bool(Manifest.read(checkpoint / folder).weights)


def load_row_weights(engine: ZeroEngine, checkpoint: Path, folder: str = ZERO_FOLDER) -> None:
    """Replaces the model's values by those of a checkpoint of layout `sharded`. Collective.

    Every rank reads its own part; what lies in no bucket (buffers, and below stage 3 frozen parameters) rank 0 reads for all.

    Raises:
        CheckpointError: on every rank: damaged, of another model, or with files that a rank's disk does not have.
    """
    tensors = tensors_by_saved_name(engine.model)
    parameters = engine.state.bucketed_parameters()
    bucketed = {id(parameter) for parameter in parameters}
    saved_here = {id(tensor) for tensor in tensors.values()}
    # The base of adapters, which is saved by its checksum.
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
                # On the first rank of those with this tensor; the others get the values in the broadcast below.
                tensors[name].detach().copy_(values.view(tensors[name].shape))
            return others, reader.manifest.identity

    # All ranks have read before any sends: a rank with a damaged file would leave the others in a broadcast.
    read = on_all_ranks(engine.world.exchange, load_own, doing=f"read {checkpoint}", then=AFTER_A_FAILED_LOAD)
    refuse_mixed_parts(checkpoint, [identity for _, identity in read])
    others, _ = read[0]
    # Behind the read: each rank has only its own part, and stages 0 to 2 need the whole.
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
    """id of a tensor of the model → its name in the checkpoint.

    Args:
        saved: shapes there.
        shapes: of the model's whole tensors.
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


# ---- The weights of a folder from any writer: tensors, files and contents ----

ADAPTER_SAFE_WEIGHTS_NAME = "adapter_model.safetensors"
"""peft's. transformers has it, too, and takes half a second to say so."""

_ROOT = "model"
"""Under which weights of one file a rank are read."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor in a weights file: name, file, shape, dtype as safetensors spells it ("F32"), and bytes."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @classmethod
    def packed(cls, name: str, file: str, shape: tuple[int, ...], dtype: str) -> "SavedTensor":
        """Describes a tensor whose elements take as many bytes as their dtype."""
        return cls(
            name=name, file=file, shape=shape, dtype=dtype, nbytes=math.prod(shape) * dtype_named(dtype).itemsize
        )


def weight_files(folder: Path, number: int = 0) -> list[str]:
    """Names of the safetensors files that hold a folder's model, in order.

    Args:
        number: the model's place among those of `accelerator.save_state`, which numbers files from the second model on.

    Raises:
        CheckpointError: there are none, or the index names files that are missing or outside of the folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"hf_zero: {no_folder(folder)}.")
    index = folder / SAFETENSORS_INDEX_FILE
    if index.is_file() and not number:
        # Before the index is opened: a folder from the Hub may hold a link to any file.
        refuse_links(folder, [index])
        weight_map = read_mapping(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"hf_zero: {index} is damaged: its weight_map is no mapping from tensors to files.")
        names = sorted(set(weight_map.values()))
        # An index from the Hub may name any path; only files of this folder are opened.
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
    """Everything that a folder holds of a model, by headers and manifest alone."""
    with open_weights(folder) as weights:
        return weights.tensors


class Weights(ABC):
    """A folder's model, a tensor at a time. A context manager.

    Attributes:
        tensors: all that it has.
        as_in_files: whether they are named and split as `save_pretrained` does it; otherwise as the model's own parameters.
    """

    tensors: list[SavedTensor]
    as_in_files = True

    @abstractmethod
    def read(self, tensor: SavedTensor) -> torch.Tensor:
        """Its values, in its shape, in host memory or mapped from a file."""

    def __enter__(self) -> "Weights":
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...


class FileWeights(Weights):
    """Weights in files that `from_pretrained` reads."""

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
                # Of a header that is no header, which of its errors safetensors raises is its own matter.
                self._stack.close()
                raise CheckpointError(f"hf_zero: {folder / file} cannot be read ({error}).") from error

    def read(self, tensor: SavedTensor) -> torch.Tensor:
        return self._files[tensor.file].get_tensor(tensor.name)

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._stack.close()


class RowWeights(Weights):
    """Weights in the ranks' rows of a checkpoint of layout `sharded`.

    Args:
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
    """Weights in a checkpoint of DeepSpeed ZeRO or FSDP; trained ones in the optimizer's precision."""

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
    """Weights in a file a rank, as `save_pretrained(..., distributed_checkpoint=True)` writes them."""

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
    """The fp32 masters of a run in 16 bits, and the weights of parameters without one.

    Args:
        weights: of the same checkpoint.
    """

    def __init__(self, weights: Weights, checkpoint: Path, others: Sequence[Path] = ()):
        self._weights = weights
        self._reader = CheckpointReader(checkpoint / ZERO_FOLDER, [other / ZERO_FOLDER for other in others])
        manifest = self._reader.manifest
        self._mastered = {name for name, kinds in manifest.kinds.items() if MASTER in kinds}
        # A checkpoint also has masters of other models, and of parameters outside of all.
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
    """A model's own tensors as `save_pretrained` names and splits them: a layer's experts are many tensors in a file.

    Args:
        weights: by the names of the model.
        folder: with the model's config.
    """

    def __init__(self, weights: Weights, folder: Path):
        self._weights = weights
        self._whole = {tensor.name: tensor for tensor in weights.tensors}
        # In a process of its own first: what a config asks for may have no end.
        expected_tensors(folder, len(self._whole))
        model = meta_model(folder, len(self._whole))
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        blocks = blocks_in_files(model, shapes, then="`hf-zero convert` writes it with its optimizer.")
        self._blocks = {name: block for name, block in blocks.items() if block.name in self._whole}
        self._last: tuple[str, torch.Tensor] | None = None
        self.tensors = [
            SavedTensor.packed(name, folder.name, block.shape, self._whole[block.name].dtype)
            # Those of one tensor of the model follow each other, so that it is read once.
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
    # Before the last line: these files end in .safetensors too, and FileWeights would look for one file or an index.
    if weight_shards_of(folder):
        return ShardWeights(folder)
    return (
        ForeignWeights(folder) if not any(folder.glob("*.safetensors")) and is_foreign(folder) else FileWeights(folder)
    )


def is_checkpoint_of_ours(folder: Path) -> bool:
    """Whether a folder has a manifest to be held against."""
    return (folder / ZERO_FOLDER).is_dir()
