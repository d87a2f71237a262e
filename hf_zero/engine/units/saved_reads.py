"""Backward nodes that have saved whole parameters: the parameters are gathered again when such a node runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from .unit import Unit


@contextmanager
def gathered_again(units: Iterable[Unit], gather: Callable[[Unit], None]) -> Iterator[None]:
    """For code that computes with whole parameters outside of any forward, and whose backward comes when they are sharded.

    Such as a penalty on parameters. Autograd keeps the parameter, or a view of it, and would read what stands in its place by
    then. Layers announce their backward by themselves.

    Args:
        units: whole for now.
        gather: makes one whole during a backward.
    """
    unit_at = {memory.shown.untyped_storage().data_ptr(): unit for unit in units for memory in unit.memories.values()}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, Unit | None]:
        return tensor, unit_at.get(tensor.untyped_storage().data_ptr())

    def unpack(packed: tuple[torch.Tensor, Unit | None]) -> torch.Tensor:
        tensor, unit = packed
        if unit is not None:
            gather(unit)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if torch.is_grad_enabled() else nullcontext():
        yield
