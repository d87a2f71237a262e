"""Optimizer state where the optimizer made it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...buckets.bucket import Bucket, Row
from ...buckets.packed_state import PackedPart
from ..state.bucket_state import Regions, StateCopy, StatePlace
from ..state.placeholders import States
from ..state.state_rows import elementwise_state


class StateInRegister(StatePlace):
    """The optimizer's register has the values themselves."""

    is_away = False
    lent_bytes = 0

    def lend(self, states: States, regions: Regions) -> None:
        """It is at hand."""

    def take_back(self, states: States, regions: Regions) -> None:
        """It is where it belongs."""

    def values(self, row: Row, name: str, value: Any) -> Any:
        return value

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        return tensor

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    def copy(self) -> StateCopy:
        return _SecondState()

    def copy_bytes(self, bucket: Bucket, dtypes: Iterable[torch.dtype]) -> int:
        return bucket.layout.shard_numel * sum(dtype.itemsize for dtype in dtypes)

    def close(self) -> None:
        """The optimizer keeps it."""


class _SecondState:
    """Tensors of the state and their copies change places when a step is taken over."""

    def __init__(self):
        self._spare: dict[tuple[Row, str], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._spare.values())

    def begin(self, states: States, regions: Regions) -> dict[Row, dict[str, Any]]:
        return {row: self._copy_of(row, state) for row, state in states.items()}

    def end(self, states: dict[Row, dict[str, Any]], regions: Regions) -> None:
        """The copies are what the register is to have."""

    def exchange(self) -> None:
        """Each row's tensors change places by themselves."""

    def take_over(self, row: Row, old: dict[str, Any]) -> None:
        self._spare.update({(row, name): tensor for name, tensor in elementwise_state(old, row).items()})

    def _copy_of(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        elementwise = elementwise_state(state, row)
        return {
            name: self._filled(row, name, value) if name in elementwise else copied(value)
            for name, value in state.items()
        }

    def _filled(self, row: Row, name: str, value: torch.Tensor) -> torch.Tensor:
        spare = self._spare.get((row, name))
        if spare is None or spare.shape != value.shape or spare.dtype != value.dtype:
            spare = self._spare[row, name] = torch.empty_like(value)
        return spare.copy_(value)


def copied(value: Any) -> Any:
    """State that a step may write to, apart from the register's."""
    return value.clone() if torch.is_tensor(value) else value
