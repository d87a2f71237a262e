"""Gradients that are multiplied by their clip coefficient later, in the step or when they are read.

A kernel multiplies as it reads, which spares a pass over all gradients, 8 bytes an element. Whoever else reads one has it
multiplied first, by reading it, to the same bits.
"""

import weakref
from dataclasses import dataclass
from typing import cast

import torch
from torch.utils._pytree import tree_map_only

from ..buckets.bucket import Row


@dataclass(frozen=True, eq=False)
class Coefficient:
    """What one call of `clip_grad_norm_` multiplies by: a float32 scalar that the host has not read."""

    value: torch.Tensor


class ClippedGradient(torch.Tensor):
    """A row's reduced gradient, in its own memory, and what it is still to be multiplied by.

    Every operation on it, in torch or on one of its attributes, multiplies in place first; zeroing `.grad` or putting another
    tensor there drops both. It stands in rows that are no parameters: autograd adds to a parameter's gradient where no
    operation is seen. Who has kept the tensor that was in `.grad` before the clip sees there what has been multiplied so far.

    In bfloat16 the product would be rounded, as a kernel's is not. There it is made beside, in the row's own dtype, takes this
    one's place in `.grad`, and is what the operation sees.

    Attributes:
        coefficient: None once it has been multiplied in, or taken.
    """

    coefficient: Coefficient | None
    _row: "weakref.ref[torch.Tensor]"
    _product: torch.Tensor | None

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, coefficient: Coefficient, row: torch.Tensor) -> "ClippedGradient":
        self = torch.Tensor._make_subclass(cls, gradient.detach())
        self.coefficient = coefficient
        self._row = weakref.ref(row)
        self._product = None
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(cls, cls._multiplied, (args, kwargs or {}))
            return func(*args, **kwargs)

    @torch.no_grad()
    def _multiplied(self) -> torch.Tensor:
        coefficient, self.coefficient = self.coefficient, None
        if coefficient is not None:
            row = self._row()
            if row is None or row.dtype == self.dtype:
                self.mul_(coefficient.value)
            else:
                self._product = self.to(row.dtype).mul_(coefficient.value)
                if row.grad is self:
                    row.grad = self._product
        return self if self._product is None else self._product


def clip_later(row: Row, coefficient: Coefficient) -> None:
    """Leaves it to who reads the row's gradient to multiply it."""
    if isinstance(row.tensor.grad, ClippedGradient):
        widen(row)
    row.tensor.grad = ClippedGradient(cast(torch.Tensor, row.tensor.grad), coefficient, row.tensor)


def take_coefficient(row: Row) -> Coefficient | None:
    """What the row's gradient is still to be multiplied by, which the caller sees to; None where nothing is."""
    gradient = row.tensor.grad
    if not isinstance(gradient, ClippedGradient):
        return None
    coefficient, gradient.coefficient = gradient.coefficient, None
    return coefficient


def widen(row: Row) -> None:
    """Has a row's gradient that is kept in fewer digits than its master in all of them, multiplied by what it is to be."""
    gradient, dtype = row.tensor.grad, row.slot.bucket.precision.master
    # Each step asks this of every row. Of a clipped gradient, the question would multiply it.
    if gradient is None or (type(gradient) is torch.Tensor and gradient.dtype == dtype):
        return
    with torch._C.DisableTorchFunctionSubclass():
        if gradient.dtype == dtype:
            return
    coefficient = take_coefficient(row)
    with torch.no_grad():
        row.tensor.grad = gradient.to(dtype)
        if coefficient is not None:
            row.tensor.grad.mul_(coefficient.value)
