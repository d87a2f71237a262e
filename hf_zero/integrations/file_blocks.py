"""Tensors of weights files as blocks of the model's tensors, for example one file tensor per expert."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ..checkpoint.faults import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
                f"hf_zero: the tensor {file_name!r} of a weights file is not a block of one of the model's tensors: "
                f"transformers computes {type(model).__name__}'s tensors from it. {then}"
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
