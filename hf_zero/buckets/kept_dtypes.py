"""Parameters excluded from casts, and the dtype of stage 3's gathers, as in FSDP's MixedPrecision."""

import re
from collections.abc import Iterable

import torch
from torch import nn

from ..config import AUTO, ZeroConfig
from .packed import of_packed_modules
from .precision import kept_dtype
from .unread_weights import wanted_dtype

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def float32_names(models: Iterable[object], dtype: torch.dtype) -> re.Pattern[str] | None:
    """Returns a pattern for the names of parameters kept in float32 in a cast to `dtype`.

    Args:
        models: models or model classes.
        dtype: the target dtype of the cast.

    Returns:
        None if all parameters are cast.
    """
    names: set[str] = set()
    # `from_pretrained` loads these in float32 even if a 16-bit dtype is requested.
    for model in models if dtype in _SIXTEEN_BITS else ():
        names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        # Like `from_pretrained`: these overflow in float16, whose largest number is 65,504. bfloat16 has float32's range.
        if dtype == torch.float16:
            names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    # transformers treats the names as regular expressions with a star for any characters.
    return re.compile("|".join(sorted(names)).replace("*", ".*")) if names else None


def uncast_parameters(model: nn.Module, dtype: torch.dtype) -> frozenset[nn.Parameter]:
    """Returns the parameters unchanged by a cast to `dtype`: matches of `float32_names`, and batch norms.

    A batch norm's statistics are float32 buffers, and torch refuses 16-bit weights with float32 statistics.
    """
    if dtype not in _SIXTEEN_BITS:
        return frozenset()
    # Ask all modules, because wrappers such as PEFT's do not repeat the inner model's list.
    pattern = float32_names(model.modules(), dtype)
    # With duplicates, because the pattern may match a tied parameter by its second name only.
    named = model.named_parameters(remove_duplicate=False)
    kept = [parameter for name, parameter in named if pattern is not None and pattern.search(name)]
    norms = (module for module in model.modules() if hasattr(module, "track_running_stats"))
    return frozenset([*kept, *(parameter for norm in norms for parameter in norm.parameters(recurse=False))])


class GatheredDtypes:
    """Chooses the dtype to which forward and backward cast a sharded parameter: `gather_dtype`, for float32 parameters.

    `uncast_parameters` are never cast, not even by `param_dtype`.
    """

    def __init__(self, model: nn.Module, config: ZeroConfig):
        self._config = config
        self._dtype = torch.bfloat16 if config.gather_dtype == "bfloat16" else None
        self._packed = of_packed_modules(model)
        self._spared = self._packed | uncast_parameters(model, self._dtype) if self._dtype else frozenset()
        auto = config.param_dtype == AUTO
        self._kept = frozenset() if auto else uncast_parameters(model, getattr(torch, config.param_dtype))

    def stays(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter keeps the model's dtype, regardless of `param_dtype`."""
        return parameter in self._kept

    def is_packed(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is frozen and is a packed weight, or belongs to a packed weight's module."""
        return not parameter.requires_grad and parameter in self._packed

    def of(self, parameter: nn.Parameter, *, sharded: bool) -> torch.dtype | None:
        """Returns the dtype of the cast; None without one. `sharded`: whether a rank keeps only its shard of the parameter."""
        wanted = wanted_dtype(parameter)
        is_cast = parameter.requires_grad and parameter not in self._kept
        kept = kept_dtype(self._config, wanted) if is_cast else wanted
        return self._dtype if sharded and kept == torch.float32 and parameter not in self._spared else None
