"""Optimizer steps of whole flat shards: AdamW (also with 8-bit moments), Lion and SGD."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..arithmetic.flat import FLOAT_DTYPES, ceil_div, check_flat, runs_triton
from ..buckets.rows import SIGNED, SMALLEST_NORMAL, UNSIGNED, dequantise_dynamic, quantise_dynamic, tables_of
from ..layout.blocks import BLOCK_NUMEL, blocks
from .base import Kernel, check_scalar, is_interpreted, kernel, rounded

if TYPE_CHECKING:
    import triton.language as tl


# ---- The common part of the optimizers' kernels: tensors, launches, and the frame around the update ----

STEP_BLOCK_NUMEL = 512
NUM_WARPS = 4
"""Four elements a thread: 16-byte accesses to float32 in at most 40 registers. With eight, 16-bit and 32-bit tensors want
different layouts and the compiler converts between them through shared memory."""


@dataclass(kw_only=True, slots=True, eq=False)
class Place:
    """Flat tensors of equal length on one device, which a kernel steps together.

    Attributes:
        weights: the float32 master, or the parameters themselves in float32, bfloat16 or float16.
        gradient: float32, bfloat16 or float16. Only read.
        states: the optimizer's, by name: float32, or `Coded` for a kernel that steps moments in 8-bit blocks.
        copy: gets the new weights, to the nearest, in any of the three dtypes. None for no copy.
        multiplier: one float32 element, `step_scalars`' MULTIPLIER, by which the gradient is multiplied. None for 1.
        found_inf: one float32 element. Where it is not 0 nothing is written. None to step always.
        is_checked: weights, states and copy fit each other, as an earlier `check` has found.
    """

    weights: torch.Tensor
    gradient: torch.Tensor
    states: Mapping[str, Any]
    copy: torch.Tensor | None = None
    multiplier: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    is_checked: bool = False

    def check(self) -> None:
        """Raises `ValueError` unless the tensors are as said; of the states, only those in float32 are looked at."""
        numel, device = self.weights.numel(), self.weights.device
        check_flat("gradient", self.gradient, numel=numel, device=device, dtypes=FLOAT_DTYPES)
        if not self.is_checked:
            check_flat("weights", self.weights, numel=numel, device=device, dtypes=FLOAT_DTYPES)
            for name, state in self.states.items():
                if isinstance(state, torch.Tensor):
                    check_flat(name, state, numel=numel, device=device, dtypes=[torch.float32])
            if self.copy is not None:
                check_flat("copy", self.copy, numel=numel, device=device, dtypes=FLOAT_DTYPES)
        for name, scalar in (("multiplier", self.multiplier), ("found_inf", self.found_inf)):
            if scalar is not None:
                check_scalar(name, scalar, device)

    @property
    def unscaled_gradient(self) -> torch.Tensor:
        """Returns the gradient in float32, times `multiplier`; a new tensor if either changes anything."""
        return self.gradient.float() if self.multiplier is None else self.gradient.float() * self.multiplier

    def write(self, weights: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """Copies float32 results to their places, unless `found_inf` is not 0; never asks the host."""
        results = [(self.weights, weights), *((self.states[name], value) for name, value in states.items())]
        for place, result in [*results, *([] if self.copy is None else [(self.copy, weights)])]:
            stopped = self.found_inf
            place.copy_(result if stopped is None else torch.where(stopped == 0, result.to(place.dtype), place))


def launch(step: Kernel, place: Place, states: Sequence[str], scalars: Sequence[float], **constants: object) -> None:
    """Runs an optimizer's kernel over all elements of a place; nothing where there are none.

    Args:
        states: names, in the kernel's order; it gets None for one that is not there.
    """
    numel = place.weights.numel()
    if numel:
        grid = (ceil_div(numel, STEP_BLOCK_NUMEL),)
        constants |= {"BLOCK": STEP_BLOCK_NUMEL, "INTERPRETED": is_interpreted(), "num_warps": NUM_WARPS}
        tensors = [place.weights, place.gradient, *(place.states.get(name) for name in states)]
        step[grid](*tensors, place.copy, place.multiplier, place.found_inf, numel, *scalars, **constants)


@kernel
def own_elements(numel, found_inf, BLOCK: tl.constexpr):
    """This program's offsets, and which of them are stepped: none where `found_inf` is not 0."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    if found_inf is not None:
        mask = tl.where(tl.load(found_inf) == 0.0, mask, False)
    return offsets, mask


@kernel
def load_gradient(gradient, multiplier, offsets, mask):
    """The gradient in float32, unscaled and clipped."""
    g = tl.load(gradient + offsets, mask=mask).to(tl.float32)
    if multiplier is not None:
        g = g * tl.load(multiplier)
    return g


@kernel
def store_weights(weights, copy, w, offsets, mask, INTERPRETED: tl.constexpr):
    """The new weights to their place and, in its dtype, to the copy."""
    tl.store(weights + offsets, rounded(w, weights.dtype.element_ty, INTERPRETED), mask=mask)
    if copy is not None:
        tl.store(copy + offsets, rounded(w, copy.dtype.element_ty, INTERPRETED), mask=mask)


# ---- AdamW over a flat shard: unscaling, clipping, the update and the cast to the parameters' dtype in one pass ----
#
# Written as torch ops these read and write 46 bytes a parameter; in one pass it is 28 (bfloat16 gradient and copy).


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The settings of one step; `step` counts from 1, and a step that found_inf stops must not be counted."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    step: int

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(
                f"hf_zero: AdamW's step is {self.step}; the first one is 1. Pass the count with this step."
            )

    @functools.cached_property
    def scalars(self) -> tuple[float, ...]:
        """decay, 1 - beta1, beta2, 1 - beta2, step size, 1 / sqrt(bias correction 2), eps.

        In double: 1 - 0.999 taken in float32 is off by 5e-5 of itself.
        """
        beta1, beta2 = self.betas
        step_size = self.lr / (1 - beta1**self.step)
        inverse_bias2_sqrt = 1 / math.sqrt(1 - beta2**self.step)
        decay = 1 - self.lr * self.weight_decay
        return decay, 1 - beta1, beta2, 1 - beta2, step_size, inverse_bias2_sqrt, self.eps


def adamw(place: Place, settings: AdamW) -> None:
    """Steps in place, by the formula of `torch.optim.AdamW` (torch/optim/adam.py, `_single_tensor_adam`).

    With g = gradient * multiplier, lr, beta1, beta2, eps, weight decay d and step t (Loshchilov and Hutter,
    arXiv 1711.05101, algorithm 2):

        w <- w * (1 - lr * d)
        m <- m + (1 - beta1) * (g - m)
        v <- beta2 * v + (1 - beta2) * g * g
        w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Arithmetic is float32, each operation rounded by itself; torch's own forms fuse some of them, so last digits differ.

    Args:
        place: with the states `exp_avg` and `exp_avg_sq`, float32.

    Raises:
        ValueError: a tensor does not fit.
    """
    place.check()
    (adamw_triton if runs_triton(place.weights.device) else adamw_reference)(place, settings)


def adamw_reference(place: Place, settings: AdamW) -> None:
    """`adamw` in torch, bit for bit the kernel's arithmetic."""
    decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_bias2_sqrt, eps = settings.scalars
    g, exp_avg = place.unscaled_gradient, place.states["exp_avg"]
    m = exp_avg + (g - exp_avg) * one_minus_beta1
    v = place.states["exp_avg_sq"] * beta2 + g * one_minus_beta2 * g
    # On the host torch's float32 square root may be the next number beside the nearest one; in double it is not.
    root = v.double().sqrt_().float()
    w = place.weights.float() * decay - m * step_size / (root * inverse_bias2_sqrt + eps)
    place.write(w, {"exp_avg": m, "exp_avg_sq": v})


def adamw_triton(place: Place, settings: AdamW) -> None:
    launch(_adamw, place, ("exp_avg", "exp_avg_sq"), settings.scalars)


@kernel
def next_moments(m, v, g, one_minus_beta1, beta2, one_minus_beta2):
    """Both moments with a gradient taken in, as `adamw` has them; all float32."""
    return m + (g - m) * one_minus_beta1, v * beta2 + g * one_minus_beta2 * g


@kernel
def next_weights(w, m, v, decay, step_size, inverse_bias2_sqrt, eps):
    """Weights a step further along the new moments, as `adamw` has them; all float32."""
    return w * decay - tl.div_rn(m * step_size, tl.sqrt_rn(v) * inverse_bias2_sqrt + eps)


@kernel
def _adamw(
    weights,
    gradient,
    exp_avg,
    exp_avg_sq,
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
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    offsets, mask = own_elements(numel, found_inf, BLOCK)
    g = load_gradient(gradient, multiplier, offsets, mask)
    m, v = tl.load(exp_avg + offsets, mask=mask), tl.load(exp_avg_sq + offsets, mask=mask)
    m, v = next_moments(m, v, g, one_minus_beta1, beta2, one_minus_beta2)
    w = tl.load(weights + offsets, mask=mask).to(tl.float32)
    w = next_weights(w, m, v, decay, step_size, inverse_bias2_sqrt, eps)
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    store_weights(weights, copy, w, offsets, mask, INTERPRETED)


# ---- AdamW over a flat shard whose moments are in 8-bit blocks (dynamic.py), and float32 in registers alone ----
#
# In parts a step unpacks both moments into memory, steps there and packs them again, 48 bytes a parameter with a bfloat16
# gradient and copy. In one pass it is 16.

_WARPS_IN_BLOCKS = 1
"""A program and a warp to a block, eight elements a thread: the largest of them is found without shared memory or barriers."""

_CHUNK_NUMEL = 1 << 17
"""Elements whose moments the reference has in float32 at a time; a whole number of blocks."""


def adamw_in_blocks(place: Place, settings: AdamW) -> None:
    """Steps in place: `dequantise_dynamic`, `adamw` and `quantise_dynamic` in one, to the same bits.

    Args:
        place: with the states `exp_avg` and `exp_avg_sq`, each `Coded`: codes and scales of as many elements as there are
            weights, by SIGNED and by UNSIGNED. Behind the last element, its block counts as zeros.

    Raises:
        ValueError: a tensor does not fit.
    """
    place.check()
    for name in ("exp_avg", "exp_avg_sq"):
        place.states[name].check(f"{name}'s ", numel=place.weights.numel(), device=place.weights.device)
    (adamw_in_blocks_triton if runs_triton(place.weights.device) else adamw_in_blocks_reference)(place, settings)


def adamw_in_blocks_reference(place: Place, settings: AdamW) -> None:
    """`adamw_in_blocks` in torch, bit for bit the kernel's.

    Where `found_inf` stops it, moments go back to the codes that they came from: [Note: nothing drifts].
    """
    numel, copy = place.weights.numel(), place.copy
    moments = place.weights.new_empty((2, min(_CHUNK_NUMEL, numel)), dtype=torch.float32)
    for start in range(0, numel, _CHUNK_NUMEL):
        part = slice(start, min(start + _CHUNK_NUMEL, numel))
        there = slice(start // BLOCK_NUMEL, blocks(part.stop))
        states = dict(zip(("exp_avg", "exp_avg_sq"), moments[:, : part.stop - start].unbind()))
        packed = [
            (states[name], place.states[name].codes[part], place.states[name].scales[there], code)
            for name, code in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED))
        ]
        for moment, codes, scales, code in packed:
            dequantise_dynamic(codes, scales, moment, code)
        own = replace(
            place,
            weights=place.weights[part],
            gradient=place.gradient[part],
            states=states,
            copy=None if copy is None else copy[part],
        )
        adamw_reference(own, settings)
        for moment, codes, scales, code in packed:
            quantise_dynamic(moment, codes, scales, code)


def adamw_in_blocks_triton(place: Place, settings: AdamW) -> None:
    numel, m, v = place.weights.numel(), place.states["exp_avg"], place.states["exp_avg_sq"]
    if numel:
        _adamw_in_blocks[(blocks(numel),)](
            place.weights,
            place.gradient,
            m.codes,
            m.scales,
            v.codes,
            v.scales,
            *_tables_of_both(place.weights.device),
            place.copy,
            place.multiplier,
            place.found_inf,
            numel,
            *settings.scalars,
            SMALLEST=SMALLEST_NORMAL,
            BLOCK=BLOCK_NUMEL,
            INTERPRETED=is_interpreted(),
            num_warps=_WARPS_IN_BLOCKS,
        )


@functools.cache
def _tables_of_both(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, first codes and thresholds, those of the first moment before those of the second."""
    signed, unsigned = tables_of(SIGNED, device), tables_of(UNSIGNED, device)
    return (
        torch.cat([signed.values, unsigned.values]),
        torch.cat([signed.first, unsigned.first]),
        torch.cat([signed.thresholds, unsigned.thresholds]),
    )


@kernel
def _unpacked(codes, scale, values, offsets, mask):
    """Elements in float32; anything where there are none."""
    return tl.load(values + tl.load(codes + offsets, mask=mask, other=0).to(tl.int32)) * scale


@kernel
def _scale_of(x, SMALLEST: tl.constexpr, IS_SIGNED: tl.constexpr):
    """Returns a block's largest magnitude; 0 for a subnormal one, NaN for one that is not finite."""
    magnitude = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf")), axis=0)
    scale = magnitude
    if IS_SIGNED:
        scale = tl.where(tl.max(x, axis=0) == magnitude, magnitude, -magnitude)
    scale = tl.where(magnitude < SMALLEST, 0.0, scale)
    return tl.where(magnitude < float("inf"), scale, float("nan"))


@kernel
def _nearest(x, scale, first, thresholds):
    """Codes of one block's elements; see [Note: the nearest value]."""
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
    # A block has a first element, whatever it lacks behind.
    is_stepped = tl.max(mask.to(tl.int32), axis=0) > 0
    tl.store(exp_avg_scales + block, m_scale, mask=is_stepped)
    tl.store(exp_avg_sq_scales + block, v_scale, mask=is_stepped)


# ---- Lion over a flat shard: unscaling, clipping, the update and the cast to the parameters' dtype in one pass ----


@dataclass(frozen=True, kw_only=True)
class Lion:
    """The settings of one step."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    @functools.cached_property
    def scalars(self) -> tuple[float, ...]:
        """decay, beta1, 1 - beta1, beta2, 1 - beta2, lr; the differences taken in double."""
        beta1, beta2 = self.betas
        return 1 - self.lr * self.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, self.lr


def lion(place: Place, settings: Lion) -> None:
    """Steps in place, by algorithm 2 of Chen et al. 2023 (arXiv 2302.06675).

    With g = gradient * multiplier, lr, beta1, beta2 and weight decay d:

        w <- w * (1 - lr * d) - lr * sign(beta1 * m + (1 - beta1) * g)
        m <- beta2 * m + (1 - beta2) * g

    Arithmetic is float32, each operation rounded by itself. sign(0) and sign(NaN) are 0.

    Args:
        place: with the state `exp_avg`, float32.

    Raises:
        ValueError: a tensor does not fit.
    """
    place.check()
    (lion_triton if runs_triton(place.weights.device) else lion_reference)(place, settings)


def lion_reference(place: Place, settings: Lion) -> None:
    """`lion` in torch, bit for bit the kernel's arithmetic."""
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = settings.scalars
    g, exp_avg = place.unscaled_gradient, place.states["exp_avg"]
    w = place.weights.float() * decay - torch.sign(exp_avg * beta1 + g * one_minus_beta1) * lr
    m = exp_avg * beta2 + g * one_minus_beta2
    place.write(w, {"exp_avg": m})


def lion_triton(place: Place, settings: Lion) -> None:
    launch(_lion, place, ("exp_avg",), settings.scalars)


@kernel
def _lion(
    weights,
    gradient,
    exp_avg,
    copy,
    multiplier,
    found_inf,
    numel,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    lr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    offsets, mask = own_elements(numel, found_inf, BLOCK)
    g = load_gradient(gradient, multiplier, offsets, mask)
    m = tl.load(exp_avg + offsets, mask=mask)
    mixed = m * beta1 + g * one_minus_beta1
    w = tl.load(weights + offsets, mask=mask).to(tl.float32)
    w = w * decay - tl.where(mixed > 0, lr, tl.where(mixed < 0, -lr, 0.0))
    tl.store(exp_avg + offsets, m * beta2 + g * one_minus_beta2, mask=mask)
    store_weights(weights, copy, w, offsets, mask, INTERPRETED)


# ---- SGD with momentum over a flat shard: unscaling, clipping, the update and the cast in one pass ----


@dataclass(frozen=True, kw_only=True)
class SGD:
    """The settings of one step. `first_step` sets the momentum buffer to the gradient, without dampening."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first_step: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError(
                f"hf_zero: Nesterov momentum with momentum {self.momentum} and dampening {self.dampening}; as in torch it "
                "needs a momentum above 0 and no dampening. Change those or pass nesterov=False."
            )

    @functools.cached_property
    def scalars(self) -> tuple[float, ...]:
        """weight decay, share of the old buffer, share of the gradient, momentum, lr."""
        kept, added = (0.0, 1.0) if self.first_step else (self.momentum, 1 - self.dampening)
        return self.weight_decay, kept, added, self.momentum, self.lr


def sgd(place: Place, settings: SGD) -> None:
    """Steps in place, by the formula of `torch.optim.SGD` (torch/optim/sgd.py, `_single_tensor_sgd`).

    With lr, weight decay d and momentum mu, on all steps but the first:

        g <- gradient * multiplier + d * w
        b <- mu * b + (1 - dampening) * g
        w <- w - lr * (g + mu * b if nesterov else b)

    Arithmetic is float32, each operation rounded by itself; torch's own forms fuse some of them, so last digits differ.

    Args:
        place: with the state `momentum_buffer`, float32 and finite before its first step, exactly where momentum is not 0.

    Raises:
        ValueError: a tensor does not fit.
    """
    has_buffer = "momentum_buffer" in place.states
    if has_buffer != (settings.momentum != 0):
        raise ValueError(
            f"hf_zero: momentum is {settings.momentum} and there is {'a' if has_buffer else 'no'} momentum buffer; there must "
            "be one exactly where momentum is not 0. Pass a float32 buffer of zeros, or none."
        )
    place.check()
    (sgd_triton if runs_triton(place.weights.device) else sgd_reference)(place, settings)


def sgd_reference(place: Place, settings: SGD) -> None:
    """`sgd` in torch, bit for bit the kernel's arithmetic."""
    weight_decay, kept, added, momentum, lr = settings.scalars
    w = place.weights.float()
    g = place.unscaled_gradient + w * weight_decay
    if "momentum_buffer" not in place.states:
        place.write(w - g * lr, {})
        return
    b = place.states["momentum_buffer"] * kept + g * added
    place.write(w - (g + b * momentum if settings.nesterov else b) * lr, {"momentum_buffer": b})


def sgd_triton(place: Place, settings: SGD) -> None:
    launch(_sgd, place, ("momentum_buffer",), settings.scalars, NESTEROV=settings.nesterov)


@kernel
def _sgd(
    weights,
    gradient,
    momentum_buffer,
    copy,
    multiplier,
    found_inf,
    numel,
    weight_decay,
    kept,
    added,
    momentum,
    lr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    offsets, mask = own_elements(numel, found_inf, BLOCK)
    g = load_gradient(gradient, multiplier, offsets, mask)
    w = tl.load(weights + offsets, mask=mask).to(tl.float32)
    g = g + w * weight_decay
    update = g
    if momentum_buffer is not None:
        b = tl.load(momentum_buffer + offsets, mask=mask) * kept + g * added
        tl.store(momentum_buffer + offsets, b, mask=mask)
        update = g + b * momentum if NESTEROV else b
    w = w - update * lr
    store_weights(weights, copy, w, offsets, mask, INTERPRETED)
