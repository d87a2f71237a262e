"""Schedule-free optimizers, whose `train()` and `eval()` write to the parameters."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

_SWITCHES = ("train", "eval")


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has `train()` or `eval()`."""
    return any(callable(getattr(optimizer, name, None)) for name in _SWITCHES)


class TrainModes:
    """Sends an optimizer's writes in `train()` and `eval()` to all ranks. Optimizers without these methods are not changed.

    Defazio et al., "The Road Less Scheduled", 2024: gradients are computed at one average of the weights, and the model is
    evaluated and saved at another one; `train()` and `eval()` exchange the two in place.

    Args:
        is_possible: whether parameters and state are in memory and up to date between steps.
        writing: (name of the call) → a context around the call, which sends the written rows.

    Raises:
        ValueError: `is_possible` is False, and the optimizer has these methods.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        is_possible: bool,
        writing: Callable[[str], AbstractContextManager[None]],
    ):
        self._optimizer = optimizer
        self._names = [name for name in _SWITCHES if callable(getattr(optimizer, name, None))]
        name = type(optimizer).__name__
        if self._names and not is_possible:
            raise ValueError(
                f"hf_zero: the optimizer {name} writes to the parameters in its {self._names[0]}(), so parameters and state "
                "must stay in memory. Remove `offload.optimizer: nvme`, `moments: 8bit` and `rounding: stochastic`, or use "
                "another optimizer."
            )
        for each in self._names:
            # Set the attribute on the object, because other optimizers of the class may have no engine.
            setattr(optimizer, each, _sending(f"{name}.{each}()", getattr(optimizer, each), writing))

    def remove(self) -> None:
        for name in self._names:
            delattr(self._optimizer, name)


def _sending(
    name: str, switch: Callable[..., object], writing: Callable[[str], AbstractContextManager[None]]
) -> Callable[..., object]:
    @functools.wraps(switch)
    def switched(*args, **kwargs) -> object:
        with writing(name):
            return switch(*args, **kwargs)

    return switched
