"""Which block of a model's tensor each tensor of a weights file is, where files have a tensor for each expert.

transformers puts such tensors together when it loads a model, and takes them apart when it saves one. Here it takes apart tensors
whose memory is never touched: where a piece begins in that memory, and its strides, tell which block of the whole it is.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ...checkpoint.format.manifest import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class FileBlock:
    """One tensor of a file: a block of a tensor of the model.

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
    """Name in a file → what it has of the model.

    Args:
        shapes: of the model's whole tensors, by name.
        then: what to do where that cannot be said; ends the error.

    Raises:
        CheckpointError: transformers computes a file's tensors from the model's, beyond taking blocks of them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # Memory that is never touched is never given.
    untouched = {name: torch.empty(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    name_of = {tensor.untyped_storage().data_ptr(): name for name, tensor in untouched.items() if tensor.numel()}
    with _WithoutCopies():
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
    """(offsets, sizes) in a contiguous tensor of `shape`; None for a view that is no block of it."""
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
        dim = next((d for d in range(dim + 1, len(shape)) if strides[d] == stride and shape[d] >= size), len(shape))
        if dim == len(shape) or offsets[dim] + size > shape[dim]:
            return None
        sizes[dim] = size
    return tuple(offsets), tuple(sizes)
