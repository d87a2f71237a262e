"""Layer norms with 16-bit weights on the CPU: their inputs are cast to the dtype of the weights.

Autocast has an accelerator normalise in float32, whatever the dtypes. On the CPU it leaves layer norms alone, and torch refuses
float32 inputs beside bfloat16 weights.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def cast_norm_inputs(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Hooks before the forwards of the layer and group norms among `modules`; other modules get none."""
    norms = (module for module in modules if isinstance(module, nn.LayerNorm | nn.GroupNorm))
    return [norm.register_forward_pre_hook(_cast_input) for norm in norms]


def _cast_input(norm: nn.Module, args: tuple) -> tuple | None:
    if not args or args[0].dtype != torch.float32 or norm.weight is None or norm.weight.dtype == torch.float32:
        return None
    return args[0].to(norm.weight.dtype), *args[1:]
