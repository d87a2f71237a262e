"""Detects torch.compile in a model."""

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or a submodule is compiled."""
    return "torch._dynamo" in sys.modules and any(map(compiles_itself, module.modules()))


def compiles_itself(module: nn.Module) -> bool:
    """Whether calling this module runs a compiled function: `torch.compile(module)`, `.compile()` or a compiled `forward`."""
    return context_of(module) is not None


def compiled_frames() -> int:
    """Counts the compiled code objects of this process, to detect compilations, which may happen at any time without notice."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if compiler is None else len(compiler.input_codes.seen)


def context_of(module: nn.Module) -> Callable[[Callable], Callable] | None:
    """Returns the compiler of a module, with the script's backend and options; None if not compiled. Reusable for functions."""
    if "torch._dynamo" not in sys.modules:
        return None
    if is_wrapper(module):
        return cast(Any, module).dynamo_ctx
    context = closure_variable(module._compiled_call_impl or module.__dict__.get("forward"), "self")
    compiler = sys.modules["torch._dynamo.eval_frame"]
    return context if isinstance(context, compiler.OptimizeContext) else None


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module is a result of `torch.compile(module)`. Its only child is the script's module."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def closure_variable(function: Any, name: str) -> Any:
    """Returns a closure variable of a function, because a compiled function stores its compiler only in its closure."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None
