"""Which parameters stage 3 gathers in another dtype than it keeps them in, as FSDP's MixedPrecision does."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..config import ZeroConfig
from .mapped_parameters import wanted_dtype
from .precision import kept_dtype


class GatheredDtypes:
    """The dtype that a sharded parameter is cast to for forward and backward: `gather_dtype`, for float32 parameters.

    Left as they are: batch norms, whose statistics are float32 buffers, and what transformers keeps in float32 in bfloat16
    models (`_keep_in_fp32_modules_strict`).
    """

    def __init__(self, model: nn.Module, config: ZeroConfig):
        self._config = config
        self._dtype = torch.bfloat16 if config.gather_dtype == "bfloat16" else None
        self._spared = set(_spared(model)) if self._dtype else set()

    def of(self, parameter: nn.Parameter, *, sharded: bool) -> torch.dtype | None:
        """None where it is not cast.

        Args:
            sharded: a rank keeps its shard of the parameter only.
        """
        wanted = wanted_dtype(parameter)
        kept = kept_dtype(self._config, wanted) if parameter.requires_grad else wanted
        return self._dtype if sharded and kept == torch.float32 and parameter not in self._spared else None


def _spared(model: nn.Module) -> Iterator[nn.Parameter]:
    # Wrappers such as PEFT's do not repeat what the model inside them says.
    lists = (getattr(module, "_keep_in_fp32_modules_strict", None) or () for module in model.modules())
    parts = {f".{part}." for names in lists for part in names}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(part in f".{name}." for part in parts):
            yield parameter
    for module in model.modules():
        if isinstance(module, _NormBase):
            yield from module.parameters(recurse=False)
