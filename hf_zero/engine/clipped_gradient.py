"""Gradients that are still to be multiplied by their clip coefficient.

A kernel multiplies as it reads, which spares a pass over all gradients, 8 bytes an element. Whoever else reads one has it
multiplied first, by reading it, to the same bits.
"""

from dataclasses import dataclass

import torch

from .buckets import Row
from .nested import leaves


@dataclass(frozen=True, eq=False)
class Coefficient:
    """What one call of `clip_grad_norm_` multiplies by: a float32 scalar that the host has not read."""

    value: torch.Tensor


class ClippedGradient(torch.Tensor):
    """A row's reduced gradient, in its own memory, and what it is still to be multiplied by.

    Every operation on it, in torch or on one of its attributes, multiplies in place first; zeroing `.grad` or putting another
    tensor there drops both. It stands in rows that are no parameters: autograd adds to a parameter's gradient where no
    operation is seen. Who has kept the tensor that was in `.grad` before the clip sees there what has been multiplied so far.

    Attributes:
        coefficient: None once it has been multiplied in, or taken.
    """

    coefficient: Coefficient | None

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, coefficient: Coefficient) -> "ClippedGradient":
        self = torch.Tensor._make_subclass(cls, gradient.detach())
        self.coefficient = coefficient
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for argument in leaves((args, kwargs)):
                if isinstance(argument, cls):
                    argument._multiply()
            return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def _multiply(self) -> None:
        coefficient, self.coefficient = self.coefficient, None
        if coefficient is not None:
            self.mul_(coefficient.value)


def clip_later(row: Row, coefficient: Coefficient) -> None:
    """Leaves it to who reads the row's gradient to multiply it."""
    row.tensor.grad = ClippedGradient(row.tensor.grad, coefficient)


def take_coefficient(row: Row) -> Coefficient | None:
    """What the row's gradient is still to be multiplied by, which the caller sees to; None where nothing is."""
    gradient = row.tensor.grad
    if not isinstance(gradient, ClippedGradient):
        return None
    coefficient, gradient.coefficient = gradient.coefficient, None
    return coefficient
