"""The turns of a training step, called by the parts of the step."""

from abc import ABC, abstractmethod
from typing import Any

from ..buckets.bucket import Bucket


class StepContext(ABC):
    """The turns at which parts of a step call the step; see `TrainingStep`.

    Optimizers are named by their index in the engine.
    """

    @property
    @abstractmethod
    def is_accumulating(self) -> bool:
        """Whether another backward will add to these gradients, so nobody reads them yet."""

    @abstractmethod
    def start_passed_over(self, bucket: Bucket) -> bool:
        """Called before `bucket` gets a buffer. Starts an earlier, partly filled bucket; returns whether one was started."""

    @abstractmethod
    def start_up_to(self, number: int) -> None:
        """Called when all ranks have to start the first `number` buckets, with the last steps of their reductions."""

    @abstractmethod
    def agree_on_starts(self) -> None:
        """Called when this rank asks the others to start reductions. Joins their next agreement, unless a gather comes first."""

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
