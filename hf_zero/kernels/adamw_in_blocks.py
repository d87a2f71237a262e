"""AdamW over a flat shard with moments in 8-bit blocks; float32 moments exist in registers only.

As separate operations, a step unpacks both moments into memory, computes there and packs them again, which moves 48 bytes for
each parameter with a bfloat16 gradient and copy. One pass moves 16.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..arithmetic.flat import runs_triton
from ..buckets.rows import SIGNED, SMALLEST_NORMAL, UNSIGNED, dequantize_dynamic, quantize_dynamic, tables_of
from ..layout.blocks import BLOCK_NUMEL, blocks
from .adamw import AdamW, adamw_reference, next_moments, next_weights
from .base import is_interpreted, kernel
from .flat_steps import Operands, load_gradient, own_elements, store_weights

if TYPE_CHECKING:
    import triton.language as tl

_WARPS_IN_BLOCKS = 1
"""One program with one warp for each block, eight elements for each thread: the maximum needs no shared memory or barriers."""

_CHUNK_NUMEL = 1 << 17
"""Number of elements whose moments the reference holds in float32 at a time; a whole number of blocks."""


def adamw_in_blocks(operands: Operands, settings: AdamW) -> None:
    """Steps in place; computes the same bits as `dequantize_dynamic`, `adamw` and `quantize_dynamic`.

    Args:
        operands: the states are `exp_avg` and `exp_avg_sq`, each a `Coded` with codes and scales of as many elements as there are
            weights, by SIGNED and UNSIGNED. After the last element, a block is padded with zeros.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or device.
    """
    operands.check()
    for name in ("exp_avg", "exp_avg_sq"):
        operands.states[name].check(f"{name}'s ", numel=operands.weights.numel(), device=operands.weights.device)
    (adamw_in_blocks_triton if runs_triton(operands.weights.device) else adamw_in_blocks_reference)(operands, settings)


def adamw_in_blocks_reference(operands: Operands, settings: AdamW) -> None:
    """Computes `adamw_in_blocks` in torch, with the same bits as the kernel.

    If `found_inf` stops the step, moments get the codes that they had before: [Note: nothing drifts].
    """
    numel, copy = operands.weights.numel(), operands.copy
    moments = operands.weights.new_empty((2, min(_CHUNK_NUMEL, numel)), dtype=torch.float32)
    for start in range(0, numel, _CHUNK_NUMEL):
        part = slice(start, min(start + _CHUNK_NUMEL, numel))
        there = slice(start // BLOCK_NUMEL, blocks(part.stop))
        states = dict(zip(("exp_avg", "exp_avg_sq"), moments[:, : part.stop - start].unbind()))
        packed = [
            (states[name], operands.states[name].codes[part], operands.states[name].scales[there], code)
            for name, code in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED))
        ]
        for moment, codes, scales, code in packed:
            dequantize_dynamic(codes, scales, moment, code)
        own = replace(
            operands,
            weights=operands.weights[part],
            gradient=operands.gradient[part],
            states=states,
            copy=None if copy is None else copy[part],
        )
        adamw_reference(own, settings)
        for moment, codes, scales, code in packed:
            quantize_dynamic(moment, codes, scales, code)


def adamw_in_blocks_triton(operands: Operands, settings: AdamW) -> None:
    numel, m, v = operands.weights.numel(), operands.states["exp_avg"], operands.states["exp_avg_sq"]
    if numel:
        _adamw_in_blocks[(blocks(numel),)](
            operands.weights,
            operands.gradient,
            m.codes,
            m.scales,
            v.codes,
            v.scales,
            *_tables_of_both(operands.weights.device),
            operands.copy,
            operands.multiplier,
            operands.found_inf,
            numel,
            *settings.scalars,
            SMALLEST=SMALLEST_NORMAL,
            BLOCK=BLOCK_NUMEL,
            INTERPRETED=is_interpreted(),
            num_warps=_WARPS_IN_BLOCKS,
        )


@functools.cache
def _tables_of_both(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns values, first codes and thresholds, each for the first and then for the second moment."""
    signed, unsigned = tables_of(SIGNED, device), tables_of(UNSIGNED, device)
    return (
        torch.cat([signed.values, unsigned.values]),
        torch.cat([signed.first, unsigned.first]),
        torch.cat([signed.thresholds, unsigned.thresholds]),
    )


@kernel
def _unpacked(codes, scale, values, offsets, mask):
    """Returns elements in float32; undefined outside of `mask`."""
    return tl.load(values + tl.load(codes + offsets, mask=mask, other=0).to(tl.int32)) * scale


@kernel
def _scale_of(x, SMALLEST: tl.constexpr, IS_SIGNED: tl.constexpr):
    """Returns a block's largest magnitude: 0 for a subnormal magnitude, NaN for one that is not finite."""
    magnitude = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf")), axis=0)
    scale = magnitude
    if IS_SIGNED:
        scale = tl.where(tl.max(x, axis=0) == magnitude, magnitude, -magnitude)
    scale = tl.where(magnitude < SMALLEST, 0.0, scale)
    return tl.where(magnitude < float("inf"), scale, float("nan"))


@kernel
def _nearest(x, scale, first, thresholds):
    """Returns the codes of one block's elements; see [Note: the nearest value]."""
    y = tl.div_rn(x, tl.broadcast_to(tl.where(scale == 0, float("inf"), scale), x.shape))
    code = tl.load(first + ((y.to(tl.int32, bitcast=True) >> 16) + 32768)).to(tl.int32)
    return (code + tl.where(y > tl.load(thresholds + code), 1, 0)).to(tl.uint8)


@kernel
def _adamw_in_blocks(
    weights,
    gradient,
    exp_avg,
    exp_avg_scales,
    exp_avg_sq,
    exp_avg_sq_scales,
    values,
    first,
    thresholds,
    copy,
    multiplier,
    found_inf,
    numel,
    decay,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    inverse_bias2_sqrt,
    eps,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    offsets, mask = own_elements(numel, found_inf, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    g = load_gradient(gradient, multiplier, offsets, mask)
    m = _unpacked(exp_avg, tl.load(exp_avg_scales + block), values, offsets, mask)
    v = _unpacked(exp_avg_sq, tl.load(exp_avg_sq_scales + block), values + 256, offsets, mask)
    m, v = next_moments(m, v, g, one_minus_beta1, beta2, one_minus_beta2)
    m, v = tl.where(mask, m, 0.0), tl.where(mask, v, 0.0)
    w = tl.load(weights + offsets, mask=mask).to(tl.float32)
    w = next_weights(w, m, v, decay, step_size, inverse_bias2_sqrt, eps)
    store_weights(weights, copy, w, offsets, mask, INTERPRETED)
    m_scale, v_scale = _scale_of(m, SMALLEST, True), _scale_of(v, SMALLEST, False)
    tl.store(exp_avg + offsets, _nearest(m, m_scale, first, thresholds), mask=mask)
    tl.store(exp_avg_sq + offsets, _nearest(v, v_scale, first + 65536, thresholds + 256), mask=mask)
    # A block may be padded at its end, but always has a first element.
    is_stepped = tl.max(mask.to(tl.int32), axis=0) > 0
    tl.store(exp_avg_scales + block, m_scale, mask=is_stepped)
    tl.store(exp_avg_sq_scales + block, v_scale, mask=is_stepped)
