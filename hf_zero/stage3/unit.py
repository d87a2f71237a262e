"""A unit of stage 3: a layer whose parameters are gathered and dropped together."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cached_property, partial
from itertools import accumulate
from operator import attrgetter
from typing import cast

import torch

from ..arithmetic.checksums import checksum
from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.memory import GatheredMemory
from ..buckets.sharded import all_are_hidden
from ..comm.transport import Handle
from ..hooks.guards import look_only
from ..step.collectives import Gather

# ---- Edits of whole parameters in a forward through `.data`, which would not reach the shards ----

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


# ---- Units of stage 3: parameters unsharded and resharded together ----

_VERSION = attrgetter("_version")


class UnitState(Enum):
    """SHARDED: a rank stores only its shard. UNSHARDING: gathers are running. UNSHARDED: parameters are whole."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class Unit:
    """Parameters unsharded at the same time: of one layer, of a few layers, or all parameters outside of layers.

    Attributes:
        name: name of the first layer's module; "root" for parameters outside of layers.
        modules: names of the layers' modules.
        buckets: the buckets of the parameters.
        memories: the buckets' memories, which are gathered and dropped.
        is_fetched: whether some of the memories are offloaded, and are fetched before a gather.
        gather: the last gather of the parameters.
        unseen: detects edits that autograd does not count.
        state: changes from SHARDED to UNSHARDING, UNSHARDED, and back to SHARDED, in no other order.
        is_sharded: whether the state is SHARDED.
        not_sharded: all units of the schedule whose state is not SHARDED, shared by all units.
        holds: number of users that prevent a reshard.
        followers: called after each change between whole and sharded.
    """

    def __init__(self, modules: Sequence[str], buckets: Sequence[Bucket]):
        self.modules = tuple(modules)
        self.name = self.modules[0] if self.modules else "root"
        self.buckets = list(buckets)
        self.memories = {bucket: cast(GatheredMemory, bucket.memory) for bucket in self.buckets}
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self.is_fetched = any(memory.is_fetched for memory in self.memories.values())
        self.state = UnitState.SHARDED
        self.is_sharded = True
        self.not_sharded: dict[Unit, None] = {}
        self.holds = 0
        self.followers: list[Callable[[], None]] = []
        self.gather: Gather | None = None
        self._handles: list[Handle] = []
        self._parameters = [slot.parameter for slot in self.slots]
        ends = list(accumulate(len(bucket.slots) for bucket in self.buckets))
        self._part_of = {bucket: slice(end - len(bucket.slots), end) for bucket, end in zip(self.buckets, ends)}
        self._versions = list(map(_VERSION, self._parameters))
        self.unseen = UnseenEdits()
        self._set_data = [
            partial(memory.set_all_data, bucket.parameters, bucket.views) for bucket, memory in self.memories.items()
        ]

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value})"

    @cached_property
    def passing_bytes(self) -> int:
        """Bytes of the whole parameters in addition to the shard."""
        return sum(memory.passing_bytes for memory in self.memories.values())

    @property
    def exact_bytes(self) -> int:
        """Bytes of the whole, exact parameters in addition to the shard."""
        return sum(memory.exact_bytes for memory in self.memories.values())

    def start_fetch(self) -> None:
        """Starts to fetch an offloaded shard into the gather's memory."""
        for memory in self.memories.values():
            memory.start_fetch()

    def forget_fetch(self) -> None:
        """Drops a fetched shard without a gather."""
        for memory in self.memories.values():
            memory.forget_fetch()

    def start_unshard(self, gather: Gather) -> None:
        """SHARDED → UNSHARDING: starts the all-gathers."""
        if not self.is_sharded:
            raise self._misplaced(UnitState.SHARDED)
        # Before the gather writes, because it would overwrite an edit of the sharded parameter without notice.
        self._refuse_edits()
        self.state, self.is_sharded = UnitState.UNSHARDING, False
        self.not_sharded[self] = None
        self.gather = gather
        for bucket, memory in self.memories.items():
            self._handles.append(memory.gather(partial(gather.start, bucket), exactly=gather.is_exact))

    def finish_unshard(self) -> None:
        """UNSHARDING → UNSHARDED: waits for the all-gathers and makes the parameters whole."""
        if self.state is not UnitState.UNSHARDING:
            raise self._misplaced(UnitState.UNSHARDING)
        if self.is_fetched:
            for memory in self.memories.values():
                memory.arrive()
        while self._handles:
            self._handles.pop(0).finish()
        self.state = UnitState.UNSHARDED
        self._hang_parameters()
        if self.unseen.watches:
            self.unseen.begin(self.buckets)

    def reshard(self, *, keeps: bool = False) -> None:
        """UNSHARDED → SHARDED: copies a forward's edits into the shard, then frees everything but the shard.

        Args:
            keeps: leaves the parameters whole on this rank, until they are gathered again or `let_go` is called.

        Raises:
            RuntimeError: an edit cannot be copied into the shard.
        """
        if self.state is not UnitState.UNSHARDED:
            raise self._misplaced(UnitState.UNSHARDED)
        if list(map(_VERSION, self._parameters)) != self._versions:
            # Copies all values into the shard, including uncounted edits. No edit is lost then.
            self._take_in_edits()
        elif self.unseen.watches:
            self.unseen.refuse(self.buckets)
        self.state, self.is_sharded = UnitState.SHARDED, True
        del self.not_sharded[self]
        if keeps:
            for bucket, memory in self.memories.items():
                memory.stay()
                memory.set_all_data(bucket.parameters, bucket.views)
        else:
            self.let_go()

    def let_go(self) -> None:
        """SHARDED: frees the parameters kept by `reshard`."""
        for memory in self.memories.values():
            memory.drop()
        self._hang_parameters()

    def keep_edits(self) -> None:
        """Copies a script's edits of the whole parameters into the shard."""
        if self.state is not UnitState.UNSHARDED:
            raise AssertionError(f"hf_zero: edits of {self!r}, which is not whole")
        for memory in self.memories.values():
            memory.keep_edits()
        self.forget_edits()

    def forget_edits(self) -> None:
        """Ignores a script's edits of the whole parameters so far."""
        with look_only():
            self._versions = list(map(_VERSION, self._parameters))

    def count_edit(self, slot: ParameterSlot) -> None:
        """Increases a parameter's version after an edit of the shard, for autograd and for the master, which follows versions."""
        with look_only():
            torch.autograd.graph.increment_version(slot.parameter)
        self.forget_edits()

    def follow_step(self, bucket: Bucket, stepped: Sequence[ParameterSlot]) -> None:
        """Records a step's writes in the known versions, so that they do not count as the script's edits."""
        part, versions = self._part_of[bucket], self._versions
        if len(stepped) == len(bucket.slots):
            # The loop runs in C, because this is called for each bucket in each step.
            versions[part] = map((1).__add__, versions[part])
            return
        for slot in stepped:
            versions[part.start + slot.number] += 1

    def store(self, slot: ParameterSlot, *, written: bool) -> None:
        """If `written`, stores this rank's part of the whole value in a sharded unit's parameter; then restores its data."""
        bucket = slot.bucket
        if written:
            bucket.memory.store(slot.view, slot.interval, slot.parameter.detach())
            # Marks the parameter as edited, for the master to follow.
            slot.version = -1
        self.set_data(slot)
        self._versions = list(map(_VERSION, self._parameters))

    def set_data(self, slot: ParameterSlot) -> None:
        """Sets a parameter's data to its data in the present state."""
        slot.bucket.memory.set_data(slot.parameter, slot.view)

    def _misplaced(self, expected: UnitState) -> AssertionError:
        return AssertionError(
            f"hf_zero: bug: {self!r} should be {expected.value} here. Open an issue with this traceback."
        )

    def _hang_parameters(self) -> None:
        for set_data in self._set_data:
            set_data()
        for follow in self.followers:
            follow()

    def _take_in_edits(self) -> None:
        before = dict(zip(self._parameters, self._versions))
        for bucket, memory in self.memories.items():
            if not cast(Gather, self.gather).takes_edits or memory.is_rounded:
                for slot in bucket.slots:
                    if slot.parameter._version != before[slot.parameter]:
                        raise rounded_edit(slot.name)
        self.keep_edits()

    def _refuse_edits(self) -> None:
        for bucket, memory in self.memories.items():
            if memory.was_written():
                raise _lost_edit(bucket.slots[0].name)
        with look_only():
            unchanged = list(map(_VERSION, self._parameters)) == self._versions
            # Fast path, for each gather, with possible false negatives. Then fall through to the exact check.
            if unchanged and (all_are_hidden(self._parameters) or all(bucket.holds_all for bucket in self.buckets)):
                return
            for slot, version in zip(self.slots, self._versions):
                held = slot.bucket.memory.is_view(slot.parameter, slot.view)
                if slot.parameter._version != version or not held:
                    raise _lost_edit(slot.name)


def _lost_edit(name: str) -> RuntimeError:
    return RuntimeError(
        f"hf_zero: {name!r} was edited in place while it was sharded, and the edit is lost. Edit it on all ranks inside "
        "`with hf_zero.gathered(model, writeback=True):`, or before accelerator.prepare."
    )


# ---- torch.func over a model at stage 3 ----

TRANSFORMED = (
    "hf_zero: torch.func of a model at stage 3 cannot be trained through. For values, call it inside `with torch.no_grad(), "
    "hf_zero.gathered(model):`; to train, use torch.autograd.grad(..., create_graph=True) or `stage: 2`."
)


_transforms = torch._C._functorch.get_interpreter_stack


def is_transformed() -> bool:
    """Whether a transform of torch.func is running, which works only on whole parameters."""
    return bool(_transforms())


def runs_transformed(unit: Unit, *, is_watched: bool, refuses: bool) -> bool:
    """Whether torch.func runs a forward over a unit that stays whole. Then the hooks have nothing to do.

    Args:
        is_watched: whether this is inside `gathered_again`.
        refuses: False after a forward, which was checked before it ran.

    Raises:
        RuntimeError: the unit would have to be gathered for the forward, or gathered again in the backward.
    """
    stack = _transforms()
    if not stack:
        return False
    is_whole = unit.holds > 0 or not unit.slots
    if is_whole and not (is_watched and torch.is_grad_enabled()):
        return True
    if not torch.is_grad_enabled() and all(each.key() == torch._C._functorch.TransformType.Vmap for each in stack):
        # Gathered parameters have no vmap dimension, so vmap alone can run the hooks.
        return False
    if refuses:
        raise RuntimeError(TRANSFORMED)
    return True
