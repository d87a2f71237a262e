"""Codes of one signed byte each, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .block_format import Code
from .block_parts import in_scales, load_with_residual, magnitudes, scale_of, store_residual, sum_of_bytes
from .lazy import kernel
from .rounding import nearest_integer

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _quantise(
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
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = offsets < numel
    x, old = load_with_residual(values, residual, offsets, mask)
    scale = scale_of(tl.max(magnitudes(x), axis=1), 127.0, SMALLEST)
    tl.store(scales + row, scale, mask=row < blocks)
    scale = tl.broadcast_to(scale[:, None], x.shape)
    q = nearest_integer(in_scales(x, scale))
    tl.store(codes.to(tl.pointer_type(tl.int8)) + offsets, q.to(tl.int8), mask=(row < blocks)[:, None])
    if residual is not None:
        store_residual(residual, offsets, mask, x, old, q, scale, INTERPRETED)


@kernel
def _sum(
    codes,
    scales,
    out,
    numel,
    blocks,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    codes = codes.to(tl.pointer_type(tl.int8))
    sum_of_bytes(codes, scales, out, numel, blocks, RANKS, ROWS, SIZE, INTERPRETED)


class Int8(Code):
    """Whole numbers from -127 to 127."""

    name = "int8"
    bits = 8
    largest = 127
    quantise_kernel = _quantise
    sum_kernel = _sum

    def write(self, values: torch.Tensor, code_rows: torch.Tensor) -> None:
        code_rows.view(torch.int8).copy_(values.round_())

    def read(self, code_rows: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(code_rows.view(torch.int8))


INT8 = Int8()
