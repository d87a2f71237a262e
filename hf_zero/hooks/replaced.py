"""Runs a call after another package is imported, and replaces a name of another package for a while."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import getattr_static
from types import ModuleType
from typing import Any

# ---- A call after the import of another package ----


class AfterImport(MetaPathFinder):
    """A context manager that runs a call for each package once, right after its import, or at once if already imported.

    Args:
        calls: maps the name of a package to a function that is called with its module.
    """

    def __init__(self, calls: Mapping[str, Callable[[ModuleType], None]]):
        self._names = frozenset(calls)
        self._waiting = dict(calls)

    def knows(self, name: str) -> bool:
        """Whether there is, or was, a call for this package."""
        return name in self._names

    def __enter__(self) -> "AfterImport":
        # Insert at the front: Python asks no further finder once one has found the package.
        sys.meta_path.insert(0, self)
        for name in self._waiting.keys() & sys.modules.keys():
            self._waiting.pop(name)(sys.modules[name])
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of another finder, with a loader that runs the call after loading."""
        if fullname not in self._waiting:
            return None
        # `importlib.util.find_spec` would call this finder again.
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._follow(fullname, spec.loader)
        return spec

    def _follow(self, name: str, loader: Loader) -> None:
        execute = loader.exec_module
        seen: Any = loader

        def exec_module(module: ModuleType) -> None:
            # Restore the loader's own method before the module runs.
            del seen.exec_module
            execute(module)
            call = self._waiting.pop(name, None)
            if call is not None:
                call(module)

        seen.exec_module = exec_module


# ---- A name of another package, replaced for a while ----


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces a name of a class, module or object of another package by `value` inside the context."""
    # getattr unwraps a staticmethod; setting that back would turn it into an instance method.
    before, is_own = getattr_static(owner, name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        # The attribute may have been set on an object by another package or by the script. Otherwise it came from the class.
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
