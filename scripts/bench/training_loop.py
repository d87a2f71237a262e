"""What every engine under comparison is: a model and its optimizer in a training loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

MakeModel = Callable[[], torch.nn.Module]
OptimizerArguments = dict[str, object]


class Engine:
    """A model and its optimizer in the plain training loop; what shards them has been installed by whoever made it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def step(self, *micro_batches: torch.Tensor) -> float:
        """Train on one batch, or accumulate over several, and return the mean loss on this rank."""
        mean = 0.0
        for number, input_ids in enumerate(micro_batches, start=1):
            with nullcontext() if number == len(micro_batches) else self.accumulating():
                loss = self.model(input_ids, labels=input_ids).loss / len(micro_batches)
                self.backward(loss)
                mean += loss.item()
        self.update()
        return mean

    def accumulating(self) -> AbstractContextManager[None]:
        """Around micro-batches that no step follows."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """Step and zero the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        """Scale the gradients of the last backward so that their norm over all ranks is at most `max_norm`."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def finish(self) -> None:
        """Wait for what the last step left in flight: nothing, in torch's own engines."""

    def waited_ms(self) -> float | None:
        """Time spent waiting for the other ranks since the start, or None where the engine does not count it."""
        return None

    def close(self) -> None:
        """Let go of the model and the optimizer; call it before the process group is destroyed."""
        del self.model, self.optimizer
