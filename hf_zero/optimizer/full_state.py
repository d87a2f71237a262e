"""Gathers the gradient or optimizer state of one whole parameter from the ranks' shards. Collective."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..allocation import allocate
from ..buckets.bucket import ParameterSlot, Row
from ..buckets.clipped_gradient import widen
from ..buckets.rows import name_of
from ..comm.waits import Label
from .bucket_state import is_elementwise
from .nested_state import flat_state, nested_state
from .storage import OptimizerStorage


@torch.no_grad()
def full_gradient(slot: ParameterSlot, timeout_s: float) -> torch.Tensor | None:
    """Gathers the reduced gradient in the parameter's shape; None if no rank has one."""
    # Start with the barrier: a rank that calls alone gets an error with the name of the call, instead of hanging in a gather.
    slot.bucket.group.transport.barrier("full_grad", timeout_s)
    return gathered_gradient(slot)


@torch.no_grad()
def gathered_gradient(slot: ParameterSlot) -> torch.Tensor | None:
    """As `full_gradient`, for a read of `p.grad`: a lone rank waits as long as in a collective."""
    row = slot.row
    if row is None or not row.has_gradient:
        # This rank joins as well, because the others wait for its shard of the bucket.
        return _gather(slot, None)
    slot.bucket.arrival.wait()
    widen(row.tensor)
    return _gather(slot, row.tensor.grad)


@torch.no_grad()
def full_state(
    slot: ParameterSlot, mine: Mapping[str, Any], storage: OptimizerStorage, timeout_s: float, call: str = "full_state"
) -> dict[str, Any]:
    """Gathers the optimizer's state of a parameter by name: tensors with one value per element in the parameter's shape.

    Args:
        mine: the state of this rank's row; empty without a row.
        storage: stores the state.
        timeout_s: time limit for the other ranks.
        call: the script's call, for the error of a rank that calls alone.
    """
    transport = slot.bucket.group.transport
    transport.barrier(call, timeout_s)
    row, flat = slot.row, flat_state(mine)
    # Whether each kind of state has one value per element. Only ranks with a row of the parameter know this.
    elementwise = {} if row is None else {kind: is_elementwise(value, row) for kind, value in flat.items()}
    # A rank without a row does not know the names, but has to join each gather.
    everyone = transport.exchange(elementwise)
    kinds = dict.fromkeys(kind for theirs in everyone for kind in theirs)
    state: dict[str, Any] = {}
    for kind in kinds:
        if any(theirs.get(kind) for theirs in everyone):
            part = None if row is None or kind not in flat else storage.values(row, name_of(kind), flat[kind])
            state[kind] = _gather(slot, part)
        else:
            state[kind] = next((v for v in transport.exchange(flat.get(kind)) if v is not None), None)
    return nested_state(state)


@torch.no_grad()
def full_master(slot: ParameterSlot, storage: OptimizerStorage) -> torch.Tensor | None:
    """Gathers the master in the parameter's shape; None if the parameter has the master's dtype. Collective."""
    if not slot.bucket.precision.rounds:
        return None
    with storage.fetched_master(slot.bucket):
        return _gather(slot, None if slot.row is None else slot.row.of(slot.bucket.master))


def _gather(slot: ParameterSlot, mine: torch.Tensor | None) -> torch.Tensor | None:
    bucket = slot.bucket
    # Agree on the dtype first: a rank without a part of the parameter knows neither whether the others start a gather, nor the
    # dtype. With 8-bit state, a gather in the master's dtype would receive four bytes for each byte sent by the others.
    dtypes = bucket.group.transport.exchange(None if mine is None else mine.dtype, f"look at {slot.name}")
    dtype = next(filter(None, dtypes), None)
    if dtype is None:
        return None
    if bucket.group.groups.shard_size == 1:
        # Each rank has the whole tensor.
        parameter = slot.parameter
        return None if mine is None else mine.detach().reshape(parameter.shape).to(parameter.device, copy=True)
    groups = bucket.group.groups
    parts = [slot.interval.intersect(bucket.layout.shard(rank)) for rank in range(groups.shard_size)]
    # All ranks of the bucket join, even without a part of this parameter, and all parts have the size of the largest one, because
    # a gather needs equal parts of each rank.
    numel = max(part.numel for part in parts if part is not None)
    flat = allocate(groups.shard_size * numel, dtype, bucket.device)
    own = flat[groups.shard_rank * numel : (groups.shard_rank + 1) * numel]
    if mine is not None:
        own[: mine.numel()].copy_(mine.reshape(-1))
    bucket.group.transport.start_all_gather(flat, own, Label(kind="all-gather of values", subject=slot.name)).finish()
    whole = torch.empty(slot.interval.numel, dtype=dtype, device=bucket.device)
    for part, sent in zip(parts, flat.view(groups.shard_size, numel)):
        if part is not None:
            at = part.shift(-slot.interval.start)
            whole[at.start : at.stop] = sent[: part.numel]
    return whole.view(slot.parameter.shape)


def slot_of(parameter: nn.Parameter, slots: Mapping[nn.Parameter, ParameterSlot]) -> ParameterSlot:
    """Returns a trained parameter's slot; raises `ValueError` for other tensors."""
    if parameter not in slots:
        raise ValueError(
            f"hf_zero: a tensor of shape {tuple(parameter.shape)} is not a trained parameter of this engine's model. Pass the "
            "model's own parameter object (model.get_parameter(name)), not a copy or a frozen one."
        )
    return slots[parameter]


def cut_to(value: Any, row: Row) -> Any:
    """Cuts a state tensor of the whole parameter to a row's part, shape and device; scalars stay unchanged."""
    if not torch.is_tensor(value) or value.dim() == 0:
        return value
    if value.shape == row.slot.parameter.shape:
        cut = row.layout.in_parameter
        value = value.reshape(-1)[cut.start : cut.stop].view(row.tensor.shape)
    # Copy, because a view would keep the whole parameter's state in memory.
    return value.to(row.tensor.device, copy=True)
