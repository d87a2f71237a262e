"""Norms and clipping of sharded gradients."""

import math
from collections.abc import Sequence

import torch

from ..comm.transport import Label, Transport
from ..kernels.statistics import sum_of_squares
from .buckets import Row

_NORM = Label(kind="agree on the gradient norm", subject="the step")


def total_norm(
    rows: Sequence[Row], *, norm_type: float, transport: Transport, replicated: bool, device: torch.device
) -> torch.Tensor:
    """The norm of the whole gradient from every rank's rows, as torch.nn.utils.get_total_norm gives it under DDP.

    Args:
        rows: of which this rank takes the gradients; ones without a gradient count nothing.
        norm_type: p of the p-norm; inf for the largest magnitude.
        replicated: every rank holds the whole gradient, so nothing is summed over ranks.

    Returns:
        float32 scalar on `device`; the sum over ranks travels as float64.
    """
    gradients = [row.tensor.grad for row in rows if row.tensor.grad is not None]
    if math.isinf(norm_type):
        largest = [g.abs().max().double() for g in gradients if g.numel()]
        mine = _side_by_side(largest, device).max() if largest else torch.zeros((), dtype=torch.float64, device=device)
        everyone = mine if replicated else max(transport.exchange(mine.item()))
        return torch.as_tensor(everyone, device=device).float()
    powers = [_sum_of_powers(gradient, norm_type) for gradient in gradients]
    mine = _side_by_side(powers, device).sum()
    everyone = mine if replicated else transport.agree_sum(mine.reshape(1), _NORM)[0]
    return everyone.pow(1.0 / norm_type).float()


def _side_by_side(values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Float64 scalars as one tensor on `device`, in their order. Gradients in host memory are measured there."""
    together = torch.zeros(len(values), dtype=torch.float64, device=device)
    for memory in {value.device for value in values}:
        places = [place for place, value in enumerate(values) if value.device == memory]
        together[places] = torch.stack([values[place] for place in places]).to(device)
    return together


def _sum_of_powers(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    if norm_type == 2:
        return sum_of_squares(gradient.reshape(-1))
    return torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float32).double().pow(norm_type)


def scale_to_norm(rows: Sequence[Row], norm: torch.Tensor, max_norm: float) -> None:
    """Multiplies the rows' gradients by min(1, max_norm / (norm + 1e-6)), torch's clip coefficient.

    For gradients in host memory a coefficient of 1 is seen, and they are left as they are; for those on an accelerator it
    stays there and is multiplied in.
    """
    everywhere = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = [row.tensor.grad for row in rows if row.tensor.grad is not None]
    for device in {gradient.device for gradient in gradients}:
        there = [gradient for gradient in gradients if gradient.device == device]
        coefficient = everywhere.to(there[0])
        if device.type != "cpu" or coefficient != 1:
            torch._foreach_mul_(there, coefficient)


def clamp_values(rows: Sequence[Row], clip_value: float) -> None:
    """Clamps every element of the rows' gradients to [-clip_value, clip_value]."""
    gradients = [row.tensor.grad for row in rows if row.tensor.grad is not None]
    if gradients:
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)
