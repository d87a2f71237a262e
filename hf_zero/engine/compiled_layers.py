"""Compiles the layers of stage 3 instead of the whole model."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from .compiled import closure_variable, compiles_itself, context_of, is_wrapper


class CompiledLayers:
    """If a script has compiled a whole model, compiles its layers instead, and runs the code around them uncompiled.

    Hooks around the layers gather and drop their parameters, and cannot be part of a graph. Each traced hook would cause a graph
    break, and torch would not compile the loop over the layers, after tracing a part of the model for nothing.

    Args:
        called: the modules that the script calls, and their submodules.
        layers: the modules that are gathered and dropped.
    """

    def __init__(self, called: Iterable[nn.Module], layers: Iterable[nn.Module]):
        self._layers: list[nn.Module] = []
        self._whole: list[tuple[nn.Module, str, Any]] = []
        layers = list(layers)
        for module in dict.fromkeys(called):
            context = context_of(module)
            inside = set(module.modules()) - {module}
            # In a compiled wrapper around one layer, torch itself keeps the layer's hooks out of the graph.
            own = [layer for layer in layers if layer in inside]
            if context is None or not own or (is_wrapper(module) and next(module.children()) in own):
                continue
            self._run_uncompiled(module)
            for layer in own:
                if layer not in self._layers and not compiles_itself(layer):
                    changed: Any = layer
                    changed.forward = context(layer.forward)
                    self._layers.append(layer)

    def __len__(self) -> int:
        return len(self._layers)

    def undo(self) -> None:
        """Restores the compilation of the whole model."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
        for module, name, value in self._whole:
            module.__dict__[name] = value

    def _run_uncompiled(self, module: nn.Module) -> None:
        if is_wrapper(module):
            name, uncompiled = "forward", next(module.children()).__call__
        elif module._compiled_call_impl is not None:
            name, uncompiled = "_compiled_call_impl", None
        else:
            name, uncompiled = "forward", closure_variable(module.__dict__["forward"], "fn")
        self._whole.append((module, name, module.__dict__[name]))
        module.__dict__[name] = uncompiled
