"""Forwards in another dtype than that of training, such as an evaluation in bfloat16; the model stays as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .sharded_model import ShardedModel


@contextmanager
def computing_in(model: nn.Module, sharded: ShardedModel, dtype: torch.dtype) -> Iterator[None]:
    """Floating-point parameters and buffers are of `dtype`, as after `model.to(dtype)`. Not for training; on every rank."""
    whole = {p: p.data for p in model.parameters() if p not in sharded.unit_of and p.is_floating_point()}
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
    sharded.schedule.reshard_all()
    for unit, slot in sharded.unit_of.values():
        unit.memories[slot.bucket].read_as = dtype if slot.bucket.flat.is_floating_point() else None
        unit.hang(slot)
