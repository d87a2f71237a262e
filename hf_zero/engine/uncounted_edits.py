"""Edits of parameters that their masters would not follow, because autograd does not count them."""

from collections import Counter
from collections.abc import Iterable
from typing import cast

import torch

from ..buckets.bucket import Bucket, Row
from ..optimizer.state.holder import StateHolder

_STEPS = 2


class UncountedEdits:
    """Compares parameters with their masters before the first steps: a script that edits through `.data` does so in each.

    Args:
        buckets: of trained parameters.
        holder: has the masters.

    Attributes:
        watched: buckets of which some of the first steps are still to come.
    """

    def __init__(self, buckets: Iterable[Bucket], holder: StateHolder):
        self._holder = holder
        self._steps: Counter[Bucket] = Counter()
        # Behind a wire of blocks, parameters are not what their masters are.
        exact = (bucket for bucket in buckets if bucket.keeps_master and bucket.precision.weights is None)
        self.watched = {bucket for bucket in exact if not bucket.flat.is_meta}

    @torch.no_grad()
    def refuse(self, buckets: Iterable[Bucket]) -> None:
        """Called before a step of some buckets. Raises RuntimeError for an edit that is not counted.

        For the watched ones, the host waits once for each device that has masters.
        """
        compared: dict[torch.device, list[tuple[Row, torch.Tensor]]] = {}
        for bucket in self.watched.intersection(buckets):
            self._steps[bucket] += 1
            if self._steps[bucket] == _STEPS:
                self.watched.remove(bucket)
            values = bucket.memory.read_own()
            # In the memory of the masters, which may be in several places.
            own = {values.device: values}
            for row in (row for row in bucket.rows if self._waits(row)):
                master = cast(torch.Tensor, self._holder.master_view(row))
                if master.device not in own:
                    own[master.device] = values.to(master.device)
                mine, expected = row.of(own[master.device]), master.to(values.dtype)
                is_alike = ((mine == expected) | (mine.isnan() & expected.isnan())).all()
                compared.setdefault(master.device, []).append((row, is_alike))
        for found in compared.values():
            alike = torch.stack([is_alike for _, is_alike in found]).tolist()
            edited = next((row for (row, _), is_alike in zip(found, alike) if not is_alike), None)
            if edited is not None:
                raise RuntimeError(
                    f"hf_zero: {edited.slot.name!r} was edited through `.data` or numpy, which leaves no trace, and the "
                    "optimizer's step would undo it: it starts from the master, a copy with more digits or in other memory. Edit "
                    "the parameter itself under `torch.no_grad()` (`p.clamp_(...)` in place of `p.data.clamp_(...)`)."
                )

    @staticmethod
    def _waits(row: Row) -> bool:
        # A class whose step calls its parent's comes here a second time, when masters have been stepped.
        return row.tensor.grad is not None and row.slot.version == row.slot.parameter._version
