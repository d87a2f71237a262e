"""The Triton kernels that quantize blocks to 8-bit codes and sum them: one signed byte for each element, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.base import kernel, nearest_integer, rounded

if TYPE_CHECKING:
    import triton.language as tl

LARGEST_CODE = 127
"""The largest magnitude of a code: codes are the integers from -127 to 127."""


@kernel
def magnitudes(x):
    """Returns magnitudes, with inf for NaN."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))


@kernel
def scale_of(absmax, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """Returns the scale with which a block's largest magnitude becomes LARGEST."""
    return tl.maximum(tl.div_rn(absmax, tl.full(absmax.shape, LARGEST, tl.float32)), SMALLEST)


@kernel
def in_scales(x, scale):
    """Returns `x` / `scale`, rounded as in the reference; 0 if the scale is inf."""
    return tl.where(scale < float("inf"), tl.div_rn(x, scale), 0.0)


@kernel
def quantize_kernel(
    values,
    codes,
    scales,
    residual,
    numel,
    blocks,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Stores the codes and scales of `values + residual`, and the rounding error to `residual` unless that is None."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask, known = offsets < numel, (row < blocks)[:, None]
    x = tl.load(values + offsets, mask=mask, other=0.0).to(tl.float32)
    old = x
    if residual is not None:
        old = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        x = x + old
    scale = scale_of(tl.max(magnitudes(x), axis=1), LARGEST, SMALLEST)
    tl.store(scales + row, scale, mask=row < blocks)
    scale = tl.broadcast_to(scale[:, None], x.shape)
    q = nearest_integer(in_scales(x, scale))
    tl.store(codes.to(tl.pointer_type(tl.int8)) + offsets, q.to(tl.int8), mask=known)
    if residual is not None:
        # The previous residual stays if the block is not finite.
        kept = tl.where(scale < float("inf"), x - q * scale, old)
        tl.store(residual + offsets, rounded(kept, residual.dtype.element_ty, INTERPRETED), mask=mask)


@kernel
def sum_kernel(
    codes,
    scales,
    out,
    numel,
    blocks,
    ranks,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Stores the sum of the ranks' values, added in rank order in float32 and rounded once."""
    codes = codes.to(tl.pointer_type(tl.int8))
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)[None, :]
    known = row < blocks
    total = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    for rank in tl.range(0, ranks, loop_unroll_factor=4):
        ranked = tl.full((ROWS,), rank, tl.int64) * blocks + row
        scale = tl.load(scales + ranked, mask=known)
        code = tl.load(codes + ranked[:, None] * SIZE + column, mask=known[:, None])
        total += code.to(tl.float32) * scale[:, None]
    offsets = row[:, None] * SIZE + column
    tl.store(out + offsets, rounded(total, out.dtype.element_ty, INTERPRETED), mask=offsets < numel)
