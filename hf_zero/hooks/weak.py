"""Module hooks and references to an engine, excluded from copies and pickles of the model."""

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame
from torch._C._dynamo.eval_frame import get_eval_frame_callback as _compiler

from .modes import dispatch_modes, function_modes, without_modes

# ---- Module hooks excluded from copies and pickles of the model ----


class WeakMethod:
    """Calls `function(owner, *args)` while `owner` is alive, and does nothing in a copied or unpickled object."""

    def __init__(self, owner: object | None, function: Callable[..., Any] | None):
        self._owner = weakref.ref(owner) if owner is not None else lambda: None
        self._function: Any = function

    def __call__(self, *args, **kwargs):
        owner = self._owner()
        return None if owner is None else self._function(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "WeakMethod":
        return type(self)(None, None)

    def __reduce__(self):
        return type(self), (None, None)


class WeakHook(WeakMethod):
    """A hook of a module or an optimizer. Modes do not see the hook's operations, and torch.compile does not trace the hook.

    Hooks are part of their module. If a plain bound method were registered, `copy.deepcopy(model)` would copy the engine with its
    buffers, and `torch.save(model)` would pickle it.

    Attributes:
        was_compiled: whether a compiled function has called the hook.
    """

    was_compiled = False

    def __call__(self, *args, **kwargs):
        if _compiler() is None and not (dispatch_modes() or function_modes()):
            owner = self._owner()
            # Without an owner there is no function either.
            return None if owner is None else self._function(owner, *args, **kwargs)
        return self._call_without_modes(args, kwargs)

    def _call_without_modes(self, args: tuple, kwargs: dict) -> Any:
        compiler = set_eval_frame(None)
        try:
            self.was_compiled |= compiler is not None
            with without_modes():
                return super().__call__(*args, **kwargs)
        finally:
            set_eval_frame(compiler)


def caller_of_hook() -> FrameType | None:
    """Returns the frame of the hook's caller, skipping the frames of this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


# Two settings, because a traced function may call a hook, and a hook's own frame may be the first compiled one.
vars(WeakHook.__call__)["_torchdynamo_disable"] = True
for _method in (WeakHook.__call__, WeakHook._call_without_modes):
    set_code_exec_strategy(_method.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


# ---- Finds the engine of a model or a parameter ----

_ATTRIBUTE = "_hf_zero_engine"


class EngineReference:
    """Points to an engine. Copies and pickles of the reference's owner get an empty reference.

    Args:
        keeps: a strong reference, so the engine lives as long as its model, which cannot be used without it. Otherwise weak.
    """

    def __init__(self, engine: object | None = None, *, keeps: bool = False):
        self._engine = (lambda: engine) if keeps or engine is None else weakref.ref(engine)

    def __call__(self) -> Any:
        return self._engine()

    def __deepcopy__(self, memo: dict) -> "EngineReference":
        return EngineReference()

    def __reduce__(self):
        return EngineReference, ()


def attach(engine: object, holders: Iterable[nn.Module | nn.Parameter], *, keeps: bool) -> None:
    """Sets the engine of modules and parameters."""
    reference = EngineReference(engine, keeps=keeps)
    for holder in holders:
        holder.__dict__[_ATTRIBUTE] = reference


def detach(holders: Iterable[nn.Module | nn.Parameter]) -> None:
    for holder in holders:
        holder.__dict__.pop(_ATTRIBUTE, None)


def engine_attached_to(holder: nn.Module | nn.Parameter) -> Any:
    """Returns the live ZeroEngine of a module that was passed to `ZeroEngine`, or of one of its parameters; otherwise None."""
    reference = holder.__dict__.get(_ATTRIBUTE)
    return reference() if isinstance(reference, EngineReference) else None
