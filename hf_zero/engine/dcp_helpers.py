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
    """Lets the helpers see whole parameters and state of optimizers that an engine has cut to rows; once in a process.

    The helpers look state up by the model's Parameters in `param_groups`, where an engine has rows. Their module takes half a
    second to import, so it is changed only after a script's own import.
    """
    if not any(isinstance(finder, AfterImport) and finder.knows(_HELPERS) for finder in sys.meta_path):
        AfterImport({_HELPERS: _replace}).__enter__()


def _replace(module: Any) -> None:
    module._get_optim_state_dict = _WithWholeOptimizers(module._get_optim_state_dict)
    module._load_optim_state_dict = _WithWholeOptimizers(module._load_optim_state_dict)


class _WithWholeOptimizers:
    """Calls a helper of torch with optimizers that have whole parameters and state for the duration. Collective then."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for sharded in filter(None, map(sharded_of, optimizers)):
                stack.enter_context(sharded.as_whole())
            return self._function(model, optimizers, *args, **kwargs)
