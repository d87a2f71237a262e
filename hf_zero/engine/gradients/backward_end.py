"""A callback at the end of each backward pass, also of a plain `loss.backward()`."""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

_LEAVES = frozenset({type(None), bool, int, float, str})


def differentiable_tensors(value: object) -> list[torch.Tensor]:
    """The tensors that take gradients in nested lists, tuples, dicts, ModelOutputs and dataclasses."""
    return [tensor for tensor in _tensors(value) if tensor.requires_grad]


def has_tensors(value: object) -> bool:
    """Whether any tensor can be found in the same places."""
    return next(_tensors(value), None) is not None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    # Plain nests are looked through here: torch's walk takes several times as long, and each layer is looked at.
    kind = type(value)
    if kind in _LEAVES:
        return
    if kind is tuple or kind is list or kind is dict:
        for item in value.values() if kind is dict else value:
            yield from _tensors(item)
        return
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors(list(vars(leaf).values()))


class BackwardEnd:
    """Calls `on_end` once after each backward pass.

    Attributes:
        armed: True from the first gradient of a pass to its end.

    A tensor hook on the root module's outputs queues an autograd callback on the outer graph task. Queued from a
    parameter's hook it would run after each inner backward of reentrant checkpointing, too early; that is left for losses
    that bypass the outputs, where an early end costs a further reduction and no gradient.
    """

    def __init__(self, on_end: Callable[[], None]):
        self._on_end = on_end
        self.armed = False

    def watch(self, outputs: object) -> None:
        """Hooks every tensor of a forward's outputs that takes gradients."""
        for tensor in differentiable_tensors(outputs):
            tensor.register_hook(self.arm)

    def arm(self, _gradient: torch.Tensor | None = None) -> None:
        """Queues the end of the running pass, once. Called inside a backward."""
        if not self.armed:
            self.armed = True
            Variable._execution_engine.queue_callback(self._end)

    def abandon(self) -> None:
        """Forgets a pass that an exception ended before its callback ran."""
        self.armed = False

    def _end(self) -> None:
        self.armed = False
        self._on_end()
