"""Knowing when a backward pass has ended, also for a plain `loss.backward()`."""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves


def differentiable_tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors that take gradients in nested lists, tuples, dicts, ModelOutputs and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from differentiable_tensors(list(vars(leaf).values()))


def has_tensors(value: object) -> bool:
    """Whether any tensor can be found in the same places."""
    return any(
        isinstance(leaf, torch.Tensor)
        or (is_dataclass(leaf) and not isinstance(leaf, type) and has_tensors(list(vars(leaf).values())))
        for leaf in tree_leaves(value)
    )


class BackwardEnd:
    """Calls `on_end` once after each backward pass.

    A tensor hook on the root module's outputs queues an autograd callback on the outer graph task. Queued from a
    parameter's hook it would run after each inner backward of reentrant checkpointing, too early; that is left for losses
    that bypass the outputs, where an early end costs a further reduction and no gradient.
    """

    def __init__(self, on_end: Callable[[], None]):
        self._on_end = on_end
        self._armed = False

    @property
    def armed(self) -> bool:
        """True from the first gradient of a pass to its end."""
        return self._armed

    def watch(self, outputs: object) -> None:
        """Hooks every tensor of a forward's outputs that takes gradients."""
        for tensor in differentiable_tensors(outputs):
            tensor.register_hook(self.arm)

    def arm(self, _gradient: torch.Tensor | None = None) -> None:
        """Queues the end of the running pass, once. Called inside a backward."""
        if not self._armed:
            self._armed = True
            Variable._execution_engine.queue_callback(self._end)

    def abandon(self) -> None:
        """Forgets a pass that an exception ended before its callback ran."""
        self._armed = False

    def _end(self) -> None:
        self._armed = False
        self._on_end()
