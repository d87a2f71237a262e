"""Refusing to step with a NaN or infinite gradient."""

import math
from collections.abc import Sequence

import torch

from ..comm.transport import Transport
from ..device import HostValue
from .buckets import Row


class NonFiniteGradientError(FloatingPointError):
    """A gradient has a NaN or infinite element; the parameters have not been touched."""


class NonFiniteCheck:
    """Looks at each step's gradient norm.

    On the host the norm is at hand and the step is refused. On an accelerator reading it would stop the device's queue, so a
    step's norm is read at the next step; the run still ends one step later with the same message.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._last: HostValue | None = None

    def look(self, norm: torch.Tensor, rows: Sequence[Row]) -> None:
        """Collective where it raises, which it does on all ranks alike: `norm` is the norm over all of them."""
        value = HostValue(norm.detach())
        last, self._last = (value, None) if norm.device.type == "cpu" else (self._last, value)
        if last is None or math.isfinite(last.value()):
            return
        names = [r.slot.name for r in rows if r.tensor.grad is not None and not torch.isfinite(r.tensor.grad).all()]
        everyone = sorted({name for theirs in self._transport.exchange(names[:5]) for name in theirs})
        where = f"First parameters: {', '.join(everyone[:5])}. " if everyone else ""
        raise NonFiniteGradientError(
            f"hf_zero: the gradient norm is {last.value()}: a gradient is NaN or infinite, so this step is refused and the "
            f"parameters stay as they were. {where}Usual reasons: a learning rate too high, a NaN in the data, log or "
            "division of zero in the loss. To step all the same, set `check_nonfinite: false` in the hf_zero config."
        )
