"""Lion over a flat shard: unscaling, clipping, the update and the cast to the parameters' dtype in one pass."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..arithmetic.flat import runs_triton
from .base import kernel
from .flat_steps import Operands, launch, load_gradient, own_elements, store_weights

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True, kw_only=True)
class Lion:
    """The settings of one step."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    @functools.cached_property
    def scalars(self) -> tuple[float, ...]:
        """Returns decay, beta1, 1 - beta1, beta2, 1 - beta2, lr. Differences are computed in double precision."""
        beta1, beta2 = self.betas
        return 1 - self.lr * self.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, self.lr


def lion(operands: Operands, settings: Lion) -> None:
    """Steps in place, by algorithm 2 of Chen et al. 2023 (arXiv 2302.06675).

    With g = gradient * multiplier, lr, beta1, beta2 and weight decay d:

        w <- w * (1 - lr * d) - lr * sign(beta1 * m + (1 - beta1) * g)
        m <- beta2 * m + (1 - beta2) * g

    Arithmetic is float32, and each operation is rounded. sign(0) and sign(NaN) are 0.

    Args:
        operands: the state is `exp_avg`, float32.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or device.
    """
    operands.check()
    (lion_triton if runs_triton(operands.weights.device) else lion_reference)(operands, settings)


def lion_reference(operands: Operands, settings: Lion) -> None:
    """Computes `lion` in torch, with the same bits as the kernel."""
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = settings.scalars
    g, exp_avg = operands.unscaled_gradient, operands.states["exp_avg"]
    w = operands.weights.float() * decay - torch.sign(exp_avg * beta1 + g * one_minus_beta1) * lr
    m = exp_avg * beta2 + g * one_minus_beta2
    operands.write(w, {"exp_avg": m})


def lion_triton(operands: Operands, settings: Lion) -> None:
    launch(_lion, operands, ("exp_avg",), settings.scalars)


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
