"""What steps a bucket: its optimizer's own arithmetic, or a kernel that does the same."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...buckets.bucket import Bucket, Row
from ..clip import scale_gradients
from ..reports import KernelReport
from .bucket_state import BucketState
from .bucket_steps import BucketStep, Passage


@dataclass(frozen=True)
class Assigned:
    """Buckets whose step is not their optimizer's own.

    Attributes:
        passages: of each bucket, how its state comes to memory for the step.
    """

    step: BucketStep
    passages: Mapping[Bucket, Passage]


class StepChoice(ABC):
    """Chosen once for an engine."""

    @abstractmethod
    def assign(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> list[Assigned]:
        """Which of an optimizer's buckets are not stepped by the optimizer itself. `states`: of all its buckets."""

    @abstractmethod
    def scale_gradients(self, rows: Sequence[Row], coefficient: torch.Tensor | None) -> None:
        """Clips: whoever reads the rows' gradients from now on finds them multiplied by `coefficient`, a scalar.

        None leaves them.
        """

    @abstractmethod
    def unwritten(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Those of the buckets whose parameters have not been written beside their masters since the last call."""

    @abstractmethod
    def report(self) -> KernelReport | None:
        """What is stepped by kernels; None where nothing is to be."""


class OwnSteps(StepChoice):
    """Each optimizer steps its buckets itself."""

    def assign(self, optimizer: torch.optim.Optimizer, states: Mapping[Bucket, BucketState]) -> list[Assigned]:
        return []

    def scale_gradients(self, rows: Sequence[Row], coefficient: torch.Tensor | None) -> None:
        scale_gradients(rows, coefficient)

    def unwritten(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        return buckets

    def report(self) -> KernelReport | None:
        return None
