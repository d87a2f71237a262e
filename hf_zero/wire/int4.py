"""4-bit codes: elements i and i + B/2 of a block share byte i, the former in the low half.

Both halves of a byte then belong to runs of consecutive elements, so vector units and GPU threads never access every other
element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kernels.base import kernel, nearest_integer, rounded
from .block_kernels import in_scales, load_with_residual, magnitudes, scale_of, store_residual
from .code import Code

if TYPE_CHECKING:
    import triton.language as tl

_OFFSET = 8
"""Added to a code from -7 to 7, so that the result is not negative."""


@kernel
def _quantise_int4(
    values,
    codes,
    scales,
    residual,
    numel,
    blocks,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    HALF: tl.constexpr = SIZE // 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)[None, :]
    low_offsets = row[:, None] * SIZE + column
    high_offsets = low_offsets + HALF
    low_mask, high_mask = low_offsets < numel, high_offsets < numel
    low, old_low = load_with_residual(values, residual, low_offsets, low_mask)
    high, old_high = load_with_residual(values, residual, high_offsets, high_mask)
    scale = scale_of(tl.max(tl.maximum(magnitudes(low), magnitudes(high)), axis=1), 7.0, SMALLEST)
    tl.store(scales + row, scale, mask=row < blocks)
    scale = tl.broadcast_to(scale[:, None], low.shape)
    q_low, q_high = nearest_integer(in_scales(low, scale)), nearest_integer(in_scales(high, scale))
    packed = (q_high * 16.0 + q_low + 136.0).to(tl.int32).to(tl.uint8)
    tl.store(codes + row[:, None] * HALF + column, packed, mask=(row < blocks)[:, None])
    if residual is not None:
        store_residual(residual, low_offsets, low_mask, low, old_low, q_low, scale, INTERPRETED)
        store_residual(residual, high_offsets, high_mask, high, old_high, q_high, scale, INTERPRETED)


@kernel
def _sum_int4(
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
    HALF: tl.constexpr = SIZE // 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)[None, :]
    known = row < blocks
    low = tl.zeros((ROWS, HALF), dtype=tl.float32)
    high = tl.zeros((ROWS, HALF), dtype=tl.float32)
    for rank in tl.range(0, ranks, loop_unroll_factor=4):
        ranked = tl.full((ROWS,), rank, tl.int64) * blocks + row
        scale = tl.load(scales + ranked, mask=known)[:, None]
        packed = tl.load(codes + ranked[:, None] * HALF + column, mask=known[:, None], other=0).to(tl.int32)
        low += ((packed & 15) - 8).to(tl.float32) * scale
        high += ((packed >> 4) - 8).to(tl.float32) * scale
    offsets = row[:, None] * SIZE + column
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + offsets, rounded(low, dtype, INTERPRETED), mask=offsets < numel)
    tl.store(out + offsets + HALF, rounded(high, dtype, INTERPRETED), mask=offsets + HALF < numel)


class Int4(Code):
    """Whole numbers from -7 to 7."""

    name = "int4"
    bits = 4
    largest = 7
    quantise_kernel = _quantise_int4
    sum_kernel = _sum_int4

    def write(self, values: torch.Tensor, code_rows: torch.Tensor) -> None:
        low, high = values.round_().chunk(2, dim=1)
        code_rows.copy_(torch.add(low, high, alpha=16).add_(17 * _OFFSET))

    def read(self, code_rows: torch.Tensor, values: torch.Tensor) -> None:
        low, high = values.chunk(2, dim=1)
        low.copy_(code_rows & 15).sub_(_OFFSET)
        high.copy_(code_rows >> 4).sub_(_OFFSET)


INT4 = Int4()
