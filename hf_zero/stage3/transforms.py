"""torch.func over a model at stage 3."""

import torch

from .unit import Unit

TRANSFORMED = (
    "hf_zero: training through torch.func of a model at stage 3 is not supported. For values, call it inside `with "
    "torch.no_grad(), hf_zero.gathered(model):`; to train, use torch.autograd.grad(..., create_graph=True) or `stage: 2`."
)


transforms = torch._C._functorch.get_interpreter_stack
"""Returns the running transforms of torch.func; None or an empty list if there are none."""


def is_transformed() -> bool:
    """Whether a transform of torch.func is running, which works only on whole parameters."""
    return bool(transforms())


def runs_transformed(unit: Unit, *, is_watched: bool, refuses: bool) -> bool:
    """Whether torch.func runs a forward over a unit whose parameters stay whole, so the hooks do nothing.

    Args:
        is_watched: whether this is inside `gathered_again`.
        refuses: False after a forward, which was checked before it ran.

    Raises:
        RuntimeError: the unit would have to be gathered for the forward, or gathered again in the backward.
    """
    stack = transforms()
    if not stack:
        return False
    is_whole = unit.holds > 0 or not unit.slots
    if is_whole and not (is_watched and torch.is_grad_enabled()):
        return True
    if not torch.is_grad_enabled() and all(each.key() == torch._C._functorch.TransformType.Vmap for each in stack):
        # Gathered parameters have no vmap dimension, so the hooks may run inside vmap.
        return False
    if refuses:
        raise RuntimeError(TRANSFORMED)
    return True
