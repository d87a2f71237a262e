"""Quantises gradients and parameters in int8 or int4 blocks for the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..arithmetic import FLOAT_DTYPES, ceil_div, check_flat, runs_triton
from ..kernels.base import Kernel, is_interpreted, kernel, nearest_integer, rounded
from ..layout import BLOCK_NUMEL

if TYPE_CHECKING:
    import triton.language as tl


# ---- A quantised tensor: blocks of elements with a common scale, and a code for each element ----


class Code(ABC):
    """A code for elements that have been divided by their block's scale.

    Attributes:
        name: as the config has it.
        bits: of an element.
        largest: the largest magnitude that can be written.
        quantise_kernel, sum_kernel: the Triton forms of `quantise` and `dequantise_sum`.
    """

    name: str
    bits: int
    largest: int
    quantise_kernel: Kernel
    sum_kernel: Kernel

    @abstractmethod
    def write(self, values: torch.Tensor, code_rows: torch.Tensor) -> None:
        """Rounds to the nearest value of the code, ties to even, in place too, and writes the code.

        Args:
            values: (blocks, B) float32, from -largest to largest.
            code_rows: (blocks, B * bits / 8) uint8.
        """

    @abstractmethod
    def read(self, code_rows: torch.Tensor, values: torch.Tensor) -> None:
        """Reads the values of a code that `write` has written, into `values`."""

    def runs_triton(self, device: torch.device) -> bool:
        """Whether the Triton forms run on tensors of `device`."""
        return runs_triton(device)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """The code of an element, and the number of elements with a common scale: a power of two from 32 to 4096."""

    code: Code
    block_numel: int = BLOCK_NUMEL

    def __post_init__(self) -> None:
        if not 32 <= self.block_numel <= 4096 or self.block_numel & (self.block_numel - 1):
            raise ValueError(
                f"hf_zero: blocks of {self.block_numel} elements; a power of two from 32 to 4096 is allowed. Choose one of them."
            )

    def blocks(self, numel: int) -> int:
        """Blocks, and so scales, of a tensor of `numel` elements."""
        return ceil_div(numel, self.block_numel)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of a tensor of `numel` elements."""
        return self.blocks(numel) * self.block_numel * self.code.bits // 8

    def round_in_place(self, values: torch.Tensor) -> None:
        """Rounds values to those that a receiver would dequantise."""
        round_to_blocks(values, values, self)


# ---- The common part of kernels that quantise blocks ----


@kernel
def load_with_residual(values, residual, offsets, mask):
    """Values plus residual, and the residual by itself."""
    x = tl.load(values + offsets, mask=mask, other=0.0).to(tl.float32)
    old = x
    if residual is not None:
        old = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        x = x + old
    return x, old


@kernel
def magnitudes(x):
    """Magnitudes, inf for NaN."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))


@kernel
def scale_of(absmax, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """The scale at which a block's largest magnitude is written as LARGEST."""
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
    """Elements of this program's blocks, the residual by itself, and the scales, which are stored; offsets and masks."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = offsets < numel
    x, old = load_with_residual(values, residual, offsets, mask)
    scale = scale_of(tl.max(magnitudes(x), axis=1), LARGEST, SMALLEST)
    tl.store(scales + row, scale, mask=row < blocks)
    return x, old, tl.broadcast_to(scale[:, None], x.shape), offsets, mask, (row < blocks)[:, None]


@kernel
def in_scales(x, scale):
    """`x` / `scale`, rounded as the reference rounds; 0 where the scale is inf."""
    return tl.where(scale < float("inf"), tl.div_rn(x, scale), 0.0)


@kernel
def store_residual(residual, offsets, mask, x, old, q, scale, INTERPRETED: tl.constexpr):
    """Stores the error of writing `q` for `x`; the former residual if the block is not finite."""
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
    """Sums the values of one-byte codes in rank order; `codes` points to their type."""
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


# ---- Codes of one signed byte each, in order ----


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


# ---- Codes of half a byte each: element i and element i + B/2 of a block share byte i, the former in its low half ----
#
# Two runs of neighbours, so that neither a vector unit nor a GPU's threads have to take every other element.

_OFFSET = 8
"""Added to a code, which lies between -7 and 7, so that it is not negative."""


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


# ---- Tensors in blocks of 8-bit or 4-bit codes, one float32 scale a block, the error carried to the next step ----
#
# Format of a flat tensor of n elements in blocks of B: ceil(n / B) scales, and for each block B codes, the last block's
# padded with zeros. `int8` and `int4` are the codes; the file of each tells how it is written.
#
# A block's scale is its largest magnitude / the largest that the code can write, at least the smallest normal float32; a
# code is the element / scale, rounded to the nearest that can be written, ties to even. So a block of zeros gives zeros,
# and no element is off by more than half of a code's step. **A block with a NaN or an infinity gets the scale inf and codes
# of zeros, and comes out as NaN, all of it**: the check for non-finite gradients sees it on every rank.

CODES = {code.name: code for code in (INT8, INT4)}
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
RESIDUAL_DTYPES = (torch.float32, torch.bfloat16)

_SCRATCH_NUMEL = 1 << 17
"""Elements that the reference takes through all its passes at a time, so that they stay in a core's cache."""


def block_format(code: str) -> BlockFormat:
    """Blocks as the settings name them."""
    return BlockFormat(code=CODES[code])


def quantise(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    format: BlockFormat,
    residual: torch.Tensor | None = None,
) -> None:
    """Writes the codes and scales of `values + residual`, and the error into `residual`.

    Error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv 1901.09847): what
    is sent over many steps sums to the sum of the values, but for the last residual. In a block that is not finite the
    residual stays as it was, so a refused step does not poison the next.

    Args:
        values: flat, n elements, float32, bfloat16 or float16. Only read.
        codes: (format.code_bytes(n),) uint8.
        scales: (format.blocks(n),) float32.
        residual: n elements, float32 or bfloat16, zeros at first. bfloat16 keeps 8 binary digits of what is carried, which
            is itself at most half of a code's step. None to let the errors go.

    Raises:
        ValueError: a tensor does not fit.
    """
    numel, device = values.numel(), values.device
    check_flat("values", values, numel=numel, device=device, dtypes=FLOAT_DTYPES)
    _check_quantised(codes, scales, numel, device, format)
    if residual is not None:
        check_flat("residual", residual, numel=numel, device=device, dtypes=RESIDUAL_DTYPES)
    (quantise_triton if format.code.runs_triton(device) else quantise_reference)(
        values, codes, scales, format, residual
    )


def dequantise(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    """`out` = code * scale, n elements, float32, bfloat16 or float16. The rest as in `quantise`."""
    dequantise_sum(codes.view(1, -1), scales.view(1, -1), out, format)


def round_to_blocks(values: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    """Writes into `out`, like `values` or `values` itself, the values that a receiver would dequantise."""
    codes = torch.empty(format.code_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    scales = torch.empty(format.blocks(values.numel()), dtype=torch.float32, device=values.device)
    quantise(values, codes, scales, format)
    dequantise(codes, scales, out, format)


def dequantise_sum(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    """Sums the W ranks' tensors in rank order, `((first + second) + third) + …`, in float32, and rounds once into `out`.

    Args:
        codes: (W, format.code_bytes(n)) uint8, contiguous.
        scales: (W, format.blocks(n)) float32, contiguous.
        out: flat, n elements, float32, bfloat16 or float16.

    Raises:
        ValueError: a tensor does not fit.
    """
    numel, device = out.numel(), out.device
    check_flat("out", out, numel=numel, device=device, dtypes=FLOAT_DTYPES)
    if codes.dim() != 2 or scales.dim() != 2 or codes.shape[0] != scales.shape[0] or not codes.shape[0]:
        raise ValueError(
            f"hf_zero: codes of shape {tuple(codes.shape)} and scales of shape {tuple(scales.shape)}; both have one row a rank. "
            "Stack the ranks' parts."
        )
    for rank in range(codes.shape[0]):
        _check_quantised(codes[rank], scales[rank], numel, device, format)
    (dequantise_sum_triton if format.code.runs_triton(device) else dequantise_sum_reference)(codes, scales, out, format)


def _check_quantised(
    codes: torch.Tensor, scales: torch.Tensor, numel: int, device: torch.device, format: BlockFormat
) -> None:
    check_flat("codes", codes, numel=format.code_bytes(numel), device=device, dtypes=[torch.uint8])
    check_flat("scales", scales, numel=format.blocks(numel), device=device, dtypes=[torch.float32])


def quantise_reference(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    format: BlockFormat,
    residual: torch.Tensor | None,
) -> None:
    """`quantise` in torch, bit for bit the kernel's; fast on a CPU."""
    numel, size = values.numel(), format.block_numel
    chunk = min(_SCRATCH_NUMEL, format.blocks(numel) * size)
    whole, scratch = values.new_empty((2, chunk), dtype=torch.float32)
    code_rows = codes.view(-1, size * format.code.bits // 8)
    for start in range(0, numel, _SCRATCH_NUMEL):
        part = slice(start, min(start + chunk, numel))
        length = part.stop - part.start
        blocks = slice(start // size, start // size + format.blocks(length))
        x = whole[: format.blocks(length) * size]
        x[length:].zero_()
        x[:length].copy_(values[part])
        if residual is not None:
            x[:length].add_(residual[part])
        rows, scale = x.view(-1, size), scales[blocks]
        q = scratch[: len(x)].view(-1, size)
        # An infinity norm is one call and takes fifteen times as long.
        torch.amax(torch.abs(rows, out=q), dim=1, out=scale)
        # By a tensor: divided by a number, torch multiplies by its reciprocal on a GPU, and some scales are off by a digit.
        largest = scale.new_full((), format.code.largest)
        scale.nan_to_num_(nan=float("inf"), posinf=float("inf")).div_(largest).clamp_(min=SMALLEST_NORMAL)
        torch.div(rows, scale[:, None], out=q)
        bad = scale.isinf()
        # To ask would make the host wait for another device.
        may_be_bad = bad.device.type != "cpu" or bool(bad.any())
        if may_be_bad:
            q.masked_fill_(bad[:, None], 0)
        format.code.write(q, code_rows[blocks])
        if residual is not None:
            error = rows.sub_(q.mul_(scale[:, None])).view(-1)[:length]
            if may_be_bad:
                error = torch.where(bad.repeat_interleave(size)[:length], residual[part].float(), error)
            residual[part].copy_(error)


def dequantise_sum_reference(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    """`dequantise_sum` in torch, bit for bit the kernel's; fast on a CPU."""
    numel, size = out.numel(), format.block_numel
    chunk = min(_SCRATCH_NUMEL, format.blocks(numel) * size)
    whole, scratch = out.new_empty((2, chunk), dtype=torch.float32)
    code_rows = codes.view(len(codes), -1, size * format.code.bits // 8)
    for start in range(0, numel, _SCRATCH_NUMEL):
        length = min(chunk, numel - start)
        blocks = slice(start // size, start // size + format.blocks(length))
        shape = (format.blocks(length), size)
        total, term = (memory[: shape[0] * size].view(shape) for memory in (whole, scratch))
        for rank in range(len(codes)):
            place = term if rank else total
            format.code.read(code_rows[rank, blocks], place)
            place.mul_(scales[rank, blocks, None])
            if rank:
                total.add_(term)
        out[start : start + length].copy_(total.view(-1)[:length])


def _launch(format: BlockFormat) -> tuple[int, int]:
    """Blocks a program and its warps: four elements a thread, for both halves of a byte alike."""
    tile_numel = max(512 * 8 // format.code.bits, format.block_numel)
    return tile_numel // format.block_numel, max(1, tile_numel * format.code.bits // 8 // 128)


def quantise_triton(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    format: BlockFormat,
    residual: torch.Tensor | None,
) -> None:
    rows, warps = _launch(format)
    blocks = format.blocks(values.numel())
    if blocks:
        format.code.quantise_kernel[(ceil_div(blocks, rows),)](
            values,
            codes,
            scales,
            residual,
            values.numel(),
            blocks,
            SMALLEST=SMALLEST_NORMAL,
            ROWS=rows,
            SIZE=format.block_numel,
            INTERPRETED=is_interpreted(),
            num_warps=warps,
        )


def dequantise_sum_triton(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    rows, warps = _launch(format)
    blocks = format.blocks(out.numel())
    if blocks:
        format.code.sum_kernel[(ceil_div(blocks, rows),)](
            codes,
            scales,
            out,
            out.numel(),
            blocks,
            len(codes),
            ROWS=rows,
            SIZE=format.block_numel,
            INTERPRETED=is_interpreted(),
            num_warps=warps,
        )
