"""Optimizers with a `train()` and an `eval()` of their own, which write to the parameters (schedule-free ones)."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

_SWITCHES = ("train", "eval")


class TrainModes:
    """Has all ranks get what an optimizer's `train()` and `eval()` write; one without such methods is left as it is.

    Defazio et al., "The Road Less Scheduled", 2024: gradients are taken at one average of the weights, and the model is
    evaluated and saved at another; `train()` and `eval()` exchange them in place.

    Args:
        is_possible: between steps, what they read and write is in memory and up to date.
        writing: (what writes) → a context around it, after which all ranks have what was written to rows.

    Raises:
        ValueError: it is not, and the optimizer has such methods.
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
                f"hf_zero: the optimizer {name} writes to the parameters in its {self._names[0]}(), so they and its state have "
                "to be in memory between steps. Take `offload.optimizer: nvme`, `moments: 8bit` and "
                "`rounding: stochastic` out of the settings (`offload.optimizer: cpu` is possible), or use another optimizer."
            )
        for each in self._names:
            setattr(optimizer, each, _sending(f"{name}.{each}()", getattr(optimizer, each), writing))

    def remove(self) -> None:
        """Leaves the optimizer with its own methods."""
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
