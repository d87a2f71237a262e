"""Stochastic rounding of float32 to bfloat16; the random bits depend on a seed and an element's index only.

If an update is smaller than half of a bfloat16 parameter's last digit, rounding to the nearest loses it. Rounding up or down at
random, with probabilities in proportion to the distance, preserves it on average. The random bits come from Philox 4x32-10
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), which has no state. A region has 1,024 elements, and counter
`128 * region + i % 128` yields eight 16-bit words, the low halves of its four numbers first; element i of the region uses word
i // 128. With this order the result does not depend on the block size of a launch, each counter serves eight elements, and
neighboring threads still read neighboring elements.
"""

import torch

from ..extras import extra
from .flat import ceil_div, check_flat, runs_triton

REGION_NUMEL = 1024
LANES = 128
QUIET_NAN = 0x7FC0

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW_32 = 0xFFFFFFFF


def counters_for(numel: int) -> int:
    """Number of counters used to round `numel` elements. Increase `offset` by this number to get different bits."""
    return ceil_div(numel, REGION_NUMEL) * LANES


def round_stochastically(source: torch.Tensor, out: torch.Tensor, *, seed: int, offset: int = 0) -> None:
    """Rounds each float32 element to one of its two bfloat16 neighbors, with probabilities in proportion to the distance.

    Values that bfloat16 can represent are not changed, infinities and NaN included. As when rounding to the nearest, a finite
    value above the largest bfloat16 may become infinite.

    Args:
        source: (n,) float32.
        out: (n,) bfloat16.
        seed: from 0 to 2^63 - 1.
        offset: number of the first counter, from 0. A shard that starts at element s of a longer tensor, s a multiple of 1,024,
            gets the same bits as that tensor with `offset + s // 8`.

    Raises:
        ValueError: a tensor has the wrong size, dtype or device, or `seed` or `offset` is out of range.
    """
    check_flat("source", source, numel=source.numel(), device=source.device, dtypes=[torch.float32])
    check_flat("out", out, numel=source.numel(), device=source.device, dtypes=[torch.bfloat16])
    for name, value in (("seed", seed), ("offset", offset)):
        if not 0 <= value < 2**63:
            raise ValueError(f"hf_zero: {name} is {value}; allowed: 0 to 2^63 - 1. Pass it modulo 2^63.")
    form = extra("kernels", "stochastic_triton") if runs_triton(source.device) else stochastic_reference
    form(source, out, seed, offset)


def stochastic_reference(source: torch.Tensor, out: torch.Tensor, seed: int, offset: int) -> None:
    """Computes `round_stochastically` in torch, with the same bits as the kernel."""
    regions = ceil_div(source.numel(), REGION_NUMEL)
    counters = torch.arange(regions * LANES, dtype=torch.int64, device=source.device) + offset
    numbers = philox(seed, counters)
    words = torch.stack([half for number in numbers for half in (number & 0xFFFF, number >> 16)])
    # Reorder (word, region, lane) to (region, word, lane), the order of the elements.
    noise = words.view(8, regions, LANES).transpose(0, 1).reshape(-1)[: source.numel()]
    bits = (source.view(torch.int32).to(torch.int64) & _LOW_32) + noise >> 16
    # Adding the noise could carry from a NaN's bits into the sign bit and result in minus zero.
    bits = torch.where(source.isnan(), torch.full_like(bits, QUIET_NAN), bits)
    # Convert to signed integers first, because torch cannot convert to unsigned ones on all devices.
    out.view(torch.int16).copy_(torch.where(bits >= 1 << 15, bits - (1 << 16), bits))


def philox(seed: int, counters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Computes Philox 4x32-10 with the key `seed` and the counters (low half, high half, 0, 0).

    Args:
        counters: int64, from 0.

    Returns:
        Four int64 tensors of numbers from 0 to 2^32 - 1.
    """
    key = [seed & _LOW_32, seed >> 32]
    c0, c1 = counters & _LOW_32, counters >> 32
    c2, c3 = torch.zeros_like(counters), torch.zeros_like(counters)
    for _ in range(_ROUNDS):
        # int64 keeps all 64 bits of the product, but interprets the highest one as a sign. The masks below remove the sign.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & _LOW_32) ^ c1 ^ key[0], ((first >> 32) & _LOW_32) ^ c3 ^ key[1]
        c1, c3 = second & _LOW_32, first & _LOW_32
        key = [(word + step) & _LOW_32 for word, step in zip(key, _KEY_STEPS)]
    return c0, c1, c2, c3
