"""Backward nodes that have saved whole parameters: the parameters are gathered again when such a node runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .unit import Unit

_TRANSFORMED = (
    "hf_zero: torch.func of a model at stage 3 cannot be trained through. For values, call it inside `with torch.no_grad(), "
    "hf_zero.gathered(model):`; to train, use torch.autograd.grad(..., create_graph=True) or `stage: 2`."
)


def runs_transformed(unit: Unit, *, is_watched: bool, refuses: bool) -> bool:
    """Whether torch.func runs a forward over a unit that stays whole, which needs nothing done.

    Args:
        is_watched: inside `gathered_again`.
        refuses: False behind a forward, which has been refused or has not.

    Raises:
        RuntimeError: it runs one that the unit would have to be gathered for, or gathered again in the backward.
    """
    stack = torch._C._functorch.get_interpreter_stack()
    if not stack:
        return False
    is_whole = unit.holds > 0 or not unit.slots
    if is_whole and not (is_watched and torch.is_grad_enabled()):
        return True
    if not torch.is_grad_enabled() and all(each.key() == torch._C._functorch.TransformType.Vmap for each in stack):
        # What is gathered has no dimension of vmap's.
        return False
    if refuses:
        raise RuntimeError(_TRANSFORMED)
    return True


@contextmanager
def gathered_again(units: Sequence[Unit], gather: Callable[[Unit], None]) -> Iterator[None]:
    """For code that computes with whole parameters outside of any forward, and whose backward comes when they are sharded.

    Such as a penalty on parameters. Autograd keeps the parameter, or a view of it, and would read what stands in its place by
    then. Layers announce their backward by themselves.

    Args:
        units: whole for now.
        gather: makes one whole during a backward.
    """
    if not units or not torch.is_grad_enabled():
        yield
        return
    unit_at = {memory.shown.untyped_storage().data_ptr(): unit for unit in units for memory in unit.memories.values()}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, Unit | None]:
        return tensor, unit_at.get(tensor.untyped_storage().data_ptr())

    def unpack(packed: tuple[torch.Tensor, Unit | None]) -> torch.Tensor:
        tensor, unit = packed
        if unit is not None:
            gather(unit)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        try:
            yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                # torch's own words, which begin a transform of torch.func.
                raise RuntimeError(_TRANSFORMED) from error
            raise
