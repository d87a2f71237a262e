"""Hides the engine's operations from the modes of a script (TorchDispatchMode, TorchFunctionMode).

Selective checkpointing counts a layer's operations in forward, and expects as many of each in the recomputation, where the
engine gathers other layers. Modes that log or count operations would count the engine's as the model's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")

dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many modes see dispatched operations. In a backward no other modes are on: torch's `backward` takes them off."""

function_modes = torch._C._len_torch_function_stack


@contextmanager
def without_modes() -> Iterator[None]:
    """Takes all modes off for operations of the engine."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(function_modes())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def hidden_from_modes(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates a function of the engine whose operations no mode sees. Without modes it costs little."""

    @wraps(function)
    def without(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        if not (dispatch_modes() or function_modes()):
            return function(*args, **kwargs)
        with without_modes():
            return function(*args, **kwargs)

    return without
