"""A model's tensors under their names in a checkpoint, and the weights of a split model as shards of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..checkpoint.live_pieces import Piece, dtype_name
from ..checkpoint.manifest import WEIGHTS, SavedWeight
from ..checkpoint.rows import Row
from ..engine.engine import ZeroEngine
from ..layout.intervals import Interval

# ---- A model's tensors under their names in a checkpoint ----


def saved_tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the entries of `state_dict` by name, tied weights under each name, without gathering a sharded model."""
    found: dict[str, torch.Tensor] = {}
    # Include duplicates, because `state_dict` contains a module used twice, and a tied parameter, under each name.
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in [*module._parameters.items(), *kept.items()]:
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def tensors_by_saved_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's tensors by their names in a checkpoint; only the adapters for a model with adapters."""
    tensors = saved_tensors_of(model)
    # Imported here because transformers is slow to import.
    from transformers.utils import is_peft_available

    if not is_peft_available():
        return tensors
    from peft import PeftModel, get_peft_model_state_dict

    return get_peft_model_state_dict(model, tensors) if isinstance(model, PeftModel) else tensors


# ---- The weights of a split model as shards in a checkpoint: each rank writes its part, without a gather ----


@dataclass(frozen=True, kw_only=True)
class WeightsPlan:
    """A rank's part of the model to write: pieces of laid-out files, or shards for its own file in `zero/`.

    Attributes:
        weights: the tensors composed of all ranks' shards, by `save_pretrained`'s names; {} without shards.
    """

    pieces: Sequence[Piece] = ()
    rows: Sequence[Row] = ()
    weights: Mapping[str, SavedWeight] = field(default_factory=dict)


def weight_rows(engine: ZeroEngine) -> WeightsPlan:
    """Returns this rank's shards of the model under the model's own names, tied weights once. Collective."""
    with engine.sharded.gathered.without_values():
        # Inside, parameters have the dtype of the saved values, which may differ from the dtype of forward and backward.
        tensors = saved_tensors_of(engine.model)
        weights = {
            name: SavedWeight(dtype=dtype_name(name, tensor.dtype), shape=engine.state.box_of(tensor).shape)
            for name, tensor in _each_once(tensors).items()
        }
    name_of = {id(tensor): name for name, tensor in _each_once(tensors).items()}
    bucketed = {id(parameter) for parameter in engine.state.bucketed_parameters()}
    rows: list[Row] = [
        (WEIGHTS, name_of[id(own.parameter)], own.interval, own.values)
        for own in engine.state.own_weights()
        if id(own.parameter) in name_of
    ]
    for name, tensor in _each_once(tensors).items():
        # Buffers are equal on all ranks, so rank 0 writes them.
        writes = (
            engine.state.writes(name, tensor)
            if isinstance(tensor, torch.nn.Parameter)
            else engine.world_groups.rank == 0
        )
        if id(tensor) not in bucketed and writes:
            rows.append((WEIGHTS, name, Interval(0, tensor.numel()), values_to_save(tensor)))
    return WeightsPlan(rows=rows, weights=weights)


def values_to_save(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor outside of all buckets, flat: a parameter's own values, or a copy of a buffer's values."""
    flat = tensor.detach().reshape(-1)
    # The forward of the next micro-batch may change a buffer, before the save copies values at the optimizer's step.
    return flat if isinstance(tensor, nn.Parameter) else flat.clone()


def _each_once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Reversed, so the first of several names is assigned last and stays.
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}
