"""Loads weights from files into a model without a full copy on each rank, for pretrained models and checkpoints."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, core_model_loading

from ..buckets.unread_weights import mark_loaded
from ..checkpoint.faults import CheckpointError
from ..checkpoint.mapped_tensors import mapped_tensors
from ..checkpoint.on_all_ranks import on_all_ranks
from ..checkpoint.origin import is_foreign
from ..checkpoint.saved_blocks import SavedBlock, read_blocks
from ..config import ZeroConfig
from ..engine.agreed_start import FILES_ATTRIBUTE
from ..engine.engine import ZeroEngine
from ..engine.split_model import read_part
from ..extras import extra
from ..hooks.replaced import replaced
from ..layout.boxes import Box
from ..layout.intervals import Interval
from ..presence.error_hook import ErrorHook
from .file_blocks import FileBlock, blocks_in_files, unloaded
from .lazy_weights import describe_files
from .row_weights import has_row_weights, load_row_weights, names_in
from .saved_weights import weight_files
from .state_io import AFTER_A_FAILED_LOAD, ZERO_FOLDER
from .weight_rows import saved_tensors_of

# ---- A pretrained model whose weights stay in their files until the model is prepared ----


@contextmanager
def init(plugin: Any = None) -> Iterator[None]:
    """`with hf_zero.init(plugin): model = AutoModel.from_pretrained(path)`: weights stay in their files until `prepare`.

    Inside, `from_pretrained` makes each weight a view of its memory-mapped file, in the file's dtype. When the model is
    prepared at stage 3, each rank reads only its own shard from the file and casts it to the dtype requested from
    `from_pretrained`. No rank ever stores, sends or receives the whole model. Weights in no file (a new head) are initialized
    as usual and broadcast from rank 0. A model built from a config is initialized as usual too, so its weights equal those of
    an ordinary seeded run.

    Args:
        plugin: the ZeroPlugin that will train the model, or anything a plugin accepts as config. Below stage 3, where every
            rank has the whole model, nothing is changed.
    """
    ErrorHook.installed()
    config = ZeroConfig.of(getattr(plugin, "config", plugin))
    if not config.may_shard_parameters:
        yield
        return
    stock = PreTrainedModel._load_pretrained_model
    with replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(partial(_leave_in_files, stock))):
        yield


def _leave_in_files(
    stock: Callable[..., Any],
    model: PreTrainedModel,
    state_dict: dict | None,
    checkpoint_files: Sequence[str] | None,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls transformers' loading without its cast, and notes the dtype to which each parameter should be cast."""
    if any(isinstance(entry, core_model_loading.WeightConverter) for entry in load_config.weight_mapping or ()):
        # Weights composed of several tensors of the files are copies anyway.
        return stock(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    # Keep the views until the end, so no other tensor is allocated at the address of one.
    views: dict[int, tuple[torch.Tensor, torch.dtype]] = {}
    materialize = core_model_loading._materialize_copy

    def leave_in_file(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        # Without the dtype, because a cast copies, and each rank would hold the whole model. The engine casts a rank's part.
        values = materialize(tensor, device, None)
        views[values.data_ptr()] = values, dtype or values.dtype
        return values

    with replaced(core_model_loading, "_materialize_copy", leave_in_file):
        result = stock(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    for parameter in model.parameters():
        # By address, because transformers wraps the view in a new Parameter, which shares only the memory.
        if parameter.data_ptr() in views and parameter.is_floating_point():
            mark_loaded(parameter, views[parameter.data_ptr()][1])
    for name, buffer in model.named_buffers():
        if buffer.data_ptr() in views:
            module, _, leaf = name.rpartition(".")
            # Cast here, because an engine reads parameters from files, but uses buffers as they are in the model.
            setattr(model.get_submodule(module), leaf, buffer.to(views[buffer.data_ptr()][1]))
    model.__dict__[FILES_ATTRIBUTE] = describe_files(checkpoint_files or ())
    return result


# ---- Loads a checkpoint into a model that is split over ranks or whose weights are saved as shards ----

_COMPUTED = "Save the model with `save_pretrained` from a run with tp_size, or resume with tp_size 1."


def load_weights_into(engine: ZeroEngine, checkpoint: Path, *, rows: str = ZERO_FOLDER, number: int = 0) -> None:
    """Replaces the model's values by a checkpoint's, in any layout. Collective.

    Args:
        engine: the model's engine.
        checkpoint: the checkpoint's folder.
        rows: name of this model's folder of shards, in a checkpoint of several models.
        number: this model's number among weights files, in a checkpoint of several models.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or of a different model.
    """
    if has_row_weights(checkpoint, rows):
        load_row_weights(engine, checkpoint, rows)
        return
    tensors = saved_tensors_of(engine.model)
    bucketed = {id(parameter) for parameter in engine.state.bucketed_parameters()}

    def load_own() -> None:
        box_of = {id(tensor): engine.state.box_of(tensor) for tensor in tensors.values()}
        shapes = {name: box_of[id(tensor)].shape for name, tensor in tensors.items()}
        weights = (
            _foreign_weights(checkpoint)
            if is_foreign(checkpoint)
            else _file_weights(checkpoint, number, engine.model, shapes)
        )
        name_of = names_in(weights.shapes, tensors, shapes, checkpoint)

        def read(tensor: torch.Tensor, interval: Interval) -> torch.Tensor:
            return weights.read(name_of[id(tensor)], box_of[id(tensor)], interval)

        left_out = {p for p in engine.state.bucketed_parameters() if id(p) not in name_of}
        engine.state.load_own_weights(read, left_out)
        for tensor in {id(each): each for each in tensors.values() if id(each) not in bucketed}.values():
            values = read(tensor, Interval(0, box_of[id(tensor)].numel))
            # Each rank itself reads tensors outside of all buckets, because `share_weights` sends only buckets.
            tensor.detach().copy_(values.view(tensor.shape))

    on_all_ranks(engine.world.exchange, load_own, doing=f"read {checkpoint}", then=AFTER_A_FAILED_LOAD)
    # After all ranks agree: a rank with a damaged file would leave the others waiting in a broadcast.
    engine.state.share_weights()


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """A checkpoint's weights by name.

    Attributes:
        shapes: shapes of the whole weights.
        read: returns the elements of an interval of a part of a weight, 1-D.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, Box, Interval], torch.Tensor]


def _foreign_weights(checkpoint: Path) -> _Weights:
    foreign = extra("foreign", "open_foreign")(checkpoint)
    return _Weights(shapes=foreign.weight_shapes(), read=foreign.read_weight)


def _file_weights(checkpoint: Path, number: int, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> _Weights:
    """Opens files for `from_pretrained`. `shapes`: shapes of the model's whole tensors, by name."""
    files = [mapped_tensors(checkpoint / name) for name in weight_files(checkpoint, number)]
    held = {name: values for file in files for name, values in file.items()}
    if isinstance(model, PreTrainedModel) and not held.keys() <= shapes.keys():
        # The files have other names than the model: experts, for example, are one tensor in the model but many in its files.
        blocks = blocks_in_files(model, shapes, then=_COMPUTED)
        if not held.keys() <= blocks.keys():
            # A model loaded from files with its own names would also be saved with its own names, so ask a new model.
            blocks = blocks_in_files(unloaded(model), shapes, then=_COMPUTED)
        return _weights_in_blocks(held, blocks, shapes)

    def read(name: str, box: Box, interval: Interval) -> torch.Tensor:
        flat = held[name].reshape(-1)
        return read_part(box, interval, lambda run: flat[run.start : run.stop])

    return _Weights(shapes={name: tuple(values.shape) for name, values in held.items()}, read=read)


def _weights_in_blocks(
    held: Mapping[str, torch.Tensor], blocks: Mapping[str, FileBlock], shapes: Mapping[str, tuple[int, ...]]
) -> _Weights:
    """Opens files with several tensors for one of the model's.

    Args:
        held: the files' tensors, by name.
        blocks: the block of the model that each file tensor stores.
        shapes: shapes of the model's whole tensors.
    """
    found: dict[str, list[SavedBlock]] = {}
    for name, values in held.items():
        block = blocks.get(name)
        if block is None or tuple(values.shape) != block.shape:
            wanted = "has no such tensor" if block is None else f"needs {block.shape}"
            raise CheckpointError(
                f"hf_zero: the files have {name!r} of shape {tuple(values.shape)}, but the model {wanted}. Resume with the model "
                "config that the checkpoint was made with."
            )
        found.setdefault(block.name, []).append(
            SavedBlock(offsets=block.offsets, sizes=block.sizes, load=partial(values.view, block.sizes))
        )
    for name, parts in found.items():
        numel = sum(math.prod(part.sizes) for part in parts)
        if numel != math.prod(shapes[name]):
            raise CheckpointError(
                f"hf_zero: the files have {numel} of the {math.prod(shapes[name])} elements of {name!r}: some of its "
                "tensors are missing. Resume from another checkpoint."
            )

    def read(name: str, box: Box, interval: Interval) -> torch.Tensor:
        return read_blocks(box, interval, found[name])

    return _Weights(shapes={name: shapes[name] for name in found}, read=read)
