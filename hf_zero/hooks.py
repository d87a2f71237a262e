"""Functions of ours in modules and packages of others: hooks that keep no model alive, names that are replaced for a while."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# ---- Module hooks that are not copied or pickled with the model ----


class WeakHook:
    """Calls `function(owner, *args)` while `owner` lives, and does nothing in a copied or unpickled model.

    A module's hooks are part of the module: with a plain bound method there, `copy.deepcopy(model)` would copy the engine
    with its buffers, and `torch.save(model)` would pickle it.
    """

    def __init__(self, owner: object | None, function: Callable[..., Any] | None):
        self._owner = weakref.ref(owner) if owner is not None else lambda: None
        self._function = function

    def __call__(self, *args, **kwargs):
        owner, function = self._owner(), self._function
        return None if owner is None or function is None else function(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "WeakHook":
        return WeakHook(None, None)

    def __reduce__(self):
        return WeakHook, (None, None)


# ---- Finds the engine that trains a model or a parameter ----

_ATTRIBUTE = "_hf_zero_engine"


class EngineReference:
    """Points to an engine. Copies and pickles of the holder get an empty reference.

    Args:
        keeps: the engine lives as long as its model, which is of no use without it. Else the pointer is weak.
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
    """Tells modules and parameters their engine."""
    reference = EngineReference(engine, keeps=keeps)
    for holder in holders:
        holder.__dict__[_ATTRIBUTE] = reference


def detach(holders: Iterable[nn.Module | nn.Parameter]) -> None:
    for holder in holders:
        holder.__dict__.pop(_ATTRIBUTE, None)


def engine_attached_to(holder: nn.Module | nn.Parameter) -> Any:
    """Returns the live ZeroEngine of a module that was handed to `ZeroEngine`, or of its parameter; or None."""
    reference = holder.__dict__.get(_ATTRIBUTE)
    return reference() if isinstance(reference, EngineReference) else None


# ---- A name of another package, replaced for a while ----


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces a name of a class or module of another package by `value` inside."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
