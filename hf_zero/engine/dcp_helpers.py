"""Whole optimizer state for torch's DCP helpers (`get_optimizer_state_dict` and `set_optimizer_state_dict`)."""

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..hooks.replaced import AfterImport
from ..step.sharded_optimizer import sharded_of

_HELPERS = "torch.distributed.checkpoint.state_dict"


def support_dcp_helpers() -> None:
    """Makes the helpers use whole parameters and state of sharded optimizers. Installed once per process.

    The helpers search `param_groups` for the model's Parameters, but an engine has put rows there. An import of the helpers'
    module costs half a second, so the module is changed only when a script imports it.
    """
    if not any(isinstance(finder, AfterImport) and finder.knows(_HELPERS) for finder in sys.meta_path):
        AfterImport({_HELPERS: _replace}).__enter__()


def _replace(module: Any) -> None:
    module._get_optim_state_dict = _WithWholeOptimizers(module._get_optim_state_dict)
    module._load_optim_state_dict = _WithWholeOptimizers(module._load_optim_state_dict)


class _WithWholeOptimizers:
    """Calls a torch helper, during which sharded optimizers have whole parameters and state. Collective with such optimizers."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for sharded in filter(None, map(sharded_of, optimizers)):
                stack.enter_context(sharded.row_state.as_whole())
            return self._function(model, optimizers, *args, **kwargs)
