"""Hides the engine's operations from the modes of a script (TorchDispatchMode, TorchFunctionMode).

Selective checkpointing counts the operations of a layer in forward, and expects the same number in the recomputation, during
which the engine gathers other layers. Modes that log or count operations would attribute the engine's operations to the model.
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
"""Number of modes that see dispatched operations. It is 0 in a backward, because torch's `backward` disables all modes."""

function_modes = torch._C._len_torch_function_stack


@contextmanager
def without_modes() -> Iterator[None]:
    """Disables all modes for operations of the engine."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(function_modes())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def hidden_from_modes(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates a function of the engine to run without modes. If no mode is active, the overhead is small."""

    @wraps(function)
    def without(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        if not (dispatch_modes() or function_modes()):
            return function(*args, **kwargs)
        with without_modes():
            return function(*args, **kwargs)

    return without
