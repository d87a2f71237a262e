"""A model that is only evaluated: its parameters get no gradients, whatever their `requires_grad` says."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..hooks.weak import WeakHook


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Freezes all parameters of a model inside, and restores `requires_grad` afterwards. Parameters may be replaced inside."""
    # Store names, since the model may have different objects under these names afterwards.
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for name in trained:
            model.get_parameter(name).requires_grad_(True)


class FreezesInForward:
    """Freezes parameters during forwards, because nobody would reduce their gradients, which would differ between ranks."""

    def __init__(self) -> None:
        self._frozen: list[tuple[nn.Module, list[nn.Parameter]]] = []

    def watch(self, entry: nn.Module) -> list[RemovableHandle]:
        """Watches forwards of `entry`, and of each module with own parameters, which a script may call separately."""
        modules = [entry, *(module for module in entry.modules() if module._parameters and module is not entry)]
        handles: list[RemovableHandle] = []
        for module in modules:
            begin, end = FreezesInForward._begin, FreezesInForward._end
            handles += [
                module.register_forward_pre_hook(WeakHook(self, begin), prepend=True),
                module.register_forward_hook(WeakHook(self, end), always_call=True),
            ]
        return handles

    def _begin(self, module: nn.Module, _args: tuple) -> None:
        if torch.is_grad_enabled():
            self._frozen.append((module, [p for p in module.parameters() if p.requires_grad]))
            for parameter in self._frozen[-1][1]:
                parameter.requires_grad_(False)

    def _end(self, module: nn.Module, *_args: object) -> None:
        # torch also calls this hook after an error in a hook before `_begin`, so check the module.
        if self._frozen and self._frozen[-1][0] is module:
            for parameter in self._frozen.pop()[1]:
                parameter.requires_grad_(True)
