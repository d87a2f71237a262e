"""Rounding of float32 inside a kernel: to a 16-bit dtype, to integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """`x` (float32) in `dtype`, to the nearest, ties to even, as torch rounds.

    Triton's interpreter drops the low bits of a float32 on its way to bfloat16, so there it is done on the integer.
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
    """`x` (float32, below 2^22), ties to even. There is no instruction for it that the interpreter has as well.

    1.5 x 2^23, added and taken away again, leaves no digits behind the point.
    """
    return (x + 12582912.0) - 12582912.0
