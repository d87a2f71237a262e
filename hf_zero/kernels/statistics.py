"""Norms, finiteness and sums of flat buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from ..arithmetic.flat import FLOAT_DTYPES, are_flat, ceil_div, check_flat, runs_triton
from ..arithmetic.sums import PART_NUMEL, sum_of_squares
from ..buckets.bucket import TENSOR_OF, Row
from ..buckets.gradients import have_gradients
from ..buckets.runs import runs_of
from ..step.norm import NORM_LABEL, GradientNorm, Measured
from .base import check_scalar, kernel

if TYPE_CHECKING:
    import triton.language as tl

_GRADIENT, _DEVICE = attrgetter("gradient"), attrgetter("device")


# ---- Statistics of all gradients of a step: the sum of squares, and the number of non-finite ones ----
#
# Written in torch, clipping needs four passes over memory for very little arithmetic, and an `.item()` stops the device's queue.
# Here one launch for each shard, and one more for their parts, leave the results on the device, where the optimizer's kernel
# reads them.
#
# Squares are summed in float32 over parts of 65,536 elements, and in float64 over the parts: a single float32 accumulator over
# millions of elements would lose the seventh digit, to which clipping norms are compared. The parts depend only on the number of
# elements, and there are no atomic additions, so equal gradients result in equal bits in every run.
BLOCK_NUMEL = 4096
"""Number of elements that a program of the first stage reads at a time."""


PARTS_A_STEP = 1024
"""Number of parts that the program of the second stage reads at a time."""

NORM, COEFFICIENT, MULTIPLIER, FOUND_INF = range(4)
"""Indices of the result of `step_scalars`."""


def gradient_statistics(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Computes the sum of squares, and the number of NaN and infinite elements, over all shards.

    Args:
        shards: flat, contiguous, float32, bfloat16 or float16, all on one device; at least one.

    Returns:
        (2,) float64 on their device: the sum of squares (NaN or inf if an element is) and the number. The ranks' sum is computed
        in float64.

    Raises:
        ValueError: a shard has the wrong shape, dtype or device.
    """
    for index, shard in enumerate(() if are_flat(shards) else shards):
        check_flat(f"shard {index}", shard, numel=shard.numel(), device=shards[0].device, dtypes=FLOAT_DTYPES)
    return (statistics_triton if runs_triton(shards[0].device) else statistics_reference)(shards)


def statistics_reference(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    squares = torch.stack([sum_of_squares(shard) for shard in shards]).sum()
    # A finite sum has only finite terms. Checking this on the host saves a second pass over all gradients.
    if squares.device.type == "cpu" and squares.isfinite():
        return torch.stack([squares, torch.zeros_like(squares)])
    counts = [torch.isfinite(shard).logical_not_().sum() for shard in shards]
    return torch.stack([squares, torch.stack(counts).sum().double()])


def statistics_triton(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Computes `gradient_statistics` with one launch for each shard, and one over their parts."""
    device = shards[0].device
    part_counts = [ceil_div(shard.numel(), PART_NUMEL) for shard in shards]
    parts = sum(part_counts)
    # One split of each tensor, instead of a slice for each shard.
    squares = torch.empty(parts, dtype=torch.float32, device=device)
    counts = torch.empty(parts, dtype=torch.int32, device=device)
    for shard, part_count, *of_shard in zip(shards, part_counts, squares.split(part_counts), counts.split(part_counts)):
        if part_count:
            _sum_parts[(part_count,)](shard, *of_shard, shard.numel(), PART=PART_NUMEL, BLOCK=BLOCK_NUMEL, num_warps=8)
    out = torch.empty(2, dtype=torch.float64, device=device)
    # Round up to a power of two, so shards of many sizes share a few compiled kernels.
    steps = 1 << (ceil_div(parts, PARTS_A_STEP) - 1).bit_length() if parts else 0
    _sum_of_parts[(1,)](squares, counts, out, parts, STEPS=steps, BLOCK=PARTS_A_STEP)
    return out


def step_scalars(statistics: torch.Tensor, max_norm: float, inverse_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the scalars of a step for the optimizer's kernel on the device, without the host.

    norm = sqrt(sum of squares) * inverse_scale and coefficient = min(1, max_norm / (norm + 1e-6)), as
    torch.nn.utils.clip_grads_with_norm_ computes it in float32.

    Args:
        statistics: (2,) float64, `gradient_statistics` summed over the ranks.
        max_norm: inf for no clipping.
        inverse_scale: one float32 element, 1 / loss scale; None if gradients are not scaled.

    Returns:
        (4,) float32 on the device: the norm of the unscaled gradients; the clip coefficient (NaN if the norm is); multiplier
        = inverse_scale * coefficient, for the scaled gradients; found_inf, 1 if a gradient or the norm is NaN or infinite,
        else 0.
    """
    check_flat("statistics", statistics, numel=2, device=statistics.device, dtypes=[torch.float64])
    if inverse_scale is not None:
        check_scalar("inverse_scale", inverse_scale, statistics.device)
    form = scalars_triton if runs_triton(statistics.device) else scalars_reference
    return form(statistics, max_norm, inverse_scale)


def scalars_reference(statistics: torch.Tensor, max_norm: float, inverse_scale: torch.Tensor | None) -> torch.Tensor:
    scale = torch.ones_like(statistics[0], dtype=torch.float32) if inverse_scale is None else inverse_scale.reshape(())
    norm = (statistics[0].sqrt() * scale.double()).float()
    limit = torch.full_like(norm, max_norm)
    coefficient = torch.where(limit < norm + 1e-6, limit / (norm + 1e-6), torch.ones_like(norm))
    coefficient = torch.where(norm.isnan(), norm, coefficient)
    found_inf = (statistics[1] > 0).logical_or(norm.isfinite().logical_not()).float()
    return torch.stack([norm, coefficient, scale * coefficient, found_inf])


def scalars_triton(statistics: torch.Tensor, max_norm: float, inverse_scale: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty(4, dtype=torch.float32, device=statistics.device)
    _scalars[(1,)](statistics, inverse_scale, out, float(max_norm), num_warps=1)
    return out


@kernel
def _sum_parts(flat, squares, counts, numel, PART: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    start = part.to(tl.int64) * PART
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    strangers = tl.zeros((BLOCK,), dtype=tl.int32)
    for at in range(0, PART, BLOCK):
        offsets = start + at + tl.arange(0, BLOCK)
        x = tl.load(flat + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
        sums += x * x
        strangers += tl.where(tl.abs(x) < float("inf"), 0, 1)
    tl.store(squares + part, tl.sum(sums, axis=0))
    tl.store(counts + part, tl.sum(strangers, axis=0))


@kernel
def _sum_of_parts(squares, counts, out, parts, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    strangers = tl.zeros((BLOCK,), dtype=tl.int64)
    for step in range(STEPS):
        offsets = step * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < parts
        sums += tl.load(squares + offsets, mask=mask, other=0.0).to(tl.float64)
        strangers += tl.load(counts + offsets, mask=mask, other=0).to(tl.int64)
    tl.store(out, tl.sum(sums, axis=0))
    tl.store(out + 1, tl.sum(strangers, axis=0).to(tl.float64))


@kernel
def _scalars(statistics, inverse_scale, out, max_norm):
    norm = tl.sqrt(tl.load(statistics))
    scale = 1.0
    if inverse_scale is not None:
        scale = tl.load(inverse_scale)
        norm = norm * scale.to(tl.float64)
    norm = norm.to(tl.float32)
    limit = norm + 1e-6
    coefficient = tl.where(max_norm < limit, tl.div_rn(max_norm, limit), 1.0)
    coefficient = tl.where(norm == norm, coefficient, norm)
    is_bad = (tl.load(statistics + 1) > 0) | (tl.abs(norm) >= float("inf")) | (norm != norm)
    tl.store(out, norm)
    tl.store(out + 1, coefficient)
    tl.store(out + 2, scale * coefficient)
    tl.store(out + 3, tl.where(is_bad, 1.0, 0.0))


# ---- A test launch of the smallest kernel, before training depends on one ----
#
# Importing triton proves little. Triton compiles at the first launch, which needs a C compiler, Python's headers, a writable
# folder and a supported driver.


def launch_fault(device: torch.device) -> str | None:
    """Returns why Triton kernels do not run on `device`, in one line; None if they run."""
    try:
        step_scalars(torch.ones(2, dtype=torch.float64, device=device), max_norm=1.0).tolist()
    except Exception as error:
        # Errors have many classes: of triton's compiler, of the C compiler's process and of the driver.
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"
    return None


# ---- The norm of a step, computed by these kernels ----


class NormByKernels(GradientNorm):
    """Computes the 2-norm with one launch for each run of rows and two more. On an accelerator the host only queues them."""

    def _measure(self, rows: Sequence[Row], norm_type: float, max_norm: float) -> Measured:
        if norm_type != 2:
            return super()._measure(rows, norm_type, max_norm)
        if not have_gradients(map(TENSOR_OF, rows)):
            rows = [row for row in rows if row.tensor.grad is not None]
        flats = list(map(_GRADIENT, runs_of(rows)))
        mine = torch.zeros(2, dtype=torch.float64, device=self.device)
        # Gradients in host memory are measured on the host.
        memories = set(map(_DEVICE, flats))
        for memory in memories:
            of_memory = flats if len(memories) == 1 else [flat for flat in flats if flat.device == memory]
            mine += gradient_statistics(of_memory).to(self.device)
        scalars = step_scalars(self.among.agree_sum(mine, NORM_LABEL), max_norm)
        return Measured(
            norm=scalars[NORM],
            coefficient=None if math.isinf(max_norm) else scalars[COEFFICIENT],
            found_inf=scalars[FOUND_INF],
        )
