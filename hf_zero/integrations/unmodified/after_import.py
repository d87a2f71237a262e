"""Calls that wait until a script has imported a package: nothing is imported earlier than the script does so itself."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """A context manager: inside, each package's call comes once, right after its import, or at once if it was imported before.

    Args:
        calls: package's name → what to call with its module.
    """

    def __init__(self, calls: Mapping[str, Callable[[ModuleType], None]]):
        self._waiting = dict(calls)

    def __enter__(self) -> "AfterImport":
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
        """What the other finders have found, with a loader that calls when it has loaded."""
        if fullname not in self._waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._follow(fullname, spec.loader)
        return spec

    def _follow(self, name: str, loader: Loader) -> None:
        execute = loader.exec_module
        seen: Any = loader

        def exec_module(module: ModuleType) -> None:
            # The loader is the module's own from here on, as if nobody had looked.
            del seen.exec_module
            execute(module)
            call = self._waiting.pop(name, None)
            if call is not None:
                call(module)

        seen.exec_module = exec_module
