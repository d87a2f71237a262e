"""One bucket's state in its file, and what the optimizer's register has in place of it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..offload.stored import StoredShard
from .buckets import Bucket, Row
from .stand_ins import StandIns
from .state_rows import MASTER

States = Mapping[Row, dict[str, Any]]
"""The state of some of a bucket's rows by name: the optimizer's register of them, or a copy of it."""


class FileState:
    """What is no stand-in in the register (freshly loaded, or made by the optimizer) is the state itself, and goes to the
    file with the next step of its bucket.

    A parameter without dimensions has state that looks like a scalar, and stays in memory as scalars do.
    """

    def __init__(self, bucket: Bucket, shard: StoredShard, stand_ins: StandIns):
        self.shard = shard
        self._bucket = bucket
        self._stand_ins = stand_ins

    @property
    def has_master(self) -> bool:
        return MASTER in self.shard.dtypes

    def master(self, buffer: torch.Tensor) -> torch.Tensor:
        """The master, (shard_numel,), in a buffer with the file's contents."""
        return self.shard.views(buffer)[MASTER]

    def absent_master(self) -> torch.Tensor:
        """A stand-in for it, 0-d."""
        return self._stand_ins.of((), self._bucket.precision.master)

    def lend(self, states: States, buffer: torch.Tensor) -> None:
        """Puts tensors in `buffer`, which has the file's contents, into `states` in place of stand-ins."""
        self._exchange(states, buffer, lambda view: view)

    def take_back(self, states: States, buffer: torch.Tensor) -> None:
        """Leaves stand-ins in `states`, and in `buffer` what the file is to hold."""
        self._exchange(states, buffer, lambda view: self._stand_ins.of(view.shape, view.dtype))

    def values(self, row: Row, name: str) -> torch.Tensor:
        """What a stand-in of the row stands for, in memory of its own."""
        return self.shard.read_part(name, row.layout.in_shard).view(row.tensor.shape)

    def view(self, row: Row, kind: str) -> torch.Tensor:
        """The same as it is in the file, without taking memory for it."""
        return self.shard.mapped_part(kind, row.layout.in_shard)

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Writes a row's state to the file; returns what belongs in the register."""
        kept = dict(state)
        for name, dtype in self.shard.dtypes.items():
            value = kept.get(name)
            if self._belongs(row, value) and not self._stand_ins.has(value):
                self.shard.write_part(name, row.layout.in_shard, value.reshape(-1))
                kept[name] = self._stand_ins.of(row.tensor.shape, dtype)
        return kept

    def _belongs(self, row: Row, value: Any) -> bool:
        return torch.is_tensor(value) and value.dim() > 0 and value.shape == row.tensor.shape

    def _exchange(self, states: States, buffer: torch.Tensor, instead: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Puts `instead` of its place in the buffer into the register for each state tensor, whose values then are there."""
        views = self.shard.views(buffer)
        for row, state in states.items():
            for name in views:
                value = state.get(name)
                if not self._belongs(row, value):
                    continue
                view = row.of(views[name])
                if not self._stand_ins.has(value) and value.data_ptr() != view.data_ptr():
                    view.copy_(value.view(view.shape))
                state[name] = instead(view)
