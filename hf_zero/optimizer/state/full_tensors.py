"""Gathers the full gradient or optimizer state of one parameter from the ranks' shards."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...buckets.bucket import Bucket, ParameterSlot, Row
from ...buckets.gradient_tensors import widen
from ...comm.transport import Label, Transport
from ...config import CommConfig
from ...device import allocate
from .holder import StateHolder
from .optimizer import ShardedOptimizer
from .state_rows import elementwise_state, state_of


class FullTensors:
    """Gathers gradients and optimizer state, one parameter at a time. Every method is collective.

    Args:
        row_of: this rank's rows.
        transport_of: between the ranks that share what is in a bucket.
        holder: who has their state.
        comm: how long ranks that come wait for those that do not.
        replicated: each rank's rows are whole parameters, and nothing is gathered.
    """

    def __init__(
        self,
        row_of: Mapping[nn.Parameter, Row],
        transport_of: Callable[[Bucket], Transport],
        holder: StateHolder,
        comm: CommConfig,
        *,
        replicated: bool,
    ):
        self._row_of = row_of
        self._holder = holder
        self._transport_of = transport_of
        self._timeout_s = comm.meeting_timeout_s
        self._replicated = replicated

    @torch.no_grad()
    def gradient(self, slot: ParameterSlot) -> torch.Tensor | None:
        """The reduced gradient in the parameter's shape; None where no rank has any."""
        self._transport_of(slot.bucket).meet("full_grad", self._timeout_s)
        row = self._row_of.get(slot.parameter)
        if row is None or not row.has_gradient:
            return self._gather(slot, None)
        row.slot.bucket.await_gradient()
        widen(row.tensor)
        return self._gather(slot, row.tensor.grad)

    @torch.no_grad()
    def state(self, slot: ParameterSlot, optimizers: Sequence[ShardedOptimizer]) -> dict[str, torch.Tensor | object]:
        """The optimizer's state by name, whole where it has one value an element."""
        transport = self._transport_of(slot.bucket)
        transport.meet("full_state", self._timeout_s)
        row = self._row_of.get(slot.parameter)
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
                values = None if row is None or name not in mine else self._holder.values(row, name, mine[name])
                state[name] = self._gather(slot, values)
            else:
                state[name] = next(v for v in transport.exchange(mine.get(name)) if v is not None)
        return state

    def _gather(self, slot: ParameterSlot, mine: torch.Tensor | None) -> torch.Tensor | None:
        bucket, have = slot.bucket, torch.tensor([mine is not None], dtype=torch.uint8)
        transport = self._transport_of(bucket)
        if not transport.agree_max(have, Label(kind="agreement on a look", subject=slot.name)).item():
            return None
        dtype = bucket.precision.master if mine is None else mine.dtype
        if self._replicated:
            parameter = slot.parameter
            return None if mine is None else mine.detach().reshape(parameter.shape).to(parameter.device, copy=True)
        flat = allocate(bucket.layout.numel, dtype, bucket.device)
        own = flat[bucket.own_interval.start : bucket.own_interval.stop]
        if mine is not None:
            row = self._row_of[slot.parameter]
            own[row.layout.in_shard.start : row.layout.in_shard.stop].copy_(mine.reshape(-1))
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
