"""Edits of whole parameters inside a forward, which shards cannot take in."""

from collections.abc import Iterable, Sequence
from typing import cast

import torch

from ...buckets.bucket import Bucket, ParameterSlot
from ...buckets.memory import GatheredMemory
from ...optimizer.state.replicas import checksum

_PASSES = 4
_OTHERWISE = "or behind the optimizer's step, on all ranks, inside `with hf_zero.gathered(model, writeback=True):`."


class UnseenEdits:
    """Compares what has been gathered with what is about to be dropped, for edits that autograd does not count.

    A forward that edits its weights does so each time: the first passes tell, and the others cost nothing. On an accelerator
    they are compared there, and the host reads before the step what has been found: see `refuse_unseen_edits`.

    Attributes:
        watches: some of the first passes are still to come.
        compared: in passes of which nobody has read the result: parameters, and for each of them whether it differs, (n,) bool.
    """

    def __init__(self) -> None:
        self.watches = True
        self.compared: list[tuple[list[ParameterSlot], torch.Tensor]] = []
        self._passes = 0
        self._in_pass = False
        self._slots: list[ParameterSlot] = []
        self._gathered: torch.Tensor | None = None

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Called when the parameters have become whole for a pass."""
        # An evaluation in another dtype gives parameters memory of their own.
        self._in_pass = all(cast(GatheredMemory, bucket.memory).read_as is None for bucket in buckets)
        passing = [
            bucket for bucket in buckets if not (cast(GatheredMemory, bucket.memory).edits_last or bucket.flat.is_meta)
        ]
        self._slots = [slot for bucket in passing for slot in bucket.slots]
        self._gathered = _checksums(self._slots) if self._slots else None

    def leave_to_script(self) -> None:
        """Called when a script is given the whole parameters outside of a pass, which has rules of its own."""
        self._in_pass = False

    def refuse(self, buckets: Sequence[Bucket]) -> None:
        """Called before they are dropped. Raises RuntimeError where one has been edited so, and the host can tell at once."""
        if not self._in_pass:
            return
        self._in_pass = False
        self._passes += 1
        self.watches = self._passes < _PASSES
        moved = next((slot for bucket in buckets for slot in bucket.slots if not bucket.holds(slot)), None)
        if moved is not None:
            raise RuntimeError(
                f"hf_zero: a forward has given {moved.name!r} other memory (`p.data = ...`), which is lost when its layer is "
                f"sharded again. Write into the parameter under `torch.no_grad()` (`p.copy_(...)`), {_OTHERWISE}"
            )
        if self._gathered is not None:
            self.compared.append((self._slots, _checksums(self._slots).ne(self._gathered)))
            if self._gathered.device.type == "cpu":
                refuse_unseen_edits([self])


def refuse_unseen_edits(units: Iterable[UnseenEdits]) -> None:
    """Raises RuntimeError where a pass has edited a parameter. The host waits for the device once, if there was a pass."""
    compared = []
    for unit in units:
        compared += unit.compared
        unit.compared = []
    if compared and torch.cat([differ for _, differ in compared]).any():
        edited = next(slot for slots, differ in compared for slot, differs in zip(slots, differ.tolist()) if differs)
        raise RuntimeError(
            f"hf_zero: a forward has edited {edited.name!r} through `.data` or numpy, which leaves no trace, and the edit is "
            f"lost when its layer is sharded again. Edit the parameter itself under `torch.no_grad()`, {_OTHERWISE}"
        )


def rounded_edit(name: str) -> RuntimeError:
    """The error for an edit of what was gathered with fewer digits than the shards have, or is kept for the backward."""
    return RuntimeError(
        f"hf_zero: a forward has edited {name!r}, of which it has a copy that is rounded (`gather_dtype`, `comm.weights`) or "
        "kept for the backward (`comm.secondary_shard`), and the edit would be lost. Leave that setting out, or edit the "
        "parameter behind the optimizer's step, on all ranks, inside `with hf_zero.gathered(model, writeback=True):`."
    )


def _checksums(slots: Sequence[ParameterSlot]) -> torch.Tensor:
    """Of each parameter, (n,) int64, n > 0."""
    return torch.stack([checksum(slot.parameter) for slot in slots])
