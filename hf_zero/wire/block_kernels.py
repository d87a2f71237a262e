"""Functions shared by the kernels of all codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.base import kernel, rounded

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def load_with_residual(values, residual, offsets, mask):
    """Returns the values plus the residual, and the residual."""
    x = tl.load(values + offsets, mask=mask, other=0.0).to(tl.float32)
    old = x
    if residual is not None:
        old = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        x = x + old
    return x, old


@kernel
def magnitudes(x):
    """Returns magnitudes, with inf for NaN."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))


@kernel
def scale_of(absmax, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """Returns the scale with which a block's largest magnitude becomes LARGEST."""
    return tl.maximum(tl.div_rn(absmax, tl.full(absmax.shape, LARGEST, tl.float32)), SMALLEST)


@kernel
def load_blocks(
    values,
    residual,
    scales,
    numel,
    blocks,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Loads this program's blocks and stores their scales; returns elements, residual, scales, offsets and masks."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = offsets < numel
    x, old = load_with_residual(values, residual, offsets, mask)
    scale = scale_of(tl.max(magnitudes(x), axis=1), LARGEST, SMALLEST)
    tl.store(scales + row, scale, mask=row < blocks)
    return x, old, tl.broadcast_to(scale[:, None], x.shape), offsets, mask, (row < blocks)[:, None]


@kernel
def in_scales(x, scale):
    """Returns `x` / `scale`, rounded as in the reference; 0 if the scale is inf."""
    return tl.where(scale < float("inf"), tl.div_rn(x, scale), 0.0)


@kernel
def store_residual(residual, offsets, mask, x, old, q, scale, INTERPRETED: tl.constexpr):
    """Stores the error of writing `q` for `x`, or the previous residual if the block is not finite."""
    kept = tl.where(scale < float("inf"), x - q * scale, old)
    tl.store(residual + offsets, rounded(kept, residual.dtype.element_ty, INTERPRETED), mask=mask)


@kernel
def sum_of_bytes(
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
    """Sums the values of one-byte codes in rank order; `codes` points to elements of their type."""
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
