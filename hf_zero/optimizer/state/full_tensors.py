"""Gathers the full gradient or optimizer state of one parameter from the ranks' shards. Each function is collective.

`timeout_s` is how long ranks that come wait for those that do not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...buckets.bucket import ParameterSlot
from ...buckets.gradient_tensors import widen
from ...comm.transport import Label
from ...device import allocate
from .holder import StateHolder
from .optimizer import ShardedOptimizer
from .state_rows import elementwise_state, state_of


@torch.no_grad()
def full_gradient(slot: ParameterSlot, timeout_s: float) -> torch.Tensor | None:
    """The reduced gradient in the parameter's shape; None where no rank has any."""
    slot.bucket.group.transport.meet("full_grad", timeout_s)
    row = slot.row
    if row is None or not row.has_gradient:
        return _gather(slot, None)
    slot.bucket.await_gradient()
    widen(row.tensor)
    return _gather(slot, row.tensor.grad)


@torch.no_grad()
def full_state(
    slot: ParameterSlot, optimizers: Sequence[ShardedOptimizer], holder: StateHolder, timeout_s: float
) -> dict[str, torch.Tensor | object]:
    """The optimizer's state by name, whole where it has one value an element.

    Args:
        holder: who has it.
    """
    transport = slot.bucket.group.transport
    transport.meet("full_state", timeout_s)
    row = slot.row
    mine: dict[str, Any] = {}
    # By name: whether it has one value an element, as the ranks with a row of the parameter see it.
    elementwise: dict[str, bool] = {}
    if row is not None:
        mine = state_of(optimizers, row)
        elementwise = {name: name in elementwise_state(mine, row) for name in mine}
    everyone = transport.exchange(elementwise)
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    state: dict[str, torch.Tensor | object] = {}
    for name in names:
        if any(theirs.get(name) for theirs in everyone):
            state[name] = _gather(
                slot, None if row is None or name not in mine else holder.values(row, name, mine[name])
            )
        else:
            state[name] = next(v for v in transport.exchange(mine.get(name)) if v is not None)
    return state


def _gather(slot: ParameterSlot, mine: torch.Tensor | None) -> torch.Tensor | None:
    bucket, have = slot.bucket, torch.tensor([mine is not None], dtype=torch.uint8)
    transport = bucket.group.transport
    if not transport.agree_max(have, Label(kind="agreement on a look", subject=slot.name)).item():
        return None
    dtype = bucket.precision.master if mine is None else mine.dtype
    if bucket.group.groups.shard_size == 1:
        # Each rank has all of it.
        parameter = slot.parameter
        return None if mine is None else mine.detach().reshape(parameter.shape).to(parameter.device, copy=True)
    flat = allocate(bucket.layout.numel, dtype, bucket.device)
    own = flat[bucket.own_interval.start : bucket.own_interval.stop]
    if mine is not None and slot.row is not None:
        own[slot.row.layout.in_shard.start : slot.row.layout.in_shard.stop].copy_(mine.reshape(-1))
    transport.start_all_gather(flat, own, Label(kind="all-gather a look", subject=slot.name)).finish()
    return slot.view_of(flat).clone()


def slot_of(parameter: nn.Parameter, slots: Mapping[nn.Parameter, ParameterSlot]) -> ParameterSlot:
    """A trained parameter's slot; raises `ValueError` for another tensor."""
    if parameter not in slots:
        raise ValueError(
            f"hf_zero: no trained parameter of this engine's model: {tuple(parameter.shape)}. Pass the model's own "
            "parameter object (model.get_parameter(name)), not a copy or a frozen one."
        )
    return slots[parameter]
