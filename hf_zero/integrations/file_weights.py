"""Weights of any checkpoint into a model that is split over ranks: each rank reads its own part."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.commit import on_all_ranks
from ..checkpoint.files import CheckpointError
from ..checkpoint.pieces import SavedBlock, mapped_tensors, read_blocks
from ..checkpoint.structure import is_foreign
from ..engine.engine import ZeroEngine
from ..engine.split_model import read_part
from ..extras import extra
from ..layout.boxes import Box
from ..layout.slots import Interval
from .placed_weights import saved_tensors_of
from .saved_weights import (
    FileBlock,
    blocks_in_files,
    has_row_weights,
    load_row_weights,
    names_in,
    unloaded,
    weight_files,
)

_THEN = "Nothing was trained; resume from another checkpoint."
_COMPUTED = "Save the model with `save_pretrained` from a run with tp_size, or resume with tp_size 1."


def load_weights_into(engine: ZeroEngine, checkpoint: Path) -> None:
    """Replaces the model's values by a checkpoint's, in any layout. Collective.

    Raises:
        CheckpointError: on every rank: damaged, or of another model.
    """
    if has_row_weights(checkpoint):
        load_row_weights(engine, checkpoint)
        return
    tensors = saved_tensors_of(engine.model)
    bucketed = {id(parameter) for parameter in engine.state.bucketed_parameters()}

    def load_own() -> None:
        box_of = {id(tensor): engine.state.box_of(tensor) for tensor in tensors.values()}
        shapes = {name: box_of[id(tensor)].shape for name, tensor in tensors.items()}
        weights = (
            _foreign_weights(checkpoint) if is_foreign(checkpoint) else _file_weights(checkpoint, engine.model, shapes)
        )
        name_of = names_in(weights.shapes, tensors, shapes, checkpoint)

        def read(tensor: torch.Tensor, interval: Interval) -> torch.Tensor:
            return weights.read(name_of[id(tensor)], box_of[id(tensor)], interval)

        engine.state.load_own_weights(read)
        for tensor in {id(each): each for each in tensors.values() if id(each) not in bucketed}.values():
            values = read(tensor, Interval(0, box_of[id(tensor)].numel))
            tensor.detach().copy_(values.view(tensor.shape))

    on_all_ranks(engine.world.exchange, load_own, doing=f"read {checkpoint}", then=_THEN)
    engine.state.share_weights()


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """Weights of a checkpoint by name.

    Attributes:
        shapes: whole ones.
        read: the elements of an interval of a part of a weight, 1-D.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, Box, Interval], torch.Tensor]


def _foreign_weights(checkpoint: Path) -> _Weights:
    foreign = extra("foreign", "open_foreign")(checkpoint)
    return _Weights(shapes=foreign.weight_shapes(), read=foreign.read_weight)


def _file_weights(checkpoint: Path, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> _Weights:
    """Opens files that `from_pretrained` reads. `shapes`: of the model's whole tensors, by name."""
    files = [mapped_tensors(checkpoint / file) for file in weight_files(checkpoint)]
    held = {name: values for file in files for name, values in file.items()}
    if isinstance(model, PreTrainedModel) and not held.keys() <= shapes.keys():
        blocks = blocks_in_files(model, shapes, then=_COMPUTED)
        if not held.keys() <= blocks.keys():
            # A model that was loaded from files with its own names would be saved with those.
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
        held: of the files, by name there.
        blocks: what each of them is of the model.
        shapes: of the model's whole tensors.
    """
    found: dict[str, list[SavedBlock]] = {}
    for name, values in held.items():
        block = blocks.get(name)
        if block is None or tuple(values.shape) != block.shape:
            wanted = "has no such tensor" if block is None else f"wants {block.shape}"
            raise CheckpointError(
                f"hf_zero: the files have {name!r} of shape {tuple(values.shape)}, and the model {wanted}. Resume with the model "
                "config that the checkpoint was made with."
            )
        found.setdefault(block.name, []).append(
            SavedBlock(offsets=block.offsets, sizes=block.sizes, load=partial(values.view, block.sizes))
        )
    for name, parts in found.items():
        numel = sum(math.prod(part.sizes) for part in parts)
        if numel != math.prod(shapes[name]):
            raise CheckpointError(
                f"hf_zero: the files have {numel} of the {math.prod(shapes[name])} elements of {name!r}: tensors of it are "
                "missing. Resume from another checkpoint."
            )

    def read(name: str, box: Box, interval: Interval) -> torch.Tensor:
        return read_blocks(box, interval, found[name])

    return _Weights(shapes={name: shapes[name] for name in found}, read=read)
