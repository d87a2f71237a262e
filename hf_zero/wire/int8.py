"""8-bit codes: one signed byte for each element, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kernels.base import kernel, nearest_integer
from .block_kernels import in_scales, load_blocks, store_residual, sum_of_bytes
from .code import Code

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _quantise_int8(
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
    x, old, scale, offsets, mask, known = load_blocks(
        values, residual, scales, numel, blocks, 127.0, SMALLEST, ROWS, SIZE
    )
    q = nearest_integer(in_scales(x, scale))
    tl.store(codes.to(tl.pointer_type(tl.int8)) + offsets, q.to(tl.int8), mask=known)
    if residual is not None:
        store_residual(residual, offsets, mask, x, old, q, scale, INTERPRETED)


@kernel
def _sum_int8(
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
    codes = codes.to(tl.pointer_type(tl.int8))
    sum_of_bytes(codes, scales, out, numel, blocks, ranks, ROWS, SIZE, INTERPRETED)


class Int8(Code):
    """Whole numbers from -127 to 127."""

    name = "int8"
    bits = 8
    largest = 127
    quantise_kernel = _quantise_int8
    sum_kernel = _sum_int8

    def write(self, values: torch.Tensor, code_rows: torch.Tensor) -> None:
        code_rows.view(torch.int8).copy_(values.round_())

    def read(self, code_rows: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(code_rows.view(torch.int8))


INT8 = Int8()
