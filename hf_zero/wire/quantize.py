"""Quantizes tensors in blocks, and dequantizes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..arithmetic.flat import FLOAT_DTYPES, ceil_div, check_flat, runs_triton
from ..kernels.base import is_interpreted
from ..layout.blocks import BLOCK_NUMEL
from .block_kernels import LARGEST_CODE, quantize_kernel, sum_kernel


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Blocks of 8-bit codes. `block_numel` elements have a common scale: a power of two from 32 to 4096."""

    block_numel: int = BLOCK_NUMEL

    def __post_init__(self) -> None:
        if not 32 <= self.block_numel <= 4096 or self.block_numel & (self.block_numel - 1):
            raise ValueError(
                f"hf_zero: blocks of {self.block_numel} elements; a power of two from 32 to 4096 is allowed. Choose one of them."
            )

    def blocks(self, numel: int) -> int:
        """Number of blocks, and so of scales, of a tensor of `numel` elements."""
        return ceil_div(numel, self.block_numel)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of a tensor of `numel` elements."""
        return self.blocks(numel) * self.block_numel

    def round_in_place(self, values: torch.Tensor) -> None:
        """Rounds values to the values after a receiver's dequantization."""
        round_to_blocks(values, values, self)


# Format of a flat tensor of n elements in blocks of B: ceil(n / B) scales, and B codes for each block; the last block is padded
# with zeros. A code is a signed byte from -127 to 127.
#
# The scale of a block is its largest magnitude divided by 127, and at least the smallest normal
# float32. A code is the element divided by the scale, rounded to the nearest integer, ties to even. Therefore a block
# of zeros results in zeros, and no element has an error larger than half a scale. **A block with a NaN or an infinity
# gets the scale inf and codes of zero, and all its elements become NaN**, so the check for non-finite gradients sees the NaNs on
# every rank.

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
RESIDUAL_DTYPES = (torch.float32, torch.bfloat16)

_SCRATCH_NUMEL = 1 << 17
"""Number of elements that the reference processes at a time, so that they stay in a core's cache."""


def quantize(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    format: BlockFormat,
    residual: torch.Tensor | None = None,
) -> None:
    """Writes the codes and scales of `values + residual`, and the rounding error to `residual`.

    With error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv 1901.09847), the
    sum of what is sent over many steps equals the sum of the values, except for the last residual. In a block that is not finite,
    the residual does not change, so a refused step does not affect the next one.

    Args:
        values: (n,) float32, bfloat16 or float16. Not modified.
        codes: (format.code_bytes(n),) uint8.
        scales: (format.blocks(n),) float32.
        residual: (n,) float32 or bfloat16, zeros at first. bfloat16 keeps 8 binary digits of the error, which is at most half a
            scale. None drops the error.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or device.
    """
    numel, device = values.numel(), values.device
    check_flat("values", values, numel=numel, device=device, dtypes=FLOAT_DTYPES)
    _check_quantized(codes, scales, numel, device, format)
    if residual is not None:
        check_flat("residual", residual, numel=numel, device=device, dtypes=RESIDUAL_DTYPES)
    (quantize_triton if runs_triton(device) else quantize_reference)(values, codes, scales, format, residual)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    """Computes `out` = code * scale, (n,) float32, bfloat16 or float16. For the other arguments see `quantize`."""
    dequantize_sum(codes.view(1, -1), scales.view(1, -1), out, format)


def round_to_blocks(values: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    """Writes the values after a receiver's dequantization into `out`, which has the shape of `values` or is `values`."""
    codes = torch.empty(format.code_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    scales = torch.empty(format.blocks(values.numel()), dtype=torch.float32, device=values.device)
    quantize(values, codes, scales, format)
    dequantize(codes, scales, out, format)


def dequantize_sum(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    """Sums the tensors of W ranks in rank order, `((first + second) + third) + …`, in float32, and rounds once into `out`.

    Args:
        codes: (W, format.code_bytes(n)) uint8, contiguous.
        scales: (W, format.blocks(n)) float32, contiguous.
        out: (n,) float32, bfloat16 or float16.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or device.
    """
    numel, device = out.numel(), out.device
    check_flat("out", out, numel=numel, device=device, dtypes=FLOAT_DTYPES)
    if codes.dim() != 2 or scales.dim() != 2 or codes.shape[0] != scales.shape[0] or not codes.shape[0]:
        raise ValueError(
            f"hf_zero: codes of shape {tuple(codes.shape)} and scales of shape {tuple(scales.shape)}; both need one row per "
            "rank. Stack the ranks' parts."
        )
    for rank in range(codes.shape[0]):
        _check_quantized(codes[rank], scales[rank], numel, device, format)
    (dequantize_sum_triton if runs_triton(device) else dequantize_sum_reference)(codes, scales, out, format)


def _check_quantized(
    codes: torch.Tensor, scales: torch.Tensor, numel: int, device: torch.device, format: BlockFormat
) -> None:
    check_flat("codes", codes, numel=format.code_bytes(numel), device=device, dtypes=[torch.uint8])
    check_flat("scales", scales, numel=format.blocks(numel), device=device, dtypes=[torch.float32])


def quantize_reference(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    format: BlockFormat,
    residual: torch.Tensor | None,
) -> None:
    """Computes `quantize` in torch, with the same bits as the kernel; fast on a CPU."""
    numel, size = values.numel(), format.block_numel
    chunk = min(_SCRATCH_NUMEL, format.blocks(numel) * size)
    whole, scratch = values.new_empty((2, chunk), dtype=torch.float32)
    code_rows = codes.view(torch.int8).view(-1, size)
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
        # `vector_norm` with ord=inf would be one call, but is fifteen times slower.
        torch.amax(torch.abs(rows, out=q), dim=1, out=scale)
        # Divide by a tensor. On a GPU, torch replaces a division by a number by a multiplication, which changes the last digit of
        # some scales.
        largest = scale.new_full((), LARGEST_CODE)
        scale.nan_to_num_(nan=float("inf"), posinf=float("inf")).div_(largest).clamp_(min=SMALLEST_NORMAL)
        torch.div(rows, scale[:, None], out=q)
        bad = scale.isinf()
        # On an accelerator the check would make the host wait.
        may_be_bad = bad.device.type != "cpu" or bool(bad.any())
        if may_be_bad:
            q.masked_fill_(bad[:, None], 0)
        code_rows[blocks].copy_(q.round_())
        if residual is not None:
            error = rows.sub_(q.mul_(scale[:, None])).view(-1)[:length]
            if may_be_bad:
                error = torch.where(bad.repeat_interleave(size)[:length], residual[part].float(), error)
            residual[part].copy_(error)


def dequantize_sum_reference(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    """Computes `dequantize_sum` in torch, with the same bits as the kernel; fast on a CPU."""
    numel, size = out.numel(), format.block_numel
    chunk = min(_SCRATCH_NUMEL, format.blocks(numel) * size)
    whole, scratch = out.new_empty((2, chunk), dtype=torch.float32)
    code_rows = codes.view(torch.int8).view(len(codes), -1, size)
    for start in range(0, numel, _SCRATCH_NUMEL):
        length = min(chunk, numel - start)
        blocks = slice(start // size, start // size + format.blocks(length))
        shape = (format.blocks(length), size)
        total, term = (memory[: shape[0] * size].view(shape) for memory in (whole, scratch))
        for rank in range(len(codes)):
            target = term if rank else total
            target.copy_(code_rows[rank, blocks])
            target.mul_(scales[rank, blocks, None])
            if rank:
                total.add_(term)
        out[start : start + length].copy_(total.view(-1)[:length])


def _launch(format: BlockFormat) -> tuple[int, int]:
    """Returns (blocks, warps) of a program: four elements for each thread."""
    tile_numel = max(512, format.block_numel)
    return tile_numel // format.block_numel, tile_numel // 128


def quantize_triton(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    format: BlockFormat,
    residual: torch.Tensor | None,
) -> None:
    rows, warps = _launch(format)
    blocks = format.blocks(values.numel())
    if blocks:
        quantize_kernel[(ceil_div(blocks, rows),)](
            values,
            codes,
            scales,
            residual,
            values.numel(),
            blocks,
            LARGEST=float(LARGEST_CODE),
            SMALLEST=SMALLEST_NORMAL,
            ROWS=rows,
            SIZE=format.block_numel,
            INTERPRETED=is_interpreted(),
            num_warps=warps,
        )


def dequantize_sum_triton(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, format: BlockFormat) -> None:
    rows, warps = _launch(format)
    blocks = format.blocks(out.numel())
    if blocks:
        sum_kernel[(ceil_div(blocks, rows),)](
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
