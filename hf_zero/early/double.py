"""Copies of a bucket's state, on which its next step is computed."""

from typing import Any

import torch

from ..buckets.bucket import Row
from ..optimizer.bucket_state import (
    BucketState,
)
from .seen import Seen, seen_now, step_on

Stepped = dict[Row, dict[str, Any]]
"""Maps each stepped row to its new entries for `optimizer.state`."""


class Double:
    """Copies of a bucket's master and state for its next step, while training still reads the old ones.

    [Note: two copies of the state]
    An optimizer's step writes in place. An early step writes to copies, so reads of the state, saves and late clipping still find
    the old values. If the script's step would read the same inputs (`Seen.equals`), the copies become the state, and the old
    tensors become the next copies. Otherwise the copies are dropped, and the step is computed again. Both paths result in the
    same bits.

    State in a file is copied to the other side of the file; see [Note: two sides of a file].

    Edits of rows or gradients that do not change torch's version counters (through `.data` or numpy) are not noticed.
    """

    def __init__(self, state: BucketState, optimizer: torch.optim.Optimizer):
        self.state = state
        self.optimizer = optimizer
        if state.shard is not None:
            state.shard.add_side()

    @property
    def may_begin(self) -> bool:
        """Whether a step in `optimizer.step()` would read the stored master."""
        # If the script has edited a parameter, its master differs from the file.
        return self.state.shard is None or not self.state.bucket.edited_rows

    def seen(self) -> Seen:
        """Collects the current inputs of a step."""
        return seen_now(self.state.bucket, self.optimizer).with_marks(*self._marks())

    @torch.no_grad()
    def step(self, seen: Seen, scratch: torch.Tensor, buffer: torch.Tensor | None) -> Stepped:
        """Computes the step described by `seen` on copies. Runs in the step thread, one call after the other.

        Args:
            scratch: (at least shard_numel,) of the master dtype, because some optimizers write to gradients.
            buffer: the contents of the bucket's file; afterwards the contents of the file's other side.
        """
        regions = self.state.regions_in(buffer)
        master = self.state.master.begin_aside(regions)
        begun = self.state.state.begin_aside({row: state for row, _, state in seen.rows}, regions)
        stepped = step_on(self.optimizer, seen, master, begun, scratch)
        self.state.state.end_aside(stepped, regions)
        return stepped

    def commit(self, stepped: Stepped) -> None:
        """Makes the copies the state, and the state the next copies."""
        if self.state.shard is not None:
            self.state.shard.exchange()
        self.state.master.commit_aside()
        self.state.state.exchange_aside()
        for row, state in stepped.items():
            register = self.optimizer.state[row.tensor]
            self.state.state.commit_aside(row, register)
            register.clear()
            register.update(state)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies in memory, before the next step."""
        return self.state.master.aside_bytes + self.state.state.aside_bytes

    def _marks(self) -> tuple[tuple[Any, Any], ...]:
        shard = self.state.shard
        if shard is None:
            return ()
        parameters = ((row.slot.parameter, row.slot.parameter._version) for row in self.state.bucket.rows)
        return ((shard, shard.edition), *parameters)
