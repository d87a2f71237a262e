"""When buckets are stepped: in `optimizer.step()`, or before it."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch

from ...buckets.bucket import Bucket
from ...device import Arrival
from ..reports import EarlyReport
from .bucket_state import BucketState

DUE = "delayed "
"""Prefix of keys in old checkpoints: gradients, settings and counts of steps that were one step late."""


class StepTiming(ABC):
    """Chosen once for an engine.

    Attributes:
        steps_early: it wants to be told of gradients while backward goes on.
    """

    steps_early: bool

    @abstractmethod
    def admit(self, optimizer: torch.optim.Optimizer, state: BucketState) -> None:
        """Takes a new bucket among those that are not stepped in their time, if it may be.

        Raises:
            ValueError: it has to be, and cannot.
        """

    @abstractmethod
    def takes(self, bucket: Bucket) -> bool:
        """Whether the bucket has been admitted."""

    @abstractmethod
    def landed(self, bucket: Bucket, arrival: Arrival) -> None:
        """Called in the last backward before a step, when a bucket's rows have their gradients, or will have on `arrival`."""

    @abstractmethod
    def take_over(self, optimizer: torch.optim.Optimizer) -> Collection[Bucket]:
        """Called in the optimizer's step before any bucket is stepped; returns those that are not to be stepped in it.

        Raises:
            OffloadError: a file failed.
        """

    @abstractmethod
    def report(self) -> EarlyReport | None:
        """What is stepped before its time; None where nothing is."""

    @abstractmethod
    def copy_bytes(self) -> int:
        """Bytes of copies of state in memory."""

    @abstractmethod
    def file_copy_bytes(self) -> int:
        """Bytes of copies of state in files."""

    @abstractmethod
    def gradient_bytes(self) -> int:
        """Bytes of gradients that such steps read or have still to take, beside those that the next step will take."""

    @abstractmethod
    def most_beside_bytes(self) -> int:
        """Bytes in memory that copies and `gradient_bytes` come to when all steps are taken so."""

    @abstractmethod
    def close(self) -> None:
        """Ends what is under way."""


class InTime(StepTiming):
    """Every bucket is stepped in `optimizer.step()`."""

    steps_early = False

    def admit(self, optimizer: torch.optim.Optimizer, state: BucketState) -> None:
        """None is stepped at another time."""

    def takes(self, bucket: Bucket) -> bool:
        return False

    def landed(self, bucket: Bucket, arrival: Arrival) -> None:
        """The step comes when the script asks for it."""

    def take_over(self, optimizer: torch.optim.Optimizer) -> Collection[Bucket]:
        return ()

    def report(self) -> EarlyReport | None:
        return None

    def copy_bytes(self) -> int:
        return 0

    def file_copy_bytes(self) -> int:
        return 0

    def gradient_bytes(self) -> int:
        return 0

    def most_beside_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is under way."""


def without_due(state: dict[str, Any]) -> dict[str, Any]:
    """A row's state without what an old checkpoint has of a step that was one step late."""
    kept = {name: value for name, value in state.items() if not name.startswith(DUE)}
    if f"{DUE}gradient" in state:
        warnings.warn(
            "The checkpoint was made with `offload.delay: 1`, which was taken out of hf_zero: the gradients of its last step, "
            "which were due, are dropped.",
            stacklevel=2,
        )
    return kept
