"""Optimizer state of whole buckets as flat tensors, of which the rows' state are views."""

from typing import Any

import torch

from ...buckets.bucket import Bucket, Row


class FlatState:
    """For each bucket and kind of state one tensor, laid out as the rank's shard.

    The optimizer's register stays the only place where a row's state is looked for: what it has there, from a checkpoint or
    from the optimizer's own step, is moved here when the row is next stepped, and what it has not starts at 0.
    """

    def __init__(self):
        self._flats: dict[Bucket, dict[str, torch.Tensor]] = {}

    def of(self, bucket: Bucket, name: str) -> torch.Tensor:
        """(shard_numel,) of the master dtype. Undefined where no row has been made ready."""
        flats = self._flats.setdefault(bucket, {})
        if name not in flats:
            flats[name] = bucket.tier.empty(bucket.layout.shard_numel, bucket.precision.master)
        return flats[name]

    def make_ready(self, row: Row, name: str, state: dict[str, Any]) -> bool:
        """Makes `state[name]`, the row's in the register, a view of the flat tensor; returns whether it had values."""
        view, value = row.of(self.of(row.slot.bucket, name)), state.get(name)
        if value is None:
            view.zero_()
        elif value.data_ptr() != view.data_ptr():
            view.copy_(value)
        state[name] = view
        return value is not None

    def forget(self, bucket: Bucket) -> None:
        """Leaves the memory to the views that are still in the register."""
        self._flats.pop(bucket, None)
