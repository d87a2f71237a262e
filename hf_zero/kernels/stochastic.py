"""Stochastic rounding of float32 to bfloat16, with the bits of `stochastic_reference` in `arithmetic/stochastic.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..arithmetic.flat import ceil_div
from ..arithmetic.stochastic import LANES, QUIET_NAN, REGION_NUMEL
from .base import kernel

if TYPE_CHECKING:
    import triton.language as tl

_REGIONS_A_PROGRAM = 4


def stochastic_triton(
    source: torch.Tensor, out: torch.Tensor, seed: int, offset: int, regions_a_program: int = _REGIONS_A_PROGRAM
) -> None:
    numel = source.numel()
    if numel:
        _round[(ceil_div(numel, REGION_NUMEL * regions_a_program),)](
            source, out, numel, seed, offset, LANES=LANES, REGIONS=regions_a_program, QUIET_NAN=QUIET_NAN
        )


@kernel
def _round_words(source, out, numel, first, noise, QUIET_NAN: tl.constexpr):
    mask = first < numel
    x = tl.load(source + first, mask=mask, other=0.0)
    bits = (x.to(tl.uint32, bitcast=True) + noise) >> 16
    bits = tl.where(x == x, bits, QUIET_NAN)
    tl.store(out + first, bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)


@kernel
def _round(source, out, numel, seed, offset, LANES: tl.constexpr, REGIONS: tl.constexpr, QUIET_NAN: tl.constexpr):
    region = tl.program_id(0).to(tl.int64) * REGIONS + tl.arange(0, REGIONS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    counter = region * LANES + lane + offset
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = low * 0
    n0, n1, n2, n3 = tl.philox(seed, low, high, zero, zero)
    first = region * (8 * LANES) + lane
    _round_words(source, out, numel, first, n0 & 0xFFFF, QUIET_NAN)
    _round_words(source, out, numel, first + LANES, n0 >> 16, QUIET_NAN)
    _round_words(source, out, numel, first + 2 * LANES, n1 & 0xFFFF, QUIET_NAN)
    _round_words(source, out, numel, first + 3 * LANES, n1 >> 16, QUIET_NAN)
    _round_words(source, out, numel, first + 4 * LANES, n2 & 0xFFFF, QUIET_NAN)
    _round_words(source, out, numel, first + 5 * LANES, n2 >> 16, QUIET_NAN)
    _round_words(source, out, numel, first + 6 * LANES, n3 & 0xFFFF, QUIET_NAN)
    _round_words(source, out, numel, first + 7 * LANES, n3 >> 16, QUIET_NAN)
