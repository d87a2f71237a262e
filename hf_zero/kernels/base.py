"""Kernels compiled at first use, and their rounding."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..device import current

if TYPE_CHECKING:
    import triton.language as tl


# ---- Triton kernels that import triton at their first launch ----
#
# Importing triton takes a quarter of a second, and most machines with this package have no triton, or no device for triton.
# So each file of this package defines its kernel as a plain function under `@kernel`, imports `tl` only under `TYPE_CHECKING`,
# and can be imported anywhere for its torch reference.


class Kernel:
    """A function in Triton's language, compiled (or interpreted, under TRITON_INTERPRET=1) at its first launch.

    The function may use `tl` (triton.language) and other kernels of its module.

    Raises:
        ImportError: at the first launch, if triton is not installed.
    """

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self._function = function

    if TYPE_CHECKING:
        # Only other kernels call a kernel directly, in Triton's language.
        def __call__(self, *arguments: Any, **constants: Any) -> Any: ...

    @functools.cached_property
    def jit(self) -> Any:
        """Returns `triton.jit` of the function, in a scope where kernels and `tl` are Triton's objects."""
        import triton
        import triton.language as tl

        written = self._function
        scope = {**written.__globals__, "tl": tl}
        for name in written.__code__.co_names:
            if isinstance(scope.get(name), Kernel):
                scope[name] = scope[name].jit
        bound = types.FunctionType(written.__code__, scope, written.__name__, written.__defaults__)
        # Triton's interpreter recognizes a constexpr by the annotation object, not by its text.
        bound.__annotations__ = inspect.get_annotations(written, globals=scope, eval_str=True)
        return triton.jit(bound)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        # Triton launches on the current device, which may not be the device of the tensors.
        with current(next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))):
            # Disable fused multiply-adds, because a kernel must round like its reference. Releases have different defaults.
            self.jit[grid](*arguments, enable_fp_fusion=False, **constants)


kernel = Kernel


def is_interpreted() -> bool:
    """Whether this process interprets launches. Some kernels must round manually in this case."""
    import triton

    return triton.knobs.runtime.interpret


# ---- Checks of scalars, because a kernel would access memory outside of a shorter tensor ----


def check_scalar(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises `ValueError` unless `tensor` is one float32 element on `device`."""
    if tensor.numel() != 1 or tensor.dtype != torch.float32 or tensor.device != device:
        raise ValueError(
            f"hf_zero: {name} is {tensor.numel()} elements of {tensor.dtype} on {tensor.device}; it must be one float32 "
            f"element on {device}, so that no value is copied to the host."
        )


# ---- Rounding of float32 inside a kernel: to a 16-bit dtype, to integers ----


@kernel
def rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Converts `x` (float32) to `dtype`, rounding to the nearest, ties to even, as torch does.

    Triton's interpreter truncates when converting float32 to bfloat16, so the rounding is done on the integer there.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x == x, bits, 0x7FC0)
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@kernel
def nearest_integer(x):
    """Rounds `x` (float32, below 2^22), ties to even. Triton's interpreter lacks the instruction.

    Adding and subtracting 1.5 x 2^23 removes the digits after the point.
    """
    return (x + 12582912.0) - 12582912.0
