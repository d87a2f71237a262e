"""Lion over a flat shard: unscaling, clipping, the update and the cast to the parameters' dtype in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .choose import runs_triton
from .lazy import kernel
from .stepping import (
    check_step_tensors,
    launch,
    load_gradient,
    own_elements,
    store_weights,
    unscaled,
    write,
)

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True, kw_only=True)
class Lion:
    """One step's settings."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def scalars(self) -> tuple[float, ...]:
        """decay, beta1, 1 - beta1, beta2, 1 - beta2, lr; the differences taken in double."""
        beta1, beta2 = self.betas
        return 1 - self.lr * self.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, self.lr


def lion(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    settings: Lion,
    copy: torch.Tensor | None = None,
    multiplier: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Steps in place, by algorithm 2 of Chen et al. 2023 (arXiv 2302.06675).

    With g = gradient * multiplier, lr, beta1, beta2 and weight decay d:

        w <- w * (1 - lr * d) - lr * sign(beta1 * m + (1 - beta1) * g)
        m <- beta2 * m + (1 - beta2) * g

    Arithmetic is float32, each operation rounded by itself. sign(0) and sign(NaN) are 0.

    Args:
        weights: flat, the float32 master, or the parameters themselves in float32, bfloat16 or float16.
        gradient: same numel; float32, bfloat16 or float16. Only read.
        exp_avg: same numel, float32.
        copy: same numel, any of the three dtypes; gets the new weights, to the nearest. None for no copy.
        multiplier: one float32 element on the device, `step_scalars`' MULTIPLIER. None for 1.
        found_inf: one float32 element on the device. Where it is not 0 nothing is written. None to step always.

    Raises:
        ValueError: a tensor does not fit.
    """
    scalars = {"multiplier": multiplier, "found_inf": found_inf}
    check_step_tensors(weights, gradient, {"exp_avg": exp_avg}, copy, scalars)
    form = lion_triton if runs_triton(weights.device) else lion_reference
    form(weights, gradient, exp_avg, settings, copy, multiplier, found_inf)


def lion_reference(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    settings: Lion,
    copy: torch.Tensor | None,
    multiplier: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """`lion` in torch, bit for bit the kernel's arithmetic."""
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr = settings.scalars()
    g = unscaled(gradient, multiplier)
    w = weights.float() * decay - torch.sign(exp_avg * beta1 + g * one_minus_beta1) * lr
    m = exp_avg * beta2 + g * one_minus_beta2
    write([(weights, w), (exp_avg, m), (copy, w)], found_inf)


def lion_triton(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    settings: Lion,
    copy: torch.Tensor | None,
    multiplier: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """`lion` in one launch."""
    launch(_lion, [weights, gradient, exp_avg, copy, multiplier, found_inf], settings.scalars())


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
