"""Optimizer state of this rank's rows as (kind, name, interval, tensor), for saving and loading."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...buckets.bucket import Row
from ...buckets.packed_state import PackedPart
from ...buckets.rows import MASTER, OUTER, REPLICA, RESIDUAL, KindsOf, Read, StateRow, kind_of, name_of
from ...layout.intervals import Interval
from .bucket_state import is_elementwise
from .holder import StateHolder
from .optimizer import ShardedOptimizer
from .state_kinds import with_dimensions


def state_rows(
    optimizers: Sequence[ShardedOptimizer], rows: Sequence[Row], holder: StateHolder, replica: int
) -> Iterator[StateRow]:
    """All that is a tensor with dimensions: masters with more digits than the parameters, and optimizer state.

    What `holder` has in files or in blocks is read when the tensor is looked at, so that a part at a time passes through memory.

    Args:
        replica: of which model the state is. Masters are the same in all, and the first's only.
    """
    prefix = f"{REPLICA}{replica}." if replica else ""
    for row in rows:
        state = state_of(optimizers, row)
        tensors = {kind_of(n): holder.view(row, n, there) for n, there in elementwise_state(state, row).items()}
        if row.slot.bucket.precision.rounds and not replica:
            tensors = {MASTER: holder.master_view(row), **tensors}
        for kind, tensor in tensors.items():
            yield StateRow(
                kind=prefix + kind,
                name=row.slot.name,
                interval=row.layout.in_parameter,
                own_shape=None,
                tensor=tensor if isinstance(tensor, PackedPart) else tensor.reshape(-1),
            )
        for name, tensor in own_shaped_state(state, row).items():
            yield StateRow(
                kind=prefix + kind_of(name),
                name=row.slot.name,
                interval=Interval(0, tensor.numel()),
                own_shape=tuple(tensor.shape),
                tensor=tensor.reshape(-1),
            )


def state_scalars(
    optimizers: Sequence[ShardedOptimizer], rows: Sequence[Row], holder: StateHolder
) -> dict[str, dict[str, Any]]:
    """Parameter name → state that is one value for all its elements (`step`): numbers, or 0-d tensors as they are."""
    scalars: dict[str, dict[str, Any]] = {}
    for row in rows:
        state = state_of(optimizers, row)
        tensors = elementwise_state(state, row) | own_shaped_state(state, row)
        scalars[row.slot.name] = {kind_of(name): value for name, value in state.items() if name not in tensors}
    return scalars


def fill_rows(
    optimizers: Sequence[ShardedOptimizer],
    rows: Sequence[Row],
    read: Read,
    kinds_of: KindsOf,
    scalars_of: Callable[[str], dict[str, Any]],
    holder: StateHolder,
    replica: int,
) -> None:
    """Replaces the state of `rows` by what a checkpoint holds.

    Args:
        read: (kind, name, interval) → 1-D host tensor of the interval's elements.
        kinds_of: name → kinds of which the checkpoint has a tensor with one value an element.
        scalars_of: name → the parameter's scalars, and its state tensors of a shape of their own.
        holder: who takes them.
        replica: of which model the state is to be; one that the checkpoint does not have gets the first's.

    Raises:
        ValueError: a state tensor of a shape of its own for a parameter of which this rank has a part only.
    """
    for row in rows:
        name, interval = row.slot.name, row.layout.in_parameter
        scalars = scalars_of(name)
        state = {
            name_of(kind): _placed(scalars[saved], kind, row)
            for kind, saved in _kinds_for(replica, scalars.keys()).items()
        }
        for kind, saved in _kinds_for(replica, kinds_of(name)).items():
            values = read(saved, name, interval)
            if kind == MASTER:
                if row.slot.bucket.precision.has_master:
                    holder.put_master(row, values)
                continue
            state[name_of(kind)] = values.view(row.tensor.shape).to(row.tensor.device)
        owner = _owner_of(optimizers, row)
        if owner is not None:
            optimizer, group = owner.optimizer, owner.optimizer.param_groups[row.slot.bucket.key.group]
            state = _with_step_in_place(with_dimensions(state, row, optimizer, group), row, group)
            kept = holder.put(row, state)
            # An empty entry would look like a step taken.
            optimizer.state.pop(row.tensor, None)
            if kept:
                optimizer.state[row.tensor] = kept


def _kinds_for(replica: int, saved: Iterable[str]) -> dict[str, str]:
    """Kind of a model's state → the kind under which a checkpoint has it."""
    kinds = {kind: kind for kind in saved if not kind.startswith((RESIDUAL, OUTER, REPLICA))}
    prefix = f"{REPLICA}{replica}."
    return kinds | {kind.removeprefix(prefix): kind for kind in saved if kind.startswith(prefix)}


def _owner_of(optimizers: Sequence[ShardedOptimizer], row: Row) -> ShardedOptimizer | None:
    index = row.slot.bucket.key.optimizer
    return optimizers[index] if index >= 0 else None


def state_of(optimizers: Sequence[ShardedOptimizer], row: Row) -> dict[str, Any]:
    """The optimizer's state of a row; empty before its first step."""
    owner = _owner_of(optimizers, row)
    return {} if owner is None else owner.optimizer.state.get(row.tensor, {})


def elementwise_state(state: dict[str, Any], row: Row) -> dict[str, torch.Tensor]:
    """The part of a row's state that has one value an element."""
    return {name: value for name, value in state.items() if is_elementwise(value, row)}


def own_shaped_state(state: dict[str, Any], row: Row) -> dict[str, torch.Tensor]:
    """The tensors of a whole parameter's state that have dimensions, and not one value an element (a factor of rows, say)."""
    tensors = {n: v for n, v in state.items() if torch.is_tensor(v) and v.dim() > 0 and v.shape != row.tensor.shape}
    return tensors if _is_whole(row) else {}


def _is_whole(row: Row) -> bool:
    return row.tensor.shape == row.slot.parameter.shape


def _with_step_in_place(state: dict[str, Any], row: Row, group: Mapping[str, Any]) -> dict[str, Any]:
    """`step` where torch's `load_state_dict` puts it: fused and capturable steps read it on the parameter's device."""
    step = state.get("step")
    if not isinstance(step, torch.Tensor) or not (group.get("fused") or group.get("capturable")):
        return state
    return {**state, "step": step.to(row.tensor.device, torch.float32)}


def _placed(value: Any, kind: str, row: Row) -> Any:
    if not torch.is_tensor(value) or value.dim() == 0:
        return value
    if value.numel() > 1 and not _is_whole(row):
        raise ValueError(
            f"{kind} of {row.slot.name!r} is of the whole parameter, and this run cuts it (`split_parameters`); leave "
            "`split_parameters` as it was when the checkpoint was made"
        )
    return value.to(row.tensor.device)
