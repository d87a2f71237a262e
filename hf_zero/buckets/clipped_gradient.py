"""Gradients of this rank's shards whose clip coefficient is multiplied in by the next reader."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..hooks.tensors import set_all

# The shards in the optimizer's groups also have gradients between backward and step. The norm of one shard is not the norm of
# the gradient, so computing it raises. The optimizer kernel multiplies gradients by the clip coefficient while reading the
# gradients, which saves a pass over all gradients (8 bytes per element). Any other reader of a `ClippedGradient` triggers the
# multiplication first, with bitwise the same result.


@dataclass(frozen=True, eq=False)
class Coefficient:
    """The factor computed by one call of `clip_grad_norm_`: a float32 scalar tensor not yet read by the host."""

    value: torch.Tensor


class ClippedGradient(torch.Tensor):
    """A shard's reduced gradient, in its own memory, whose clip coefficient is not yet multiplied in.

    Every operation on this tensor, in torch or through an attribute, first multiplies in place. Zeroing `.grad` or assigning
    another tensor drops gradient and coefficient. Only shard tensors that are not parameters get one: autograd adds to a
    parameter's gradient without calling `__torch_function__`.

    Attributes:
        coefficient: the clip coefficient; None once multiplied in, or taken by a kernel.
        plain: the plain gradient in the same memory.
    """

    coefficient: Coefficient | None
    plain: torch.Tensor
    _row: "weakref.ref[torch.Tensor]"
    _product: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(cls, cls._multiplied, (args, kwargs or {}))
            return func(*args, **kwargs)

    @property
    def is_taken(self) -> bool:
        """Whether a kernel has taken the coefficient and multiplies while reading this gradient's memory."""
        return self.coefficient is None and self._product is None

    @torch.no_grad()
    def _multiplied(self) -> torch.Tensor:
        # Cleared first, because the multiplication below is itself an operation on this tensor.
        coefficient, self.coefficient = self.coefficient, None
        if coefficient is not None:
            row = self._row()
            # In place if the dtype loses no digits: a new tensor would need as much memory again as the gradient.
            if row is None or row.dtype == self.dtype:
                self.mul_(coefficient.value)
            else:
                # A bfloat16 product would be rounded, unlike a kernel's. So a product in the shard's wider dtype replaces this
                # gradient.
                self._product = self.to(row.dtype).mul_(coefficient.value)
                # The script may have replaced or dropped the gradient since.
                if row.grad is self:
                    row.grad = self._product
        return self if self._product is None else self._product


_GRAD, _COEFFICIENT, _PRODUCT, _PLAIN = map(attrgetter, ("grad", "coefficient", "_product", "plain"))


def clip_later(rows: Sequence[nn.Parameter], coefficient: Coefficient) -> None:
    """Defers the multiplication to the next readers of the shards' gradients. Loops in C."""
    gradients = list(map(_GRAD, rows))
    clipped = list(map(torch.Tensor.as_subclass, map(torch.Tensor.detach, gradients), repeat(ClippedGradient)))
    set_all(clipped, "coefficient", repeat(coefficient))
    set_all(clipped, "plain", gradients)
    # A weak reference, because the row refers to this gradient: a cycle would keep its memory until Python collects garbage.
    set_all(clipped, "_row", map(weakref.ref, rows))
    set_all(rows, "grad", clipped)


def take_coefficient(row: nn.Parameter) -> Coefficient | None:
    """Takes the pending coefficient of a shard's gradient, which the caller multiplies by; None if there is none."""
    gradient = row.grad
    if not isinstance(gradient, ClippedGradient):
        return None
    coefficient, gradient.coefficient = gradient.coefficient, None
    return coefficient


def take_coefficients(gradients: Sequence[ClippedGradient]) -> list[Coefficient | None]:
    """Takes the pending coefficients of shards' gradients, if all are clipped gradients. Loops in C."""
    found = list(map(_COEFFICIENT, gradients))
    set_all(gradients, "coefficient", repeat(None))
    return found


def taken_gradients(gradients: Sequence[ClippedGradient]) -> list[torch.Tensor] | None:
    """Returns clipped gradients' plain tensors if kernels have taken all their coefficients (`is_taken`); None otherwise."""
    open_or_product = chain(map(_COEFFICIENT, gradients), map(_PRODUCT, gradients))
    return list(map(_PLAIN, gradients)) if all(map(is_, open_or_product, repeat(None))) else None


def coefficient_of_all(gradients: Sequence[Any], plain: Sequence[torch.Tensor]) -> tuple[Coefficient | None] | None:
    """Returns the one coefficient shared by shards' gradients. Loops in C.

    Args:
        gradients: the shards' `.grad`.
        plain: the plain gradients expected in the same memory.

    Returns:
        A tuple with the shared coefficient, `(None,)` if nothing is to be multiplied, or None if the gradients have different
        coefficients, memory or classes.
    """
    if all(map(is_, gradients, plain)):
        return (None,)
    if not {ClippedGradient}.issuperset(map(type, gradients)) or not all(map(is_, map(_PLAIN, gradients), plain)):
        return None
    first = gradients[0].coefficient
    is_one = all(map(is_, map(_COEFFICIENT, gradients), repeat(first)))
    return (first,) if is_one and all(map(is_, map(_PRODUCT, gradients), repeat(None))) else None


def plain_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a shard's gradient as a plain tensor in its own memory, after any pending multiplication."""
    if type(gradient) is torch.Tensor:
        return gradient
    # `detach` would call `__torch_function__` for each parameter, and one such call costs the host as much as ten operations.
    is_taken = isinstance(gradient, ClippedGradient) and gradient.is_taken
    return cast(ClippedGradient, gradient).plain if is_taken else gradient.detach()


def widen(*rows: nn.Parameter) -> None:
    """Converts the gradients of shard tensors to the tensors' dtypes, with the coefficients multiplied in."""
    for row in rows:
        gradient = row.grad
        # Each step checks every shard. A clipped gradient must not be asked for its dtype here, because any access multiplies.
        if gradient is None or (type(gradient) is torch.Tensor and gradient.dtype == row.dtype):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            if gradient.dtype == row.dtype:
                continue
        coefficient = take_coefficient(row)
        with torch.no_grad():
            row.grad = gradient.to(row.dtype)
            if coefficient is not None:
                row.grad.mul_(coefficient.value)
