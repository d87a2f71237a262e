"""The weights of a model that is split over ranks, as rows of checkpoints: each rank writes its part, nothing is gathered."""

import torch

from ...checkpoint.format.manifest import WEIGHTS, SavedWeight
from ...checkpoint.format.pieces import dtype_name
from ...checkpoint.writer import Row
from ...engine.engine import ZeroEngine
from ...layout.intervals import Interval
from .placed_weights import WeightsPlan, saved_tensors_of


def weight_rows(engine: ZeroEngine) -> WeightsPlan:
    """What this rank writes of the model, under the model's own names; a tied weight once. Collective."""
    with engine.sharded.gathered.lend_names():
        tensors = saved_tensors_of(engine.model)
        weights = {
            name: SavedWeight(dtype=dtype_name(name, tensor.dtype), shape=engine.state.box_of(tensor).shape)
            for name, tensor in _each_once(tensors).items()
        }
    name_of = {id(tensor): name for name, tensor in _each_once(tensors).items()}
    bucketed = {id(parameter) for parameter in engine.state.bucketed_parameters()}
    rows: list[Row] = [
        (WEIGHTS, name_of[id(own.parameter)], own.interval, own.values) for own in engine.state.own_weights()
    ]
    for name, tensor in _each_once(tensors).items():
        # Buffers are no parameters: what the first rank has is what all have.
        writes = (
            engine.state.writes(name, tensor)
            if isinstance(tensor, torch.nn.Parameter)
            else engine.world_groups.rank == 0
        )
        if id(tensor) not in bucketed and writes:
            rows.append((WEIGHTS, name, Interval(0, tensor.numel()), tensor.detach().reshape(-1)))
    return WeightsPlan(rows=rows, weights=weights)


def _each_once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}
