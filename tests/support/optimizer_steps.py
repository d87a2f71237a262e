"""The flat optimizers in tests: settings, references, Triton forms, and the same step in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.kernels.adamw import AdamW, adamw_reference, adamw_triton
from hf_zero.kernels.flat_steps import Operands
from hf_zero.kernels.lion import Lion, lion_reference, lion_triton
from hf_zero.kernels.sgd import SGD, sgd_reference, sgd_triton

MOMENTS = ("exp_avg", "exp_avg_sq")


def place_of(
    names: Sequence[str], weights: torch.Tensor, gradient: torch.Tensor, *states: Any, **rest: Any
) -> Operands:
    """Makes a kernel's arguments from tensors in their usual order."""
    return Operands(weights=weights, gradient=gradient, states=dict(zip(names, states, strict=True)), **rest)


def exact_adamw(w: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], s: AdamW) -> list[torch.Tensor]:
    m = s.betas[0] * states[0] + (1 - s.betas[0]) * g
    v = s.betas[1] * states[1] + (1 - s.betas[1]) * g * g
    denominator = (v / (1 - s.betas[1] ** s.step)).sqrt() + s.eps
    return [w * (1 - s.lr * s.weight_decay) - s.lr * m / (1 - s.betas[0] ** s.step) / denominator, m, v]


def exact_lion(w: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], s: Lion) -> list[torch.Tensor]:
    sign = (s.betas[0] * states[0] + (1 - s.betas[0]) * g).sign()
    return [w * (1 - s.lr * s.weight_decay) - s.lr * sign, s.betas[1] * states[0] + (1 - s.betas[1]) * g]


def exact_sgd(w: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], s: SGD) -> list[torch.Tensor]:
    g = g + s.weight_decay * w
    if not states:
        return [w - s.lr * g]
    b = g if s.first_step else s.momentum * states[0] + (1 - s.dampening) * g
    return [w - s.lr * (g + s.momentum * b if s.nesterov else b), b]


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """One optimizer with one setting.

    Attributes:
        state_names: names of its float32 states.
        exact: computes new weights and states from float64 weights, gradient and states.
    """

    settings: Any
    state_names: tuple[str, ...]
    reference: Callable[..., None]
    triton: Callable[..., None]
    exact: Callable[..., list[torch.Tensor]]

    def step(self, form: Callable[..., None], tensors: list[torch.Tensor], *rest: torch.Tensor | None) -> None:
        """`tensors`: weights, gradient, states; `rest`: copy, multiplier, found_inf."""
        form(
            place_of(self.state_names, *tensors, **dict(zip(("copy", "multiplier", "found_inf"), rest))), self.settings
        )


def _adamw(**settings: Any) -> Stepper:
    return Stepper(
        settings=AdamW(**settings),
        state_names=MOMENTS,
        reference=adamw_reference,
        triton=adamw_triton,
        exact=exact_adamw,
    )


def _lion(**settings: Any) -> Stepper:
    return Stepper(
        settings=Lion(**settings),
        state_names=MOMENTS[:1],
        reference=lion_reference,
        triton=lion_triton,
        exact=exact_lion,
    )


def _sgd(**settings: Any) -> Stepper:
    states = ("momentum_buffer",) if settings.get("momentum", 0) != 0 else ()
    return Stepper(
        settings=SGD(**settings), state_names=states, reference=sgd_reference, triton=sgd_triton, exact=exact_sgd
    )


STEPPERS = {
    "adamw, first step": _adamw(lr=1e-3, step=1),
    "adamw, later": _adamw(lr=3e-4, betas=(0.85, 0.95), eps=1e-6, weight_decay=0.1, step=1000),
    "lion": _lion(lr=1e-4, weight_decay=0.1),
    "sgd, plain": _sgd(lr=0.1, weight_decay=1e-2),
    "sgd, momentum, first step": _sgd(lr=0.1, momentum=0.9, dampening=0.5, first_step=True),
    "sgd, momentum": _sgd(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=1e-2),
    "sgd, nesterov": _sgd(lr=0.1, momentum=0.9, nesterov=True),
}


def make_tensors(stepper: Stepper, numel: int, weights: torch.dtype, gradient: torch.dtype) -> list[torch.Tensor]:
    """Makes weights, gradient and states like in the middle of training."""
    generator = torch.Generator("cpu").manual_seed(numel)
    drawn = torch.randn(4, numel, generator=generator, device="cpu")
    w, g, m, v = drawn.to(torch.get_default_device()).unbind()
    return [w.to(weights), (g * 0.01).to(gradient), m * 0.01, v.square() * 1e-4][: 2 + len(stepper.state_names)]


def worst_error(stepper: Stepper, before: list[torch.Tensor], after: list[torch.Tensor], factor: float) -> float:
    """Returns the largest error of the step from `before` to `after`, relative to float64, in float32 epsilons of the largest
    element.

    Args:
        factor: multiplier of the gradient.
    """
    w, g, *states = [tensor.double() for tensor in before]
    exact = stepper.exact(w, g * factor, states, stepper.settings)
    errors = [
        ((new.double() - ideal).abs().max() / ideal.abs().max() / torch.finfo(torch.float32).eps).item()
        for new, ideal in zip([after[0], *after[2:]], exact)
        if ideal.numel()
    ]
    return max(errors, default=0.0)
