"""Detects torch.compile in a model, and at stage 3 compiles the layers instead of the whole model."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or a submodule is compiled."""
    return "torch._dynamo" in sys.modules and any(map(compiles_itself, module.modules()))


def compiles_itself(module: nn.Module) -> bool:
    """Whether calling this module runs a compiled function: `torch.compile(module)`, `.compile()` or a compiled `forward`."""
    return _context_of(module) is not None


def compiled_frames() -> int:
    """Counts the compiled code objects of this process, to detect compilations, which may happen at any time without notice."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if compiler is None else len(compiler.input_codes.seen)


def _context_of(module: nn.Module) -> Callable[[Callable], Callable] | None:
    """Returns the compiler of a module, with the script's backend and options; None if not compiled. Reusable for functions."""
    if "torch._dynamo" not in sys.modules:
        return None
    if _is_wrapper(module):
        return cast(Any, module).dynamo_ctx
    context = _within(module._compiled_call_impl or module.__dict__.get("forward"), "self")
    compiler = sys.modules["torch._dynamo.eval_frame"]
    return context if isinstance(context, compiler.OptimizeContext) else None


def _is_wrapper(module: nn.Module) -> bool:
    """Whether the module is a result of `torch.compile(module)`. Its only child is the script's module."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def _within(function: Any, name: str) -> Any:
    """Returns a closure variable of a function, because a compiled function stores its compiler only in its closure."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None


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
            context = _context_of(module)
            inside = set(module.modules()) - {module}
            # In a compiled wrapper around one layer, torch itself keeps the layer's hooks out of the graph.
            own = [layer for layer in layers if layer in inside]
            if context is None or not own or (_is_wrapper(module) and next(module.children()) in own):
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
        if _is_wrapper(module):
            name, uncompiled = "forward", next(module.children()).__call__
        elif module._compiled_call_impl is not None:
            name, uncompiled = "_compiled_call_impl", None
        else:
            name, uncompiled = "forward", _within(module.__dict__["forward"], "fn")
        self._whole.append((module, name, module.__dict__[name]))
        module.__dict__[name] = uncompiled
