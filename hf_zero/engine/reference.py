"""From a model, or a parameter of it, to the engine that trains it."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

_ATTRIBUTE = "_hf_zero_engine"


class EngineReference:
    """A weak pointer to an engine; copies and pickles of what holds it get an empty one."""

    def __init__(self, engine: object | None = None):
        self._engine = weakref.ref(engine) if engine is not None else lambda: None

    def __call__(self) -> Any:
        return self._engine()

    def __deepcopy__(self, memo: dict) -> "EngineReference":
        return EngineReference()

    def __reduce__(self):
        return EngineReference, ()


def attach(engine: object, holders: Iterable[nn.Module | nn.Parameter]) -> None:
    """Lets modules and parameters know their engine."""
    reference = EngineReference(engine)
    for holder in holders:
        holder.__dict__[_ATTRIBUTE] = reference


def detach(holders: Iterable[nn.Module | nn.Parameter]) -> None:
    for holder in holders:
        holder.__dict__.pop(_ATTRIBUTE, None)


def engine_attached_to(holder: nn.Module | nn.Parameter) -> Any:
    """The live ZeroEngine of a module that was handed to `ZeroEngine`, or of a parameter of it; or None."""
    reference = holder.__dict__.get(_ATTRIBUTE)
    return reference() if isinstance(reference, EngineReference) else None
