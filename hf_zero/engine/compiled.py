"""What torch.compile compiles of a model, and at stage 3 the layers in place of a whole model."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has been asked for somewhere in the module."""
    return "torch._dynamo" in sys.modules and any(map(compiles_itself, module.modules()))


def compiles_itself(module: nn.Module) -> bool:
    """Whether calling this module runs a compiled function: `torch.compile(module)`, `.compile()` or a compiled `forward`."""
    return _context_of(module) is not None


def compiled_frames() -> int:
    """Counts what torch.compile has compiled in this process. Scripts may compile at any time, and nothing tells of that."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if compiler is None else len(compiler.input_codes.seen)


def _context_of(module: nn.Module) -> Callable[[Callable], Callable] | None:
    """Returns what has compiled a module, with the script's backend and options. It compiles other functions, too."""
    if "torch._dynamo" not in sys.modules:
        return None
    if _is_wrapper(module):
        return cast(Any, module).dynamo_ctx
    context = _within(module._compiled_call_impl or module.__dict__.get("forward"), "self")
    compiler = sys.modules["torch._dynamo.eval_frame"]
    return context if isinstance(context, compiler.OptimizeContext) else None


def _is_wrapper(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` has returned the module. Its only child is the script's own."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def _within(function: Any, name: str) -> Any:
    """Returns what a function finds under a name where it was made: a compiled one keeps its compiler nowhere else."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None


class CompiledLayers:
    """Compiles the layers of a model that a script has compiled as a whole, and runs the model around them uncompiled.

    Layers are gathered and dropped by hooks around them, which no graph can hold. Traced, each hook would end a graph, and
    torch would give up the loop over the layers after it had traced a part of the model for nothing.

    Args:
        called: what the script calls, and what lies inside.
        layers: modules that are gathered and dropped.
    """

    def __init__(self, called: Iterable[nn.Module], layers: Iterable[nn.Module]):
        self._layers: list[nn.Module] = []
        self._whole: list[tuple[nn.Module, str, Any]] = []
        layers = list(layers)
        for module in dict.fromkeys(called):
            context = _context_of(module)
            inside = set(module.modules()) - {module}
            # A wrapper around one layer has the layer's hooks inside, where torch itself leaves them out of the graph.
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
        """Compiles the model as a whole again."""
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
