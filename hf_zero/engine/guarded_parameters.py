"""Replaces a module's `_parameters` by a dict that calls a function before a parameter is read."""

from collections.abc import Callable
from typing import Any

from torch import nn

BeforeRead = Callable[[Any], None]


class GuardedParameters(dict):
    """A dict in the place of a module's `_parameters`, while reading them needs something done before.

    Args:
        parameters: the module's own dict, which takes this one's place again later.
        before_read: called with what is about to be read.

    Attributes:
        stock: the module's own dict.
    """

    def __init__(self, parameters: dict, before_read: BeforeRead):
        super().__init__(parameters)
        self.stock = parameters
        self._before_read = before_read

    def follow(self) -> bool:
        """Takes over what the module's own dict holds now; False where that has lost a name."""
        dict.update(self, self.stock)
        return len(self) == len(self.stock)


class ParametersGuard:
    """Puts guarding dicts of one kind in the place of one module's `_parameters`, and takes them out again."""

    def __init__(self, module: nn.Module, kind: type[GuardedParameters], before_read: BeforeRead):
        self._module = module
        self._kind = kind
        self._before_read = before_read
        self._guarded: GuardedParameters | None = None

    def put(self) -> None:
        """Unless it is there."""
        # Past `nn.Module.__getattr__`: stage 3 comes here for each module of each unit, twice in a pass.
        held: Any = self._module.__dict__["_parameters"]
        if type(held) is self._kind:
            return
        guarded = self._guarded
        if guarded is None or guarded.stock is not held or not guarded.follow():
            guarded = self._guarded = self._kind(held, self._before_read)
        self._module.__dict__["_parameters"] = guarded

    def remove(self) -> None:
        """Leaves the module with its own dict."""
        held: Any = self._module.__dict__["_parameters"]
        if type(held) is self._kind:
            self._module.__dict__["_parameters"] = held.stock
