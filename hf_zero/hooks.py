"""Hooks and references that keep neither a model nor its engine alive, the tensors that hooks look for, and replaced names."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

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


# ---- Tensors in what a forward takes and returns, and whether a forward is a recomputation ----

_LEAVES = frozenset({type(None), bool, int, float, str})


def differentiable_tensors(value: object) -> list[torch.Tensor]:
    """The tensors that take gradients in nested lists, tuples, dicts, ModelOutputs and dataclasses."""
    return [tensor for tensor in _tensors(value) if tensor.requires_grad]


def has_tensors(value: object) -> bool:
    """Whether any tensor can be found in the same places."""
    return bool(_tensors(value))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    # Plain nests are looked through here: torch's walk takes several times as long, and each layer is looked at.
    kind = type(value)
    if kind in _LEAVES:
        return []
    found = []
    is_plain = kind is tuple or kind is list or kind is dict
    for leaf in (value.values() if kind is dict else value) if is_plain else tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_plain and type(leaf) not in _LEAVES:
            found += _tensors(leaf)
        # torch's walk takes a dataclass for a leaf, and would miss the tensors that a model returns in one. Python takes the
        # class itself for a dataclass, too, which has no values.
        elif not is_plain and is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors(list(vars(leaf).values()))
    return found


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


# ---- A name of another package, replaced for a while ----


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces a name of a class, module or object of another package by `value` inside."""
    # `getattr` would take the function out of a static method, and restore a plain one that gets `self`.
    before, is_own = getattr_static(owner, name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        # Another package, or the script, may have given an object a function of the object's own.
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
