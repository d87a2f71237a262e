"""Stochastic rounding of float32 to bfloat16; the random bits depend on a seed and an element's index only.

An update smaller than half of a bfloat16 parameter's last digit is lost by rounding to the nearest; rounded up or down by
chance, in proportion to the distance, it arrives on average. The bits are Philox 4x32-10's (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"), which needs no state: element i of a region of 1,024 takes the 16-bit word i // 128 of
the eight that counter `128 * region + i % 128` gives, low halves of the four numbers first. So a launch's block size changes
nothing, a counter serves eight elements, and threads beside each other still read neighbours.
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
    """How many counters rounding `numel` elements uses up: by how much to raise `offset` for other bits."""
    return ceil_div(numel, REGION_NUMEL) * LANES


def round_stochastically(source: torch.Tensor, out: torch.Tensor, *, seed: int, offset: int = 0) -> None:
    """Rounds each element to a neighbouring bfloat16: to the upper one with a probability by distance.

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
    form = extra("kernels", "stochastic_triton") if runs_triton(source.device) else stochastic_reference
    form(source, out, seed, offset)


def stochastic_reference(source: torch.Tensor, out: torch.Tensor, seed: int, offset: int) -> None:
    """`round_stochastically` in torch, bit for bit the kernel's."""
    regions = ceil_div(source.numel(), REGION_NUMEL)
    counters = torch.arange(regions * LANES, dtype=torch.int64, device=source.device) + offset
    numbers = philox(seed, counters)
    words = torch.stack([half for number in numbers for half in (number & 0xFFFF, number >> 16)])
    # (word, region, lane) to (region, word, lane), which is the order of the elements.
    noise = words.view(8, regions, LANES).transpose(0, 1).reshape(-1)[: source.numel()]
    bits = (source.view(torch.int32).to(torch.int64) & _LOW_32) + noise >> 16
    # The noise may carry the bits of a NaN over into the sign: minus zero in the place of a NaN.
    bits = torch.where(source.isnan(), torch.full_like(bits, QUIET_NAN), bits)
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
