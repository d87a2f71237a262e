"""Codes of one float8_e4m3fn each, in order: a sign, four bits of exponent, three of mantissa; 448 is the largest, no infinity.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433. Scaled so that a block's largest magnitude is
448, an element is off by at most a 16th of itself, or 2^-10 scales where it is below 2^-6 scales. So what is a thousandth
of its block's largest still arrives, at any block size, and the largest arrive less exactly than in `int8`.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

import torch

from .block_format import Code
from .block_parts import in_scales, load_blocks, store_residual, sum_of_bytes
from .choose import runs_triton
from .lazy import kernel

if TYPE_CHECKING:
    import triton.language as tl

_FIRST_CAPABILITY = (8, 9)
"""CUDA's, of the devices that convert float8_e4m3fn."""


@kernel
def _to_float8(x, INTERPRETED: tl.constexpr):
    """`x` (float32, from -448 to 448) as float8_e4m3fn, to the nearest, ties to even, as torch rounds.

    Triton's interpreter rounds ties up, loses a carry into an odd exponent, and truncates below 2^-6; what float8_e4m3fn can
    hold it converts exactly. So there it is given what has been rounded already, by way of 1.5 x 2^23 units of the last place.
    """
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        power_of_two = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), 0.015625)
        large = power_of_two * 1572864.0
        magnitude = (tl.abs(x) + large) - large
        x = (magnitude.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)


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
    x, old, scale, offsets, mask, known = load_blocks(
        values, residual, scales, numel, blocks, 448.0, SMALLEST, ROWS, SIZE
    )
    q = _to_float8(in_scales(x, scale), INTERPRETED)
    tl.store(codes.to(tl.pointer_type(tl.float8e4nv)) + offsets, q, mask=known)
    if residual is not None:
        store_residual(residual, offsets, mask, x, old, q.to(tl.float32), scale, INTERPRETED)


@kernel
def _sum(
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
    codes = codes.to(tl.pointer_type(tl.float8e4nv))
    sum_of_bytes(codes, scales, out, numel, blocks, ranks, ROWS, SIZE, INTERPRETED)


class Float8(Code):
    """float8_e4m3fn."""

    name = "fp8"
    bits = 8
    largest = 448
    quantise_kernel = _quantise
    sum_kernel = _sum

    def write(self, values: torch.Tensor, code_rows: torch.Tensor) -> None:
        code_rows.view(torch.float8_e4m3fn).copy_(values)
        self.read(code_rows, values)

    def read(self, code_rows: torch.Tensor, values: torch.Tensor) -> None:
        # Moved by a bit, exponent and mantissa are those of a float16 that is 2^8 times smaller. torch's own conversion takes
        # ten times as long on a CPU.
        halves = code_rows.view(torch.int8).to(torch.int16).mul_(1 << 7).bitwise_and_(~(1 << 14))
        values.copy_(halves.view(torch.float16)).mul_(1 << 8)

    def runs_triton(self, device: torch.device) -> bool:
        return runs_triton(device) and (device.type == "cpu" or _converts(device))


@functools.cache
def _converts(device: torch.device) -> bool:
    """Whether a CUDA device has instructions for it; says so, once, of one that has not."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= _FIRST_CAPABILITY:
        return True
    warnings.warn(
        f"{device} has compute capability {capability[0]}.{capability[1]}, and instructions for float8_e4m3fn begin with 8.9: "
        "blocks of fp8 are made and read there by plain torch operations, in several passes. Blocks of int8 have a kernel.",
        stacklevel=2,
    )
    return False


FP8 = Float8()
