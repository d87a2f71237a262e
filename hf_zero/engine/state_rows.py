"""The state of this rank's rows as (kind, name, interval, tensor), out for a checkpoint and back in from one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..layout.intervals import Interval
from .buckets import Row
from .holder import StateHolder
from .optimizer import ShardedOptimizer

MASTER = "master"
"""The kind of the fp32 copy; every other kind is the optimizer's own name for a state tensor."""


@dataclass(frozen=True, kw_only=True)
class StateRow:
    """One kind of state for one rank's part of one parameter.

    Attributes:
        interval: of the parameter's elements, row-major.
        shape: of the whole parameter.
        tensor: 1-D, of `interval.numel` elements, the live state.
    """

    kind: str
    name: str
    interval: Interval
    shape: tuple[int, ...]
    tensor: torch.Tensor


def state_rows(optimizers: Sequence[ShardedOptimizer], rows: Sequence[Row], holder: StateHolder) -> Iterator[StateRow]:
    """Everything that has one value an element: masters with more digits than the parameters, and optimizer state.

    What `holder` has in files is read when the tensor is looked at, so that a row at a time passes through memory.
    """
    for row in rows:
        tensors = elementwise_state(state_of(optimizers, row), row)
        if row.slot.bucket.precision.rounds:
            tensors = {MASTER: row.tensor.detach(), **tensors}
        for kind, there in tensors.items():
            tensor = holder.view(row, kind, there)
            yield StateRow(
                kind=kind,
                name=row.slot.name,
                interval=row.layout.in_parameter,
                shape=tuple(row.slot.parameter.shape),
                tensor=tensor.reshape(-1),
            )


def state_scalars(optimizers: Sequence[ShardedOptimizer], rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Parameter name → state that is one value for all its elements (`step`): numbers, or 0-d tensors as they are."""
    return {
        row.slot.name: {
            name: value
            for name, value in state_of(optimizers, row).items()
            if name not in elementwise_state(state_of(optimizers, row), row)
        }
        for row in rows
    }


def fill_rows(
    optimizers: Sequence[ShardedOptimizer],
    rows: Sequence[Row],
    read: Callable[[str, str, Interval], torch.Tensor],
    kinds_of: Callable[[str], Sequence[str]],
    scalars_of: Callable[[str], dict[str, Any]],
    holder: StateHolder,
) -> None:
    """Replaces the state of `rows` by what a checkpoint holds.

    Args:
        read: (kind, name, interval) → 1-D host tensor of the interval's elements.
        kinds_of: name → kinds of which the checkpoint has a tensor.
        scalars_of: name → the parameter's scalars.
        holder: who takes them.
    """
    for row in rows:
        name, interval = row.slot.name, row.layout.in_parameter
        state: dict[str, Any] = dict(scalars_of(name))
        for kind in kinds_of(name):
            values = read(kind, name, interval)
            if kind == MASTER:
                if row.slot.bucket.precision.has_master:
                    holder.put_master(row, values)
                continue
            state[kind] = values.view(row.tensor.shape).to(row.tensor.device)
        owner = _owner_of(optimizers, row)
        if owner is not None:
            owner.optimizer.state[row.tensor] = holder.put(row, state)


def _owner_of(optimizers: Sequence[ShardedOptimizer], row: Row) -> ShardedOptimizer | None:
    index = row.slot.bucket.layout.key[2]
    return optimizers[index] if index >= 0 else None


def state_of(optimizers: Sequence[ShardedOptimizer], row: Row) -> dict[str, Any]:
    """The optimizer's state of a row; empty before its first step."""
    owner = _owner_of(optimizers, row)
    return {} if owner is None else owner.optimizer.state.get(row.tensor, {})


def elementwise_state(state: dict[str, Any], row: Row) -> dict[str, torch.Tensor]:
    """The part of a row's state that has one value an element."""
    return {n: v for n, v in state.items() if torch.is_tensor(v) and v.dim() > 0 and v.numel() == row.tensor.numel()}
