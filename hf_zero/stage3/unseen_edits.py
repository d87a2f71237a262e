"""Edits of whole parameters inside a forward, which shards cannot take in."""

from collections.abc import Iterable, Sequence
from typing import cast

import torch

from ..arithmetic.checksums import checksum
from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.gathered_memory import GatheredMemory

_PASSES = 4
_OTHERWISE = "or behind the optimizer's step, on all ranks, inside `with hf_zero.gathered(model, writeback=True):`."


class UnseenEdits:
    """Detects edits of gathered parameters through `.data`, by comparing checksums before the drop.

    A forward that edits its weights does so each time, so only the first passes are checked. On an accelerator the comparison
    runs on the device, and the host reads the result before the step: see `refuse_unseen_edits`.

    With `check_replicas_every`, the passes before a comparison of replicas detect corrupted memory in the same way.

    Attributes:
        watches: the next pass is checked: it is one of the first passes, or all ranks compare their results before the next step.
        compared: results that the host has not read, one per pass: the parameters, and whether each differs, (n,) bool.
        for_all_ranks: the combined result of all passes whose results the ranks compare, in the same form.
    """

    def __init__(self) -> None:
        self.watches = True
        self.compared: list[tuple[list[ParameterSlot], torch.Tensor]] = []
        self.for_all_ranks: tuple[list[ParameterSlot], torch.Tensor] | None = None
        self._is_told = False
        self._passes = 0
        self._in_pass = False
        self._slots: list[ParameterSlot] = []
        self._gathered: torch.Tensor | None = None

    def watch(self, *, is_told: bool) -> None:
        """Sets whether all ranks compare the results of the passes until the next step. Called while the unit is sharded."""
        self._is_told = is_told
        self.watches = is_told or self._passes < _PASSES

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Called after the parameters have become whole for a pass."""
        # An evaluation in a different dtype gives parameters separate memory.
        self._in_pass = all(cast(GatheredMemory, bucket.memory).read_as is None for bucket in buckets)
        # If the shard is a view of the whole values, an edit is already in the shard. Memory on meta has no values.
        passing = [
            bucket
            for bucket in buckets
            if (self._is_told or not cast(GatheredMemory, bucket.memory).edits_last) and not bucket.flat.is_meta
        ]
        self._slots = [slot for bucket in passing for slot in bucket.slots]
        self._gathered = _checksums(self._slots) if self._slots else None

    def leave_to_script(self) -> None:
        """Called when a script gets the whole parameters outside of a pass, where `gathered` handles edits."""
        self._in_pass = False

    def refuse(self, buckets: Sequence[Bucket]) -> None:
        """Called before the parameters are dropped. Raises RuntimeError for an edit, on an accelerator only for moved data."""
        if not self._in_pass:
            return
        self._in_pass = False
        self._passes += 1
        self.watches = self._is_told or self._passes < _PASSES
        strays = (slot for bucket in buckets for slot in bucket.slots if not bucket.holds(slot))
        moved = next((slot for slot in strays if not is_cast(slot)), None)
        if moved is not None:
            raise RuntimeError(
                f"hf_zero: a forward has given {moved.name!r} other memory (`p.data = ...`), which is lost when its layer is "
                f"sharded again. Write into the parameter under `torch.no_grad()` (`p.copy_(...)`), {_OTHERWISE}"
            )
        if self._gathered is not None:
            differ = _checksums(self._slots).ne(self._gathered)
            if self._is_told:
                # Combine the results of all passes into one, because an evaluation has many passes.
                former = self.for_all_ranks
                self.for_all_ranks = (self._slots, differ if former is None else former[1] | differ)
            else:
                self.compared.append((self._slots, differ))
            if self._gathered.device.type == "cpu":
                refuse_unseen_edits([self])


def is_cast(slot: ParameterSlot) -> bool:
    """Whether a forward has cast a frozen parameter's data to a different dtype, as bitsandbytes does with biases."""
    parameter, view = slot.parameter, slot.view
    if slot.bucket.trained or parameter.dtype == view.dtype or parameter.shape != view.shape:
        return False
    return torch.equal(parameter.detach(), view.to(parameter.dtype))


def refuse_unseen_edits(units: Iterable[UnseenEdits]) -> None:
    """Raises RuntimeError if a pass has edited a parameter. The host waits for the device once, if a pass was checked."""
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
    """Returns the error for an edit of parameters that are rounded or kept for the backward."""
    return RuntimeError(
        f"hf_zero: a forward has edited {name!r}, of which it has a copy that is rounded (`gather_dtype`, `comm.weights`) or "
        "kept for the backward (`comm.secondary_shard`), and the edit would be lost. Leave that setting out, or edit the "
        "parameter behind the optimizer's step, on all ranks, inside `with hf_zero.gathered(model, writeback=True):`."
    )


def _checksums(slots: Sequence[ParameterSlot]) -> torch.Tensor:
    """Returns the checksum of each parameter, (n,) int64, n > 0."""
    return torch.stack([checksum(slot.parameter) for slot in slots])
