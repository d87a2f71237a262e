"""A unit of stage 3: a layer whose parameters are gathered and dropped together."""

from collections.abc import Sequence
from enum import Enum
from functools import cached_property, partial
from itertools import accumulate
from operator import attrgetter
from typing import cast

import torch

from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.gathered_memory import GatheredMemory
from ..buckets.sharded_parameter import hidden_classes
from ..comm.transport import Handle
from ..hooks.guards import look_only
from ..step.gathers import Gather
from .edits import UnseenEdits, edit_while_sharded, rounded_edit, written
from .forms import Forms

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
        is_sharded, is_unsharding: whether the state is SHARDED or UNSHARDING. Attributes, because each gather reads both.
        not_sharded: all units of the schedule whose state is not SHARDED, shared by all units.
        holds: number of users that prevent a reshard.
        forms: makes the parameters whole and hidden.
    """

    def __init__(self, modules: Sequence[str], buckets: Sequence[Bucket]):
        self.modules = tuple(modules)
        self.name = self.modules[0] if self.modules else "root"
        self.buckets = list(buckets)
        self.memories = {bucket: cast(GatheredMemory, bucket.memory) for bucket in self.buckets}
        self._memories = list(self.memories.values())
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self.is_fetched = any(memory.is_fetched for memory in self.memories.values())
        self.is_sharded, self.is_unsharding = True, False
        self.not_sharded: dict[Unit, None] = {}
        self.holds = 0
        self.forms = Forms(self.memories)
        # Exact values have other memory than rounded ones.
        self._casts = any(memory.casts for memory in self.memories.values())
        self._is_usual = True
        self.gather: Gather | None = None
        self._handles: list[Handle] = []
        # The functions that start a gather of each bucket, made once per form of gathers, and those of the last gather.
        self._starts_of: dict[Gather, list[partial[Handle]]] = {}
        self._starts: list[partial[Handle]] = []
        self._parameters = [slot.parameter for slot in self.slots]
        ends = list(accumulate(len(bucket.slots) for bucket in self.buckets))
        self._part_of = {bucket: slice(end - len(bucket.slots), end) for bucket, end in zip(self.buckets, ends)}
        self._versions = list(map(_VERSION, self._parameters))
        self.unseen = UnseenEdits()

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value})"

    @property
    def state(self) -> UnitState:
        """Changes from SHARDED to UNSHARDING, UNSHARDED, and back to SHARDED, in no other order."""
        if self.is_sharded:
            return UnitState.SHARDED
        return UnitState.UNSHARDING if self.is_unsharding else UnitState.UNSHARDED

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
        self.is_sharded, self.is_unsharding = False, True
        self.not_sharded[self] = None
        if gather is not self.gather:
            self.gather, self._is_usual = gather, not (self._casts and gather.is_exact)
            self._starts = self._starts_of.get(gather) or self._prepare(gather)
        for start in self._starts:
            self._handles.append(start())

    def finish_unshard(self) -> None:
        """UNSHARDING → UNSHARDED: waits for the all-gathers and makes the parameters whole."""
        if not self.is_unsharding:
            raise self._misplaced(UnitState.UNSHARDING)
        if self.is_fetched:
            for memory in self.memories.values():
                memory.arrive()
        while self._handles:
            self._handles.pop(0).finish()
        self.is_unsharding = False
        self.forms.show(is_usual=self._is_usual)
        if self.unseen.watches:
            self.unseen.begin(self.memories)

    def reshard(self, *, keeps: bool = False) -> None:
        """UNSHARDED → SHARDED: copies a forward's edits into the shard, then frees everything but the shard.

        Args:
            keeps: leaves the parameters whole on this rank, until they are gathered again or `free` is called.

        Raises:
            RuntimeError: an edit cannot be copied into the shard.
        """
        if self.is_sharded or self.is_unsharding:
            raise self._misplaced(UnitState.UNSHARDED)
        if list(map(_VERSION, self._parameters)) != self._versions:
            # Copies all values into the shard, including uncounted edits. No edit is lost then.
            self._take_in_edits()
        elif self.unseen.watches:
            self.unseen.refuse(self.slots)
        self.is_sharded = True
        del self.not_sharded[self]
        if keeps:
            for bucket, memory in self.memories.items():
                memory.stay()
                memory.set_all_data(bucket.parameters, bucket.views)
            return
        # As in `free`.
        for memory in self._memories:
            memory.drop()
        self.forms.hide()

    def free(self) -> None:
        """SHARDED: frees the parameters kept by `reshard`."""
        for memory in self._memories:
            memory.drop()
        self.forms.hide()

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
        if stepped is bucket.slots:
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

    def _prepare(self, gather: Gather) -> list[partial[Handle]]:
        starts = self._starts_of[gather] = [
            partial(memory.gather, gather.starter_of(bucket), exactly=gather.is_exact)
            for bucket, memory in self.memories.items()
        ]
        return starts

    def _take_in_edits(self) -> None:
        for slot in written(self.slots, self._versions):
            if not cast(Gather, self.gather).takes_edits or self.memories[slot.bucket].is_rounded:
                raise rounded_edit(slot.name)
        self.keep_edits()

    def _refuse_edits(self) -> None:
        for memory in self._memories:
            if memory.was_written():
                raise edit_while_sharded(next(slot.name for slot in self.slots if slot.bucket.memory is memory))
        parameters = self._parameters
        with look_only():
            # Fast path, for each gather, with possible false negatives. Then fall through to the exact check.
            if list(map(_VERSION, parameters)) == self._versions and hidden_classes.issuperset(map(type, parameters)):
                return
            strays = (slot for slot in self.slots if not slot.bucket.holds(slot))
            for slot in (*written(self.slots, self._versions), *strays):
                raise edit_while_sharded(slot.name)
