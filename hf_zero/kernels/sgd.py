"""SGD with momentum over a flat shard: unscaling, clipping, the update and the cast in one pass."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arithmetic.flat import runs_triton
from .base import kernel
from .flat_steps import Operands, launch, load_gradient, own_elements, store_weights

if TYPE_CHECKING:
    import triton.language as tl


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
        """Returns weight decay, factor of the old buffer, factor of the gradient, momentum, lr."""
        kept, added = (0.0, 1.0) if self.first_step else (self.momentum, 1 - self.dampening)
        return self.weight_decay, kept, added, self.momentum, self.lr


def sgd(operands: Operands, settings: SGD) -> None:
    """Steps in place, by the formula of `torch.optim.SGD` (torch/optim/sgd.py, `_single_tensor_sgd`).

    With lr, weight decay d and momentum mu, on all steps but the first:

        g <- gradient * multiplier + d * w
        b <- mu * b + (1 - dampening) * g
        w <- w - lr * (g + mu * b if nesterov else b)

    Arithmetic is float32, and each operation is rounded. torch's own versions fuse some operations, so last digits differ.

    Args:
        operands: the state is `momentum_buffer`, float32 and finite before its first step; present if and only if momentum is
            not 0.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or device.
    """
    has_buffer = "momentum_buffer" in operands.states
    if has_buffer != (settings.momentum != 0):
        raise ValueError(
            f"hf_zero: momentum is {settings.momentum} and there is {'a' if has_buffer else 'no'} momentum buffer; a buffer "
            "must exist if and only if momentum is not 0. Pass a float32 buffer of zeros, or none."
        )
    operands.check()
    (sgd_triton if runs_triton(operands.weights.device) else sgd_reference)(operands, settings)


def sgd_reference(operands: Operands, settings: SGD) -> None:
    """Computes `sgd` in torch, with the same bits as the kernel."""
    weight_decay, kept, added, momentum, lr = settings.scalars
    w = operands.weights.float()
    g = operands.unscaled_gradient + w * weight_decay
    if "momentum_buffer" not in operands.states:
        operands.write(w - g * lr, {})
        return
    b = operands.states["momentum_buffer"] * kept + g * added
    operands.write(w - (g + b * momentum if settings.nesterov else b) * lr, {"momentum_buffer": b})


def sgd_triton(operands: Operands, settings: SGD) -> None:
    launch(_sgd, operands, ("momentum_buffer",), settings.scalars, NESTEROV=settings.nesterov)


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
