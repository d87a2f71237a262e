"""Edits of parameters without a change of their version counters, which would not reach the masters."""

from collections import Counter
from collections.abc import Iterable
from typing import cast

import torch

from ..buckets.bucket import Bucket, Row
from ..comm.all_or_none import Exchange, raise_on_all
from ..optimizer.storage import OptimizerStorage

_STEPS = 2


class UncountedEdits:
    """Compares parameters with their masters before the first steps. A script with edits through `.data` makes them in each step.

    Args:
        buckets: the trained buckets.
        storage: stores the masters.

    Attributes:
        watched: buckets that are still compared before their next step.
    """

    def __init__(self, buckets: Iterable[Bucket], storage: OptimizerStorage):
        self._storage = storage
        self._steps: Counter[Bucket] = Counter()
        # If parameters are sent in quantized blocks, they differ from their masters.
        exact = (bucket for bucket in buckets if bucket.keeps_master and bucket.precision.weights is None)
        self.watched = {bucket for bucket in exact if not bucket.flat.is_meta}

    def refuse(self, buckets: Iterable[Bucket], exchange: Exchange) -> None:
        """Called before a step of some buckets. Collective if some of the buckets are watched.

        Raises:
            RuntimeError: on all ranks, if one rank has an uncounted edit. If only that rank raised, the others would hang in the
                step.
        """
        watched = self.watched.intersection(buckets)
        if watched:
            raise_on_all(
                exchange, self._find(watched), expected=(RuntimeError,), error=lambda _, told: RuntimeError(told)
            )

    @torch.no_grad()
    def _find(self, watched: Iterable[Bucket]) -> RuntimeError | None:
        """Returns the error for an edit on this rank. The host waits once for each device with masters."""
        compared: dict[torch.device, list[tuple[Row, torch.Tensor]]] = {}
        for bucket in watched:
            self._steps[bucket] += 1
            if self._steps[bucket] == _STEPS:
                self.watched.remove(bucket)
            values = bucket.memory.read_own()
            # Compare on the masters' devices, of which there may be several.
            own = {values.device: values}
            for row in (row for row in bucket.rows if self._waits(row)):
                master = cast(torch.Tensor, self._storage.master_view(row))
                if master.device not in own:
                    own[master.device] = values.to(master.device)
                mine, expected = row.of(own[master.device]), master.to(values.dtype)
                is_alike = ((mine == expected) | (mine.isnan() & expected.isnan())).all()
                compared.setdefault(master.device, []).append((row, is_alike))
        for found in compared.values():
            alike = torch.stack([is_alike for _, is_alike in found]).tolist()
            edited = next((row for (row, _), is_alike in zip(found, alike) if not is_alike), None)
            if edited is not None:
                return RuntimeError(
                    f"hf_zero: {edited.slot.name!r} was edited through `.data` or numpy, which leaves no trace, and "
                    "the optimizer's step would undo it from the master. Edit the parameter itself under "
                    "`torch.no_grad()` (`p.clamp_(...)` in place of `p.data.clamp_(...)`)."
                )
        return None

    @staticmethod
    def _waits(row: Row) -> bool:
        # A class whose step calls its parent's step gets here a second time, after the masters have been stepped.
        return row.tensor.grad is not None and row.slot.version == row.slot.parameter._version
