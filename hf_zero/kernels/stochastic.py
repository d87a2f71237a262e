"""Stochastic rounding of float32 to bfloat16, with random bits that depend on a seed and a place and nothing else.

An update smaller than half of a bfloat16 parameter's last digit is lost by rounding to the nearest; rounded up or down by
chance, in proportion to the distance, it arrives on average. The bits are Philox 4x32-10's (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"), which needs no state: element i of a region of 1,024 takes the 16-bit word i // 128 of
the eight that counter `128 * region + i % 128` gives, low halves of the four numbers first. So a launch's block size changes
nothing, a counter serves eight elements, and threads beside each other still read neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .base import ceil_div, check_flat, kernel, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

REGION_NUMEL = 1024
_LANES = 128
_REGIONS_A_PROGRAM = 4
_QUIET_NAN = 0x7FC0

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW_32 = 0xFFFFFFFF


def counters_for(numel: int) -> int:
    """How many counters rounding `numel` elements uses up: by how much to raise `offset` for other bits."""
    return ceil_div(numel, REGION_NUMEL) * _LANES


def round_stochastically(source: torch.Tensor, out: torch.Tensor, *, seed: int, offset: int = 0) -> None:
    """Rounds each element to one of the two bfloat16 beside it; to the upper with probability of its place between them.

    What bfloat16 can hold stays as it is, infinities and NaN too. As with rounding to the nearest, a finite value above the
    largest bfloat16 may become infinite.

    Args:
        source: flat, float32.
        out: same numel, bfloat16.
        seed: from 0 to 2^63 - 1.
        offset: of the first counter, from 0. A shard that begins at element s of a longer tensor, s a multiple of 1,024, gets
            that tensor's bits with `offset + s // 8`.

    Raises:
        ValueError: a tensor does not fit, or seed or offset is out of range.
    """
    check_flat("source", source, numel=source.numel(), device=source.device, dtypes=[torch.float32])
    check_flat("out", out, numel=source.numel(), device=source.device, dtypes=[torch.bfloat16])
    for name, value in (("seed", seed), ("offset", offset)):
        if not 0 <= value < 2**63:
            raise ValueError(f"hf_zero: {name} is {value}; from 0 to 2^63 - 1 is allowed. Take it modulo 2^63.")
    (stochastic_triton if runs_triton(source.device) else stochastic_reference)(source, out, seed, offset)


def stochastic_reference(source: torch.Tensor, out: torch.Tensor, seed: int, offset: int) -> None:
    """`round_stochastically` in torch, bit for bit the kernel's."""
    regions = ceil_div(source.numel(), REGION_NUMEL)
    counters = torch.arange(regions * _LANES, dtype=torch.int64, device=source.device) + offset
    numbers = philox(seed, counters)
    words = torch.stack([half for number in numbers for half in (number & 0xFFFF, number >> 16)])
    # (word, region, lane) to (region, word, lane), which is the order of the elements.
    noise = words.view(8, regions, _LANES).transpose(0, 1).reshape(-1)[: source.numel()]
    bits = (source.view(torch.int32).to(torch.int64) & _LOW_32) + noise >> 16
    bits = torch.where(source.isnan(), torch.full_like(bits, _QUIET_NAN), bits)
    # By way of signed numbers, since torch does not convert to those without a sign everywhere.
    out.view(torch.int16).copy_(torch.where(bits >= 1 << 15, bits - (1 << 16), bits))


def philox(seed: int, counters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Philox 4x32-10 with the key `seed` and the counters (low half, high half, 0, 0).

    Args:
        counters: int64, from 0.

    Returns:
        four int64 tensors of numbers from 0 to 2^32 - 1.
    """
    key = [seed & _LOW_32, seed >> 32]
    c0, c1 = counters & _LOW_32, counters >> 32
    c2, c3 = torch.zeros_like(counters), torch.zeros_like(counters)
    for _ in range(_ROUNDS):
        # int64 keeps all 64 bits of the product; only its sign is not meant.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & _LOW_32) ^ c1 ^ key[0], ((first >> 32) & _LOW_32) ^ c3 ^ key[1]
        c1, c3 = second & _LOW_32, first & _LOW_32
        key = [(word + step) & _LOW_32 for word, step in zip(key, _KEY_STEPS)]
    return c0, c1, c2, c3


def stochastic_triton(
    source: torch.Tensor, out: torch.Tensor, seed: int, offset: int, regions_a_program: int = _REGIONS_A_PROGRAM
) -> None:
    """`round_stochastically` in one launch."""
    numel = source.numel()
    if numel:
        _round[(ceil_div(numel, REGION_NUMEL * regions_a_program),)](
            source, out, numel, seed, offset, LANES=_LANES, REGIONS=regions_a_program, QUIET_NAN=_QUIET_NAN
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
