"""Clipping of sharded gradients."""

from collections.abc import Sequence

import torch

from ..buckets.bucket import Row
from ..buckets.sharded import widen


def scale_gradients(rows: Sequence[Row], coefficient: torch.Tensor | None) -> None:
    """Multiplies the rows' gradients by `coefficient`, a scalar; None leaves them.

    For gradients in host memory a coefficient of 1 is seen, and they are left as they are; for those on an accelerator it
    stays there and is multiplied in.
    """
    if coefficient is None:
        return
    for row in rows:
        widen(row.tensor)
    gradients = [row.tensor.grad for row in rows if row.tensor.grad is not None]
    devices = {gradient.device for gradient in gradients}
    for device in devices:
        there = gradients if len(devices) == 1 else [gradient for gradient in gradients if gradient.device == device]
        mine = coefficient.to(there[0])
        if device.type != "cpu" or mine != 1:
            torch._foreach_mul_(there, mine)


def clamp_values(rows: Sequence[Row], clip_value: float) -> None:
    """Clamps every element of the rows' gradients to [-clip_value, clip_value]."""
    for row in rows:
        widen(row.tensor)
    gradients = [row.tensor.grad for row in rows if row.tensor.grad is not None]
    if gradients:
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)
