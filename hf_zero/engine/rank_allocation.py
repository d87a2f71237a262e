"""AdaLoRA (Zhang et al. 2023): `update_and_allocate` reads gradients behind the step and masks weights, here on whole ones."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..buckets.gradient_tensors import ShardedGradient
from ..engine_reference import engine_attached_to

_NAME = "update_and_allocate"
"""Of peft's AdaLoRA models: called by the script behind the optimizer's step and before `zero_grad`."""


class RankAllocation:
    """Replaces the method on one module, and keeps whole gradients of the module's trained parameters for the method.

    The gradients are gathered before each step: a step drops them, and the method comes behind the step. Adapters are small.
    """

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter]):
        self._module = module
        self._trained = trained
        self._gradients: dict[nn.Parameter, torch.Tensor | None] = {}
        module.__dict__[_NAME] = self

    def remove(self) -> None:
        """Gives the module its class's method again."""
        self._module.__dict__.pop(_NAME, None)

    def before_step(self) -> None:
        """Gathers the gradients that a step is about to drop. Collective."""
        engine = engine_attached_to(self._trained[0])
        if engine is not None:
            self._gradients = {parameter: engine.full_grad(parameter) for parameter in self._trained}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stock = getattr(type(self._module), _NAME)
        engine = engine_attached_to(self._trained[0])
        if engine is None:
            return stock(self._module, *args, **kwargs)
        if any(_is_waiting(parameter.grad) for parameter in self._trained):
            self.before_step()
        with ExitStack() as stack, engine.gathered(self._trained, writeback=True):
            for parameter in self._trained:
                stack.callback(setattr, parameter, "grad", parameter.grad)
                parameter.grad = self._gradients.get(parameter)
            return stock(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        # The copy of the module is trained by no engine.
        return getattr(memo[id(self._module)], _NAME)

    def __reduce__(self) -> tuple:
        return getattr, (self._module, _NAME)


def rank_allocations(model: nn.Module, trained: Sequence[nn.Parameter]) -> list[RankAllocation]:
    """One for each module of the model that has the method."""
    held = set(trained)
    found = []
    for module in model.modules():
        own = [parameter for parameter in module.parameters() if parameter in held]
        if own and hasattr(type(module), _NAME):
            found.append(RankAllocation(module, own))
    return found


def _is_waiting(gradient: torch.Tensor | None) -> bool:
    """Whether no step has been taken with a gradient yet."""
    return isinstance(gradient, ShardedGradient) and not gradient.is_spent
