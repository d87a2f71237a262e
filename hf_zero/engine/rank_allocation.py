"""AdaLoRA, which allocates ranks of its matrices from the gradients and parameters of all ranks."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..buckets.sharded_gradient import ShardedGradient
from ..hooks.weak import engine_attached_to

# AdaLoRA (Zhang et al. 2023): `update_and_allocate` reads gradients after the step and masks weights. Both are whole here.

_NAME = "update_and_allocate"
"""Method of peft's AdaLoRA models. The script calls the method after the optimizer's step and before `zero_grad`."""


class RankAllocation:
    """Replaces the method on one module, and keeps whole gradients of the module's trained parameters for the method.

    The gradients are gathered before each step, because the step drops them and the method runs after the step. Adapters are
    small, so the copies need little memory.
    """

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter]):
        self._module = module
        self._trained = trained
        self._gradients: dict[nn.Parameter, torch.Tensor | None] = {}
        module.__dict__[_NAME] = self

    def remove(self) -> None:
        """Restores the method of the module's class."""
        self._module.__dict__.pop(_NAME, None)

    def before_step(self) -> None:
        """Gathers the gradients before the step drops them. Collective."""
        engine = engine_attached_to(self._trained[0])
        if engine is not None:
            self._gradients = {parameter: engine.full_grad(parameter) for parameter in self._trained}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stock = getattr(type(self._module), _NAME)
        engine = engine_attached_to(self._trained[0])
        if engine is None:
            return stock(self._module, *args, **kwargs)
        # The script calls the method before the step, so the kept gradients belong to an earlier step.
        if any(_is_waiting(parameter.grad) for parameter in self._trained):
            self.before_step()
        with ExitStack() as stack, engine.gathered(self._trained, writeback=True, purpose=f"{_NAME}()"):
            for parameter in self._trained:
                # Restore the stand-in afterwards. A backward without `zero_grad` would otherwise reduce the whole gradient again.
                stack.callback(setattr, parameter, "grad", parameter.grad)
                parameter.grad = self._gradients.get(parameter)
            return stock(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        # The copied module gets the plain method, because no engine trains the copy.
        return getattr(memo[id(self._module)], _NAME)

    def __reduce__(self) -> tuple:
        return getattr, (self._module, _NAME)


def rank_allocations(model: nn.Module, trained: Sequence[nn.Parameter]) -> list[RankAllocation]:
    """Returns an object for each module of the model with the method and trained parameters."""
    held = set(trained)
    found = []
    for module in model.modules():
        if not hasattr(type(module), _NAME):
            continue
        own = [parameter for parameter in module.parameters() if parameter in held]
        if own:
            found.append(RankAllocation(module, own))
    return found


def _is_waiting(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient still waits for its step."""
    return isinstance(gradient, ShardedGradient) and not gradient.is_spent
