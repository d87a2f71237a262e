"""Layer norms with 16-bit weights on the CPU: their inputs are cast to the dtype of the weights."""

from collections.abc import Iterable
from typing import Any, SupportsIndex, cast

import torch
from torch import nn

from .sharded_parameters import copy_refusal

# On an accelerator, autocast runs layer norms in float32, whatever the dtypes. On the CPU autocast does not change layer norms,
# and torch refuses float32 inputs with bfloat16 weights.


class CastInput:
    """Replaces a norm's `forward`, and casts its input. A hook on the module would cost the host five times as much.

    Args:
        norm: a layer or group norm.
    """

    def __init__(self, norm: nn.Module):
        self._norm = norm
        self._forward = norm.forward
        self._before = norm.__dict__.get("forward")
        norm.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and args[0].dtype == torch.float32 and (weight := cast(Any, self._norm).weight) is not None:
            return self._forward(args[0].to(weight.dtype), *args[1:], **kwargs)
        return self._forward(*args, **kwargs)

    def remove(self) -> None:
        """Restores the norm's own `forward`, unless a script has replaced it since."""
        held = self._norm.__dict__
        if held.get("forward") is self:
            del held["forward"]
            if self._before is not None:
                held["forward"] = self._before

    def __deepcopy__(self, memo: dict):
        raise copy_refusal("copied")

    def __reduce_ex__(self, protocol: SupportsIndex):
        raise copy_refusal("pickled")


def cast_norm_inputs(modules: Iterable[nn.Module]) -> list[CastInput]:
    """Casts the inputs of the layer and group norms among `modules` to the dtypes of their weights."""
    return [CastInput(module) for module in modules if isinstance(module, nn.LayerNorm | nn.GroupNorm)]
