"""When buckets are stepped: in `optimizer.step()`, before it, or behind it."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch

from ...buckets.bucket import Bucket, Row
from ...device import Arrival
from ..reports import EarlyReport
from .bucket_state import BucketState

DUE = "delayed "
"""Prefix of checkpoint keys for what delayed steps keep beside a row's state."""

DUE_GRADIENT = f"{DUE}gradient"
"""The checkpoint key for the gradient of a delayed step not yet applied."""


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
    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Takes what a row's state, which came from a checkpoint, has of a step that was due; returns the rest."""

    @abstractmethod
    def beside(self, row: Row) -> dict[str, Any]:
        """What a checkpoint has of a row beside its state: a step that is due, in names that begin with `DUE`."""

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

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        return without_due(state)

    def beside(self, row: Row) -> dict[str, Any]:
        return {}

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
    """A row's state without a step that was due when the checkpoint was made, for a run that takes steps in their time."""
    kept = {name: value for name, value in state.items() if not name.startswith(DUE)}
    if DUE_GRADIENT in state:
        warnings.warn(
            "The checkpoint was made with `offload.delay: 1`: the gradients of its last step, which were due, are dropped. Set "
            "`offload.delay: 1` to go on as that run would have.",
            stacklevel=2,
        )
    return kept
