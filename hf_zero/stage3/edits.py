"""Edits of whole parameters by a script: how they are found, and the errors if shards cannot take them in."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..arithmetic.checksums import checksum
from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.gathered_memory import GatheredMemory

# A script edits a parameter in one of three ways. In place: autograd's version counter of the parameter increases. By new data
# (`p.data = ...`): the parameter is no longer a view of its bucket. Through `.data` or numpy: only the values change.

_PASSES = 4
_OTHERWISE = "or after the optimizer's step, on all ranks, inside `with hf_zero.gathered(model, writeback=True):`."


def written(slots: Iterable[ParameterSlot], versions: Iterable[int]) -> list[ParameterSlot]:
    """Returns the slots whose parameter was written to in place since this version."""
    return [slot for slot, version in zip(slots, versions) if slot.parameter._version != version]


def moved(slots: Iterable[ParameterSlot]) -> list[ParameterSlot]:
    """Returns the slots whose parameter has new data from a script (`p.data = ...`, `p.set_(...)`, `vector_to_parameters`)."""
    # An evaluation in a different dtype gives whole parameters separate memory.
    in_buckets = (slot for slot in slots if getattr(slot.bucket.memory, "read_as", None) is None)
    return [slot for slot in in_buckets if not slot.bucket.is_exact_view(slot)]


def is_cast(slot: ParameterSlot) -> bool:
    """Whether a forward has cast a frozen parameter's data to a different dtype, as bitsandbytes does with biases."""
    parameter, view = slot.parameter, slot.view
    if slot.bucket.trained or parameter.dtype == view.dtype or parameter.shape != view.shape:
        return False
    return torch.equal(parameter.detach(), view.to(parameter.dtype))


class Marks:
    """The versions of parameters at one moment, and which parameters have new data, to find the edits after this moment."""

    def __init__(self, slots: Sequence[ParameterSlot]):
        self._slots = slots
        self._versions = [slot.parameter._version for slot in slots]
        self._moved = moved(slots)

    def edited(self) -> list[ParameterSlot]:
        """Returns the parameters written to in place or given new data since. Edits through `.data` leave no mark."""
        newly_moved = (slot for slot in moved(self._slots) if slot not in self._moved and not is_cast(slot))
        return list(dict.fromkeys([*newly_moved, *written(self._slots, self._versions)]))


class UnseenEdits:
    """Detects a forward's edits through `.data` or by new data, which change no version, before the parameters are dropped.

    A forward that edits its weights does so each time, so only the first passes are checked. Checksums after the gather and
    before the drop are compared. On an accelerator the comparison runs on the device, and the host reads the result before the
    step: see `refuse_unseen_edits`.

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
        # The compared parameters, and their checksums after the gather; None outside of a pass.
        self._gathered: tuple[list[ParameterSlot], torch.Tensor | None] | None = None

    def watch(self, *, is_told: bool) -> None:
        """Sets whether all ranks compare the results of the passes until the next step. Called while the unit is sharded."""
        self._is_told = is_told
        self.watches = is_told or self._passes < _PASSES

    def begin(self, memories: Mapping[Bucket, GatheredMemory]) -> None:
        """Called after the parameters have become whole for a pass."""
        if any(memory.read_as is not None for memory in memories.values()):
            # An evaluation in a different dtype gives parameters separate memory.
            self._gathered = None
            return
        # If the shard is a view of the whole values, an edit is already in the shard. Memory on meta has no values.
        slots = [
            slot
            for bucket, memory in memories.items()
            if (self._is_told or not memory.edits_last) and not bucket.flat.is_meta
            for slot in bucket.slots
        ]
        self._gathered = slots, _checksums(slots) if slots else None

    def leave_to_script(self) -> None:
        """Called when a script gets the whole parameters outside of a pass, where `gathered` handles edits."""
        self._gathered = None

    def refuse(self, slots: Sequence[ParameterSlot]) -> None:
        """Called before the parameters are dropped. Raises RuntimeError for an edit, on an accelerator only for new data."""
        if self._gathered is None:
            return
        (compared, before), self._gathered = self._gathered, None
        self._passes += 1
        self.watches = self._is_told or self._passes < _PASSES
        strays = (slot for slot in slots if not slot.bucket.holds(slot))
        stray = next((slot for slot in strays if not is_cast(slot)), None)
        if stray is not None:
            raise RuntimeError(
                f"hf_zero: a forward has assigned new memory to {stray.name!r} (`p.data = ...`), which is lost when its layer "
                f"is sharded again. Write into the parameter under `torch.no_grad()` (`p.copy_(...)`), {_OTHERWISE}"
            )
        if before is None:
            return
        differ = _checksums(compared).ne(before)
        if self._is_told:
            # Combine the results of all passes into one, because an evaluation has many passes.
            former = self.for_all_ranks
            self.for_all_ranks = (compared, differ if former is None else former[1] | differ)
        else:
            self.compared.append((compared, differ))
        if before.device.type == "cpu":
            refuse_unseen_edits([self])


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
        f"hf_zero: a forward has edited {name!r}, which has a second copy, rounded (`gather_dtype`, `comm.weights`) or kept "
        "for the backward (`comm.secondary_shard`), so the edit would be lost. Remove that setting, or edit the parameter "
        "after the optimizer's step, on all ranks, inside `with hf_zero.gathered(model, writeback=True):`."
    )


def edit_while_sharded(name: str) -> RuntimeError:
    """Returns the error for an edit of a parameter whose values are on other ranks."""
    return RuntimeError(
        f"hf_zero: {name!r} was edited in place while it was sharded, and the edit is lost. Edit it on all ranks inside "
        "`with hf_zero.gathered(model, writeback=True):`, or before accelerator.prepare."
    )


def _checksums(slots: Sequence[ParameterSlot]) -> torch.Tensor:
    """Returns the checksum of each parameter, (n,) int64, n > 0."""
    return torch.stack([checksum(slot.parameter) for slot in slots])
