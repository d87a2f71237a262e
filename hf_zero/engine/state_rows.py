"""Optimizer state row by row: reads, writes, gathers and resizes state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..buckets.bucket import Row
from ..buckets.rows import MASTER, OUTER, REPLICA, RESIDUAL, KindsOf, PackedPart, Read, StateRow, name_of
from ..layout.intervals import Interval
from ..optimizer.bucket_state import is_elementwise
from ..optimizer.nested_state import flat_state, nested_state, with_each
from ..optimizer.storage import OptimizerStorage
from ..optimizer.trial_step import with_dimensions
from ..step.sharded_optimizer import ShardedOptimizer
from .models import is_outside

# ---- Optimizer state of this rank's rows as (kind, name, interval, tensor), for saving and loading ----


def state_rows(
    optimizers: Sequence[ShardedOptimizer],
    rows: Sequence[Row],
    storage: OptimizerStorage,
    replica: int,
) -> Iterator[StateRow]:
    """Yields all state tensors with dimensions: masters with a wider dtype than the parameters, and optimizer state.

    State in files or blocks is read when its tensor is accessed, so only a part is in memory at a time.

    Args:
        replica: index of the model with outer steps. Masters are equal in all models, and only the first yields them.
    """
    prefix = f"{REPLICA}{replica}." if replica else ""
    for row in rows:
        state, bucket = flat_state(state_of(optimizers, row)), row.slot.bucket
        tensors = {
            kind: storage.view(row, name_of(kind), there) for kind, there in elementwise_state(state, row).items()
        }
        if (bucket.precision.rounds or is_outside(row.slot.name)) and not replica:
            # No file of weights has the values of parameters outside of all models.
            tensors = {MASTER: storage.master_view(row), **tensors}
        for kind, tensor in tensors.items():
            yield StateRow(
                kind=prefix + kind,
                name=row.slot.name,
                interval=row.layout.in_parameter,
                own_shape=None,
                tensor=tensor if isinstance(tensor, PackedPart) else tensor.reshape(-1),
            )
        for kind, tensor in own_shaped_state(state, row).items():
            yield StateRow(
                kind=prefix + kind,
                name=row.slot.name,
                interval=Interval(0, tensor.numel()),
                own_shape=tuple(tensor.shape),
                tensor=tensor.reshape(-1),
            )


def state_scalars(optimizers: Sequence[ShardedOptimizer], rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Maps parameter names to state with one value for all elements (`step`), as numbers or unchanged 0-d tensors."""
    scalars: dict[str, dict[str, Any]] = {}
    for row in rows:
        state = flat_state(state_of(optimizers, row))
        tensors = elementwise_state(state, row) | own_shaped_state(state, row)
        scalars[row.slot.name] = {kind: value for kind, value in state.items() if kind not in tensors}
    return scalars


def fill_rows(
    optimizers: Sequence[ShardedOptimizer],
    rows: Sequence[Row],
    read: Read,
    kinds_of: KindsOf,
    scalars_of: Callable[[str], dict[str, Any]],
    storage: OptimizerStorage,
    replica: int,
) -> None:
    """Replaces the state of `rows` by the state of a checkpoint.

    Args:
        read: (kind, name, interval) → 1-D host tensor of the interval's elements.
        kinds_of: name → kinds in the checkpoint with one value per element.
        scalars_of: name → the parameter's scalars, and its state tensors of other shapes.
        storage: stores the state.
        replica: index of the model. A model missing in the checkpoint gets the first model's state.

    Raises:
        ValueError: a state tensor has another shape than its parameter, and this rank only has a part of the parameter.
    """
    for row in rows:
        name, bucket, interval = row.slot.name, row.slot.bucket, row.layout.in_parameter
        scalars = scalars_of(name)
        flat = {kind: _placed(scalars[saved], kind, row) for kind, saved in _kinds_for(replica, scalars.keys()).items()}
        for kind, saved in _kinds_for(replica, kinds_of(name)).items():
            values = read(saved, name, interval)
            if kind == MASTER:
                # Without a separate master, the optimizer updates the parameters, which are loaded before the state. Parameters
                # without values in a file of weights are loaded here.
                if bucket.precision.keeps_master or is_outside(name):
                    storage.put_master(row, values)
                continue
            flat[kind] = values.view(row.tensor.shape).to(row.tensor.device)
        state = nested_state(flat)
        owner = _owner_of(optimizers, row)
        if owner is not None:
            optimizer, group = owner.optimizer, owner.optimizer.param_groups[bucket.key.group]
            state = _with_step_in_place(with_dimensions(state, row, optimizer, group), row, group)
            kept = storage.put(row, state)
            # An empty entry would look like a previous step.
            optimizer.state.pop(row.tensor, None)
            if kept:
                optimizer.state[row.tensor] = kept


def _kinds_for(replica: int, saved: Iterable[str]) -> dict[str, str]:
    """Maps kinds of a model's state to the kinds in a checkpoint."""
    kinds = {kind: kind for kind in saved if not kind.startswith((RESIDUAL, OUTER, REPLICA))}
    prefix = f"{REPLICA}{replica}."
    return kinds | {kind.removeprefix(prefix): kind for kind in saved if kind.startswith(prefix)}


def _owner_of(optimizers: Sequence[ShardedOptimizer], row: Row) -> ShardedOptimizer | None:
    index = row.slot.bucket.key.optimizer
    return optimizers[index] if index >= 0 else None


def state_of(optimizers: Sequence[ShardedOptimizer], row: Row) -> dict[str, Any]:
    """Returns the optimizer's state of a row; empty before its first step."""
    owner = _owner_of(optimizers, row)
    return {} if owner is None else owner.optimizer.state.get(row.tensor, {})


def elementwise_state(state: dict[str, Any], row: Row) -> dict[str, torch.Tensor]:
    """Returns the part of a row's state with one value per element."""
    return {name: value for name, value in state.items() if is_elementwise(value, row)}


def own_shaped_state(state: dict[str, Any], row: Row) -> dict[str, torch.Tensor]:
    """Returns the tensors of a whole parameter's state with other shapes than the parameter, such as a factor of rows."""
    tensors = {n: v for n, v in state.items() if torch.is_tensor(v) and v.dim() > 0 and v.shape != row.tensor.shape}
    return tensors if _is_whole(row) else {}


def _is_whole(row: Row) -> bool:
    return row.tensor.shape == row.slot.parameter.shape


def _with_step_in_place(state: dict[str, Any], row: Row, group: Mapping[str, Any]) -> dict[str, Any]:
    """Moves `step` like torch's `load_state_dict`: fused and capturable steps read the tensor on the device."""
    step = state.get("step")
    if not isinstance(step, torch.Tensor) or not (group.get("fused") or group.get("capturable")):
        return state
    return {**state, "step": step.to(row.tensor.device, torch.float32)}


def _placed(value: Any, kind: str, row: Row) -> Any:
    if not torch.is_tensor(value) or value.dim() == 0:
        return value
    if value.numel() > 1 and not _is_whole(row):
        raise ValueError(
            f"{kind} of {row.slot.name!r} covers the whole parameter, but this run's optimizer has parts of it; resume with "
            "the optimizer that the checkpoint was made with"
        )
    return value.to(row.tensor.device)


# ---- Optimizer state of whole parameters, some of them with a new number of rows ----


def on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a parameter's state with its tensors in host memory."""
    return with_each(state, lambda value: value.cpu() if torch.is_tensor(value) else value)


@contextmanager
def resizing(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], states: Mapping[str, Mapping[str, Any]]
) -> Iterator[None]:
    """Lets a script resize parameters of a model without an engine, and then resizes its optimizers' state.

    Args:
        states: parameter name → its whole state, for the optimizers.
    """
    before = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in before.items()}
    yield
    _renew_resized(model, shapes)
    put_state_back(optimizers, states, shapes, before, dict(model.named_parameters()))


def _renew_resized(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Replaces Parameter objects whose shape differs from `shapes` by new ones."""
    # An existing graph (of the last step's loss) expects gradients of the old shape for the old object.
    renewed = {
        parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if name in shapes and parameter.shape != shapes[name]
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in renewed:
                module._parameters[name] = renewed[parameter]


def put_state_back(
    optimizers: Sequence[torch.optim.Optimizer],
    states: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
) -> None:
    """Gives the optimizers the parameters `after` instead of `before`, with the state of the latter.

    Args:
        states: parameter name → its whole state. Tensors of the old shape are resized, with zeros for new rows. If some tensors
            have another shape (such as a factor of rows), a resized parameter starts without state.
        shapes: shapes of the parameters before the resize.
    """
    replacement = {parameter: after[name] for name, parameter in before.items() if name in after}
    name_of = {parameter: name for name, parameter in after.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replacement.get(parameter, parameter) for parameter in group["params"]]
            for parameter in group["params"]:
                name = name_of.get(parameter)
                if name is None or not states.get(name):
                    continue
                old_shape = shapes[name]
                if _can_be_fitted(states[name], old_shape, parameter.shape):
                    fitted = partial(_fitted, old_shape=old_shape, new_shape=parameter.shape)
                    optimizer.state[parameter] = with_each(states[name], fitted)


def _can_be_fitted(state: Mapping[str, Any], old_shape: torch.Size, new_shape: torch.Size) -> bool:
    tensors = [value for value in flat_state(state).values() if torch.is_tensor(value) and value.dim() > 0]
    return old_shape == new_shape or all(value.shape == old_shape for value in tensors)


def _fitted(value: Any, old_shape: torch.Size, new_shape: torch.Size) -> Any:
    if not torch.is_tensor(value) or value.shape != old_shape or old_shape == new_shape:
        return value
    fitted = value.new_zeros(new_shape)
    common = tuple(slice(0, min(old, new)) for old, new in zip(old_shape, new_shape))
    fitted[common] = value[common]
    return fitted
