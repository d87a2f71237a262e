"""Forwards in a dtype different from training, such as an evaluation in bfloat16. The stored parameters do not change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..buckets.packed import of_packed_modules
from .sharded_model import ShardedModel


@contextmanager
def computing_in(model: nn.Module, sharded: ShardedModel, dtype: torch.dtype) -> Iterator[None]:
    """Makes floating-point parameters and buffers `dtype` inside, as `model.to(dtype)` does. Not for training; collective."""
    spared = of_packed_modules(model) | sharded.unit_of.keys()
    whole = {p: p.data for p in model.parameters() if p not in spared and p.is_floating_point()}
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    try:
        _read_as(sharded, dtype)
        _hang({parameter: values.to(dtype) for parameter, values in whole.items()})
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(dtype)
        yield
    finally:
        _read_as(sharded, None)
        _hang(whole)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _hang(values: dict[nn.Parameter, torch.Tensor]) -> None:
    for parameter, data in values.items():
        parameter.data = data


def _read_as(sharded: ShardedModel, dtype: torch.dtype | None) -> None:
    # Whole parameters have the previous dtype and must be gathered again.
    sharded.schedule.reshard_all()
    for unit in sharded.schedule.units:
        unit.forms.forget()
    for unit, slot in sharded.unit_of.values():
        unit.memories[slot.bucket].read_as = None if slot.bucket.key.is_packed else dtype
        unit.set_data(slot)
