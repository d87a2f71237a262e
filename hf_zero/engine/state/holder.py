"""Who holds optimizer state between steps: memory, where the optimizer put it, or something that it is fetched from."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...device import Arrival
from ...offload.parameter_shards import Region
from ..buckets.bucket import Bucket, Row
from ..buckets.packed_state import PackedPart
from ..gradients.clip import scale_gradients
from ..report_tables import EarlyReport, KernelReport

DUE = "delayed "
"""Begins the names of what a checkpoint has of a step that was due."""


def without_due(state: dict[str, Any]) -> dict[str, Any]:
    """A row's state without a step that was due when the checkpoint was made, for a run that takes steps in their time."""
    kept = {name: value for name, value in state.items() if not name.startswith(DUE)}
    if len(kept) < len(state):
        warnings.warn(
            "The checkpoint was made with `offload.delay: 1`: the gradients of its last step, which were due, are dropped. Set "
            "`offload.delay: 1` to go on as that run would have.",
            stacklevel=2,
        )
    return kept


class StateHolder(ABC):
    """Chosen once, with the tier. The optimizer's own dict stays the register of what state a row has.

    Attributes:
        steps_early: it wants to be told of gradients while backward goes on.
    """

    steps_early = False

    def settle(self, bucket: Bucket) -> None:
        """Called when a bucket has been built, before the next one is: what it holds goes where it lives."""
        self.take(bucket)
        bucket.rest(self.master_region(bucket))

    @abstractmethod
    def take(self, bucket: Bucket) -> None:
        """Takes a new bucket's master, if it is to live elsewhere."""

    @abstractmethod
    def master_region(self, bucket: Bucket) -> Region | None:
        """Where in a file the bucket's master lies, if its digits are the parameters' own; None elsewhere."""

    @abstractmethod
    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Has the optimizer's steps go over these buckets, which are its own, as this holder needs it."""

    @abstractmethod
    def before_forward(self) -> None:
        """Called at each forward."""

    def scale_gradients(self, rows: Sequence[Row], coefficient: torch.Tensor | None) -> None:
        """Clips: whoever reads the rows' gradients from now on finds them multiplied by `coefficient`, a scalar.

        None leaves them.
        """
        scale_gradients(rows, coefficient)

    def after_step(self, buckets: Sequence[Bucket]) -> None:
        """Called after the optimizer's step, before gradients are given back: the parameters become what their masters are."""
        for bucket in buckets:
            bucket.write_back()

    @abstractmethod
    def at_hand(self, bucket: Bucket):
        """A context in which the bucket's master may be read and written."""

    @abstractmethod
    def values(self, row: Row, name: str, value: Any) -> Any:
        """What the optimizer's register has under `name` for a row, with its values, which may be a copy."""

    @abstractmethod
    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """A row's state or master, live, without taking memory for it. `tensor` is what the register or the row has."""

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Takes a row's state that came from elsewhere; returns what belongs in the optimizer's register."""
        return without_due(state)

    @abstractmethod
    def put_master(self, row: Row, values: torch.Tensor) -> None:
        """Replaces the row's master."""

    @abstractmethod
    def window_bytes(self) -> int:
        """Memory at most for state that passes through during a step."""

    @abstractmethod
    def close(self, buckets: Sequence[Bucket]) -> None:
        """Gives state that lives elsewhere back to the optimizer's register, and ends."""

    def state_bytes(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes that a bucket's state takes where it lives. `tensors`: what the optimizer's register has of it."""
        return sum(tensor.nbytes for tensor in tensors)

    # ---- of those that step out of time; the others take every bucket's step when the script asks for it ----

    def landed(self, bucket: Bucket, arrival: Arrival) -> None:  # noqa: B027 (nothing to do is an answer)
        """Called in the last backward before a step, when a bucket's rows have their gradients, or will have on `arrival`."""

    def early_report(self) -> EarlyReport | None:
        """What is stepped before its time; None where nothing is."""
        return None

    def kernel_report(self) -> KernelReport | None:
        """What is stepped by kernels in place of the optimizers' own steps; None where nothing is to be."""
        return None

    def copy_bytes(self) -> int:
        """Bytes of state that are there twice, for steps that are not taken in their time."""
        return 0

    def gradient_bytes(self) -> int:
        """Bytes of gradients that such steps read or have still to take, beside those that the next step will take."""
        return 0

    def most_beside_bytes(self) -> int:
        """Bytes in memory that copies and `gradient_bytes` come to when all steps are taken so."""
        return 0

    def beside(self, row: Row) -> dict[str, Any]:
        """What a checkpoint has of a row beside its state: a step that is due, in names that begin with `DUE`."""
        return {}


class InMemory(StateHolder):
    """State stays where the optimizer made it."""

    def take(self, bucket: Bucket) -> None:
        """It is where it belongs."""

    def master_region(self, bucket: Bucket) -> Region | None:
        return None

    def step_with(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """The optimizer's own step does."""

    def before_forward(self) -> None:
        """Nothing is on its way."""

    @contextmanager
    def at_hand(self, bucket: Bucket) -> Iterator[None]:
        yield

    def values(self, row: Row, name: str, value: Any) -> Any:
        return value

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return tensor

    def put_master(self, row: Row, values: torch.Tensor) -> None:
        with torch.no_grad():
            row.tensor.copy_(values.view(row.tensor.shape))

    def window_bytes(self) -> int:
        return 0

    def close(self, buckets: Sequence[Bucket]) -> None:
        """It is where it belongs."""
