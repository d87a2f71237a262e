"""Arithmetic on flat tensors in torch, and where Triton's kernels do the same arithmetic in its place."""

import functools
import importlib.util
import os
from collections.abc import Sequence

import torch

from .config import AUTO
from .extras import extra, is_installed

# ---- Flat tensors, as buckets and kernels have them ----

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ceil_div(numel: int, block: int) -> int:
    return -(-numel // block)


def check_flat(
    name: str, tensor: torch.Tensor, *, numel: int, device: torch.device, dtypes: Sequence[torch.dtype]
) -> None:
    """Raises `ValueError` unless `tensor` is flat, contiguous, on `device`, and has `numel` elements of one of `dtypes`."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"hf_zero: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, and kernels take flat contiguous "
            "tensors. Pass a contiguous `view(-1)`."
        )
    if tensor.numel() != numel:
        raise ValueError(f"hf_zero: {name} has {tensor.numel()} elements, and {numel} are needed. Cut or pad it.")
    if tensor.device != device:
        raise ValueError(f"hf_zero: {name} is on {tensor.device}, and the others are on {device}. Move it there.")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"hf_zero: {name} is {tensor.dtype}, and {allowed} are allowed. Cast it first.")


# ---- Where kernels run: on a CUDA device where triton is installed, else torch does what they would ----

_GIVEN_UP: set[str] = set()
"""Types of devices on which no kernel is launched any more."""


@functools.cache
def has_triton() -> bool:
    """Whether triton and the room of kernels are installed; found without importing them."""
    return is_installed("kernels") and importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether kernels on tensors of `device` run in Triton; on the host, only under TRITON_INTERPRET=1."""
    if device.type in _GIVEN_UP:
        return False
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
    return device.type == "cuda" and torch.version.cuda is not None and has_triton()


def give_up_triton(device: torch.device) -> None:
    """From now on, kernels on this kind of device run as their torch references in this process."""
    _GIVEN_UP.add(device.type)


def uses_kernels(wanted: str, device: torch.device) -> bool:
    """Whether an engine on `device` measures gradients and steps by kernels.

    Args:
        wanted: the config's `kernels`. `auto` is where they run in their Triton form.
    """
    return runs_triton(device) if wanted == AUTO else wanted == "always"


# ---- Sums whose order is the same on every run ----
#
# Of squares over parts of 65,536 elements in float32, and over the parts in float64: one float32 accumulator over millions of
# elements would lose the seventh digit that the clipping norm is compared in.

PART_NUMEL = 1 << 16
_SHORT_ROW_NUMEL = 1 << 9


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a flat tensor, as a float64 scalar on its device; NaN or inf where an element is."""
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    # torch adds 16-bit elements one by one, which loses the sixth digit over a part; short rows keep the seventh.
    row_numel = PART_NUMEL if flat.dtype == torch.float32 else _SHORT_ROW_NUMEL
    whole = flat.numel() // row_numel * row_numel
    parts = [flat[:whole].view(-1, row_numel), flat[whole:].view(1, -1)]
    dtype = torch.promote_types(flat.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(p, dim=1, dtype=dtype) for p in parts if p.numel()]
    return torch.cat(norms).double().square_().sum()


def sums_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`sum_of_squares` of each of some tensors on one device, contiguous and at least one, as a float64 vector."""
    # Most parameters of a model are short, and are one part: their norms come from one call.
    is_short = [t.dtype is torch.float32 and 0 < t.numel() < PART_NUMEL for t in tensors]
    short = [t for t, one_part in zip(tensors, is_short) if one_part]
    squares = torch.stack(torch._foreach_norm(short)).double().square_() if short else torch.empty(0)
    if len(short) == len(tensors):
        return squares
    found = iter(squares)
    return torch.stack(
        [next(found) if one_part else sum_of_squares(t.reshape(-1)) for t, one_part in zip(tensors, is_short)]
    )


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Computes `out = ((parts[0] + parts[1]) + parts[2]) + …`, so that the result does not depend on arrival.

    Args:
        parts: one flat tensor a rank, of equal numel and dtype; all but the last may be overwritten.
        out: flat, same numel; may share memory with any part. With a wider dtype the sum is taken in that dtype.
    """
    if len(parts) == 1:
        if out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
        return
    if out.dtype == parts[0].dtype:
        total = parts[0]
        for part in parts[1:-1]:
            total.add_(part)
        # Into `out` at the very end: `out` may be one of the parts that were still to be added.
        torch.add(total, parts[-1], out=out)
        return
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)


# ---- Stochastic rounding of float32 to bfloat16, with random bits that depend on a seed and a place and nothing else ----
#
# An update smaller than half of a bfloat16 parameter's last digit is lost by rounding to the nearest; rounded up or down by
# chance, in proportion to the distance, it arrives on average. The bits are Philox 4x32-10's (Salmon et al. 2011, "Parallel
# random numbers: as easy as 1, 2, 3"), which needs no state: element i of a region of 1,024 takes the 16-bit word i // 128 of
# the eight that counter `128 * region + i % 128` gives, low halves of the four numbers first. So a launch's block size changes
# nothing, a counter serves eight elements, and threads beside each other still read neighbours.

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
