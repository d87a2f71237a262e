"""AdamW over a flat shard: unscaling, clipping, the update and the cast to the parameters' dtype in one pass.

As separate torch operations, these read and write 46 bytes for each parameter; in one pass, 28 (bfloat16 gradient and copy).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arithmetic.flat import runs_triton
from .base import kernel
from .flat_steps import Operands, launch, load_gradient, own_elements, store_weights

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The settings of one step. `step` counts from 1; a step stopped by `found_inf` must not be counted."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    step: int

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(
                f"hf_zero: AdamW's step is {self.step}; the first one is 1. Pass the count that includes this step."
            )

    @functools.cached_property
    def scalars(self) -> tuple[float, ...]:
        """Returns decay, 1 - beta1, beta2, 1 - beta2, step size, 1 / sqrt(bias correction 2), eps.

        They are computed in double precision: in float32, 1 - 0.999 has a relative error of 5e-5.
        """
        beta1, beta2 = self.betas
        step_size = self.lr / (1 - beta1**self.step)
        inverse_bias2_sqrt = 1 / math.sqrt(1 - beta2**self.step)
        decay = 1 - self.lr * self.weight_decay
        return decay, 1 - beta1, beta2, 1 - beta2, step_size, inverse_bias2_sqrt, self.eps


def adamw(operands: Operands, settings: AdamW) -> None:
    """Steps in place, by the formula of `torch.optim.AdamW` (torch/optim/adam.py, `_single_tensor_adam`).

    With g = gradient * multiplier, lr, beta1, beta2, eps, weight decay d and step t (Loshchilov and Hutter,
    arXiv 1711.05101, algorithm 2):

        w <- w * (1 - lr * d)
        m <- m + (1 - beta1) * (g - m)
        v <- beta2 * v + (1 - beta2) * g * g
        w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Arithmetic is float32, and each operation is rounded. torch's own versions fuse some operations, so last digits differ.

    Args:
        operands: the states are `exp_avg` and `exp_avg_sq`, float32.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or device.
    """
    operands.check()
    (adamw_triton if runs_triton(operands.weights.device) else adamw_reference)(operands, settings)


def adamw_reference(operands: Operands, settings: AdamW) -> None:
    """Computes `adamw` in torch, with the same bits as the kernel."""
    decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_bias2_sqrt, eps = settings.scalars
    g, exp_avg = operands.unscaled_gradient, operands.states["exp_avg"]
    m = exp_avg + (g - exp_avg) * one_minus_beta1
    v = operands.states["exp_avg_sq"] * beta2 + g * one_minus_beta2 * g
    # On the host, torch's float32 square root may be off by one unit in the last place; via double, rounding is correct.
    root = v.double().sqrt_().float()
    w = operands.weights.float() * decay - m * step_size / (root * inverse_bias2_sqrt + eps)
    operands.write(w, {"exp_avg": m, "exp_avg_sq": v})


def adamw_triton(operands: Operands, settings: AdamW) -> None:
    launch(_adamw, operands, ("exp_avg", "exp_avg_sq"), settings.scalars)


@kernel
def next_moments(m, v, g, one_minus_beta1, beta2, one_minus_beta2):
    """Returns both moments after a gradient, by the formula in `adamw`; all float32."""
    return m + (g - m) * one_minus_beta1, v * beta2 + g * one_minus_beta2 * g


@kernel
def next_weights(w, m, v, decay, step_size, inverse_bias2_sqrt, eps):
    """Returns the weights after a step with the new moments, by the formula in `adamw`; all float32."""
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
