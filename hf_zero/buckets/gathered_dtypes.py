"""Which parameters are not cast to 16 bits, and which stage 3 gathers in another dtype, as FSDP's MixedPrecision does."""

import re
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..config import AUTO, ZeroConfig
from .mapped_parameters import wanted_dtype
from .precision import kept_dtype

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def float32_names(models: Iterable[object], dtype: torch.dtype) -> re.Pattern[str] | None:
    """A pattern to search for in the names of parameters: those with it stay float32 where the rest is cast to `dtype`.

    Args:
        models: or their classes.

    Returns:
        None where all parameters are cast.
    """
    names: set[str] = set()
    # What `from_pretrained` loads in float32 when it is asked for another dtype.
    for model in models if dtype in _SIXTEEN_BITS else ():
        names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        if dtype == torch.float16:
            names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    # Regular expressions, in which a star stands for any characters: so transformers reads them.
    return re.compile("|".join(sorted(names)).replace("*", ".*")) if names else None


def uncast_parameters(model: nn.Module, dtype: torch.dtype) -> frozenset[nn.Parameter]:
    """Parameters that stay as they are where the others are cast to `dtype`: what `float32_names` finds, and batch norms.

    A batch norm's statistics are float32 buffers, beside which torch refuses 16-bit weights.
    """
    if dtype not in _SIXTEEN_BITS:
        return frozenset()
    # Wrappers such as PEFT's do not repeat what the model inside them says.
    pattern = float32_names(model.modules(), dtype)
    named = model.named_parameters(remove_duplicate=False)
    kept = [parameter for name, parameter in named if pattern is not None and pattern.search(name)]
    norms = (module for module in model.modules() if isinstance(module, _NormBase))
    return frozenset([*kept, *(parameter for norm in norms for parameter in norm.parameters(recurse=False))])


class GatheredDtypes:
    """The dtype that a sharded parameter is cast to for forward and backward: `gather_dtype`, for float32 parameters.

    `uncast_parameters` are left as they are, by `param_dtype` too.
    """

    def __init__(self, model: nn.Module, config: ZeroConfig):
        self._config = config
        self._dtype = torch.bfloat16 if config.gather_dtype == "bfloat16" else None
        self._spared = uncast_parameters(model, self._dtype) if self._dtype else frozenset()
        auto = config.param_dtype == AUTO
        self._kept = frozenset() if auto else uncast_parameters(model, getattr(torch, config.param_dtype))

    def stays(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is kept in the model's dtype, whatever `param_dtype` says."""
        return parameter in self._kept

    def of(self, parameter: nn.Parameter, *, sharded: bool) -> torch.dtype | None:
        """None where it is not cast.

        Args:
            sharded: a rank keeps its shard of the parameter only.
        """
        wanted = wanted_dtype(parameter)
        is_cast = parameter.requires_grad and parameter not in self._kept
        kept = kept_dtype(self._config, wanted) if is_cast else wanted
        return self._dtype if sharded and kept == torch.float32 and parameter not in self._spared else None
