"""The turns of a training step, called by the parts of the step."""

from abc import ABC, abstractmethod
from typing import Any


class StepContext(ABC):
    """The turns at which parts of a step call the step; see `TrainingStep`.

    Optimizers are named by their index in the engine.
    """

    @abstractmethod
    def end_gathers(self) -> None:
        """Called at the end of each backward, before the remaining buckets start."""

    @abstractmethod
    def end_backward(self) -> None:
        """Called at the end of each backward, when all gradients are reduced."""

    @abstractmethod
    def before_step(self, index: int) -> bool:
        """Called before each step of an optimizer; returns whether to run the step."""

    @abstractmethod
    def after_step(self, index: int, *, is_taken: bool) -> None:
        """Called after each step of an optimizer. `is_taken`: the answer of `before_step`."""

    @abstractmethod
    def add_param_group(self, index: int, group: dict[str, Any]) -> None:
        """Called in place of an optimizer's `add_param_group`."""
