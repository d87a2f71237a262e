"""Module hooks that are not copied or pickled with the model."""

import weakref
from collections.abc import Callable
from typing import Any


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
