"""Checks whether the ranks' copies of the same parameters and optimizer state have the same values.

Copies are: whole parameters below stage 3, including frozen ones; and the shards and optimizer state of the ranks of a
replicate group, which at stage 0 contains all ranks. Copies diverge if a bit flips in memory, if only one rank edits its copy,
or if sums are computed in different orders.

[Note: values that nothing writes between two updates]
Between two updates, an owner's shard, master weights and optimizer state have no second copy. The engine does not write to
them either, unless a script edits or loads values. So a rank's checksum after an update must equal its checksum before the
next update. Edits and loads are detected by torch's version counters and `OptimizerStorage.loads`. Below stage 3 a script may
edit whole parameters without a trace (`p.data`), so the owner's checksum is compared earlier: with the checksum taken when the
parameters have arrived, before the script can access them.

[Note: writes that only one rank has made]
A script runs on every rank, so an edit of a parameter's optimizer state is counted on every rank that owns a part of the
parameter. If one owner has counted a write and another has not, the state was edited only in part, and the ranks report this.
A parameter with a single owner has no second rank to compare with. There, only the change of a single bit is reported, and
only if no rank has written to any other state since the update, because an edit by a script changes more. Master weights and
parameters are excluded, because the engine writes to them after edits that change only some ranks' parts.

[Note: differences hidden by an update]
An update overwrites copies: below stage 3 the owner sends new values, and in optimizer state a small difference is rounded
away in a mean. So each rank notes checksums of its copies before every update, and of the values it owns after every update.
The notes of several steps are compared at once. If ranks differ, the faulty rank is the one whose copy does not match its
owner's values.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import nn

from ..arithmetic.checksums import ONE_BIT, WRAPS, checksum
from ..buckets.bucket import Bucket, ParameterSlot
from ..buckets.clipped_gradient import ClippedGradient
from ..buckets.memory import UnshardedMemory
from ..buckets.rows import MASTER
from ..comm.transport import Transport
from ..comm.wire_sums import WireSums
from ..presence.arrivals import in_words
from .storage import OptimizerStorage

_LISTED = 8
_WEIGHTS = ""
_GRADIENT, _GATHERED = "reduced gradient", "gathered copy"
"""Kinds of values compared only if the next step compares copies, because they exist for less than a step."""
_LOADS = 0
"""Index of `OptimizerStorage.loads` in `_Own.writes`."""


class ReplicasDivergedError(RuntimeError):
    """Ranks hold different values of the same parameters or of their optimizer state, or an owner's values have changed."""


class _Copy(NamedTuple):
    """A kind of copy held by several ranks.

    Attributes:
        part: the ranks that hold the same part of the model.
        shard: number of the copied shard; -1 for a whole parameter.
        name: the parameter's name.
        kind: the optimizer's name for its state; "" for the parameter itself, "master" for its master weights.
    """

    part: tuple[int, ...]
    shard: int
    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.name!r}" if self.kind else repr(self.name)

    @property
    def is_state(self) -> bool:
        return self.kind not in (_WEIGHTS, MASTER, _GRADIENT, _GATHERED)


class _Effect(Enum):
    """The effect of writes since the last update on a value. `SAME`: writes were counted, but changed nothing."""

    UNWRITTEN = 0
    SAME = 1
    CHANGED = 2
    ONE_BIT = 3


_Effects = dict[tuple[int, str, str], _Effect]
"""Keys: the first rank that holds this part of the model, the parameter's name, and the kind of state."""


_Sum = TypeVar("_Sum", torch.Tensor, int)
"""A checksum, as a tensor on its device or as an int on the host."""

_Key = TypeVar("_Key")


@dataclass(kw_only=True)
class _Note(Generic[_Sum]):
    """Checksums of copies before an update, and of their owners' values after the previous update.

    Attributes:
        since, step: the updates after which the copies were checked last, and are checked now.
        held: this rank's copies.
        owned: the owners' values, by shard for parameters held whole; None if no update was seen.
        left, found: this rank's own values after the last update and now, if no write was counted in between.
        written: change of the checksum of each optimizer state with a counted write.
        scalars: the keys of `written` with one element.
    """

    since: int
    step: int
    held: dict[_Copy, _Sum]
    owned: dict[_Copy, _Sum] | None
    left: dict[_Copy, _Sum] = field(default_factory=dict)
    found: dict[_Copy, _Sum] = field(default_factory=dict)
    written: dict[_Copy, _Sum] = field(default_factory=dict)
    scalars: frozenset[_Copy] = frozenset()

    def read(self: "_Note[torch.Tensor]") -> "_Note[int]":
        sums = {kind: _read(getattr(self, kind)) for kind in ("held", "left", "found", "written")}
        owned = None if self.owned is None else _read(self.owned)
        return _Note(since=self.since, step=self.step, owned=owned, scalars=self.scalars, **sums)

    def effects(self: "_Note[int]") -> "_Effects":
        """Returns the effect of writes on each optimizer state of this rank since the last update."""
        effects: _Effects = {_key(copy): _Effect.UNWRITTEN for copy in self.left if copy.is_state}
        for copy, change in self.written.items():
            is_one_bit = change in ONE_BIT and copy not in self.scalars
            effects[_key(copy)] = _Effect.ONE_BIT if is_one_bit else _Effect.CHANGED if change else _Effect.SAME
        return effects


_Sums = dict[_Copy, torch.Tensor]


class _Own(NamedTuple):
    """A value written only by this rank.

    Attributes:
        copy: names the value.
        values: the value itself.
        writes: changes with each write that leaves a trace; None if the value is not compared.
    """

    copy: _Copy
    values: torch.Tensor
    writes: tuple[int, ...] | None


class _Mark(NamedTuple):
    """The checksum of an own value, its `_Own.writes` and number of elements."""

    sum: torch.Tensor
    writes: tuple[int, ...] | None
    numel: int


_Noted = dict[_Copy, _Mark]


class _Change(NamedTuple):
    """A rank's first own value changed between two updates."""

    rank: int
    copy: _Copy
    since: int
    step: int


@dataclass
class _Findings:
    """A differing copy: the note, each rank's checksum, and the ranks whose copy differs from its owner's."""

    copy: _Copy
    note: _Note[int]
    values: dict[int, int]
    at_fault: list[int] = field(default_factory=list)


class ReplicaCheck:
    """Notes checksums at each step, and compares them between ranks every few steps; see [Note: differences hidden by an update].

    Args:
        every: steps between two comparisons.
        buckets: all buckets of the model.
        frozen: the parameters outside of all buckets, by name.
        storage: stores the optimizer state.
        transport: the collectives of the ranks that step together.
        rank: this rank.
        copies_of: returns the ranks with the same part of a parameter, and the number of this rank's shard of this part.
        has_copies: whether other ranks also hold this rank's shards and optimizer state.
        weights_in_files: whether stage 3 shards are in files, which have their own checksums.
    """

    def __init__(
        self,
        every: int,
        buckets: Sequence[Bucket],
        frozen: Iterable[tuple[str, nn.Parameter]],
        storage: OptimizerStorage,
        transport: Transport,
        rank: int,
        copies_of: Callable[[nn.Parameter], tuple[tuple[int, ...], int]],
        *,
        has_copies: bool,
        weights_in_files: bool,
    ):
        self._every = every
        self._untrained = [bucket for bucket in buckets if not bucket.trained]
        self._frozen = list(frozen)
        self._storage = storage
        self._transport = transport
        self._rank = rank
        self._copies_of = copies_of
        self._has_copies = has_copies
        self._weights_in_files = weights_in_files
        self._wire = WireSums()
        # Checksums of the reduced gradients, as left by the last pass or clip.
        self._gradients: _Noted = {}
        self._notes: list[_Note[torch.Tensor]] = []
        # Both dicts have the optimizer of the last update as a key.
        self._owned: dict[torch.optim.Optimizer, _Sums] = {}
        self._left: dict[torch.optim.Optimizer, _Noted] = {}
        # Checksums of each bucket: `_sent` from the update until the arrival, `_arrived` from there until the next update.
        self._sent: dict[Bucket, _Noted] = {}
        self._arrived: dict[Bucket, tuple[_Sums, _Sums]] = {}
        self._owned_frozen = self._untouched()
        self._left_frozen = _noted(self._own_shards(self._untrained))
        self._compared = 0

    @torch.no_grad()
    def before_update(self, step: int, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Notes this rank's copies of an optimizer's buckets, after their gathers have finished.

        Args:
            step: number of updates made by the run.
            optimizer: the optimizer about to step.
            buckets: the optimizer's buckets.
        """
        self.compare_gradients(step, buckets)
        own = _noted(self._own_values(optimizer, buckets))
        before = self._left.get(optimizer, {})
        left, found = _unwritten(before, own)
        written = _written(before, own)
        note = _Note(
            since=step,
            step=step,
            held=self._held(buckets, own),
            owned=self._owned.get(optimizer),
            left=left,
            found=found,
            written=written,
            scalars=frozenset(copy for copy in written if own[copy].numel == 1),
        )
        for sent, arrived in (self._arrived.pop(bucket) for bucket in buckets if bucket in self._arrived):
            note.left |= sent
            note.found |= arrived
        self._notes.append(note)

    @torch.no_grad()
    def after_update(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Notes this rank's own values before the ranks send theirs. The first call notes the initial values."""
        self._left[optimizer] = own = _noted(self._own_values(optimizer, buckets))
        whole = [bucket for bucket in buckets if isinstance(bucket.memory, UnshardedMemory)]
        parts = {bucket: _noted(self._parts_sent(bucket)) for bucket in whole}
        if optimizer in self._owned:
            # Only after a first update, because nothing is sent at the start. Quantized blocks lose digits of their owner's
            # values, so only exact buckets are compared.
            exact = (bucket for bucket in whole if bucket.layout.shards > 1 and bucket.precision.weights is None)
            self._sent |= {bucket: parts[bucket] for bucket in exact}
        sums = {copy: mark.sum for noted in parts.values() for copy, mark in noted.items()}
        self._owned[optimizer] = sums | self._shared(own)

    @torch.no_grad()
    def arrived(self, bucket: Bucket) -> None:
        """Notes this rank's part of a bucket after its gather, before the script can read or edit the parameters."""
        sent = self._sent.pop(bucket, None)
        # None: sent after an edit or a load instead of an update.
        if sent is not None:
            self._arrived[bucket] = _unwritten(sent, _noted(self._parts_sent(bucket)))

    def is_due(self, step: int) -> bool:
        """Whether copies are compared before the update of this step."""
        return step % self._every == 0

    def watch(self, step: int) -> None:
        """Starts checksums of sent messages if copies are compared before the update of this step."""
        self._transport.wire = self._wire if self.is_due(step) else None
        self._gradients.clear()

    @property
    def watches(self) -> bool:
        """Whether copies are compared before the next update. Values that exist for less than a step are noted only then."""
        return self._transport.wire is not None

    @torch.no_grad()
    def note_gradients(self, buckets: Iterable[Bucket]) -> None:
        """Notes this rank's reduced gradients after a pass or a clip. From now on only the script may write to them."""
        if self.watches:
            self._gradients = _noted(self._own_gradients(buckets))

    @torch.no_grad()
    def compare_gradients(self, step: int, buckets: Iterable[Bucket]) -> None:
        """Compares this rank's reduced gradients with the note, before a clip or an update.

        Args:
            step: number of updates made by the run.
            buckets: the buckets of the gradients.
        """
        if self.watches:
            own = _noted(self._own_gradients(buckets))
            left, found = _unwritten(self._gradients, own)
            held = self._shared(own)
            self._notes.append(_Note(since=step, step=step, held=held, owned=None, left=left, found=found))

    @torch.no_grad()
    def compare(self, step: int, gathered: Iterable[tuple[Sequence[ParameterSlot], torch.Tensor]] = ()) -> None:
        """Compares all notes: one exchange of a digest per shard. Collective; raises the same error on all ranks.

        Args:
            step: the step about to be made.
            gathered: the parameters that were whole in a pass, and whether each has changed during the pass, (n,) bool.

        Raises:
            ReplicasDivergedError: copies differ, or own values have changed without a write.
        """
        held, own = self._untouched(), _noted(self._own_shards(self._untrained))
        left, found = _unwritten(self._left_frozen, own)
        for slots, has_changed in gathered:
            for slot, changed in zip(slots, has_changed.long()):
                copy = self._copy_of(slot, _GATHERED)
                left[copy], found[copy] = torch.zeros_like(changed), found.get(copy, 0) + changed
        self._notes.append(
            _Note(since=self._compared, step=step - 1, held=held, owned=self._owned_frozen, left=left, found=found)
        )
        self._owned_frozen, self._left_frozen, self._compared = held, own, step - 1
        # Read here instead of at each step, because a read waits for the device.
        notes = [note.read() for note in self._notes]
        self._notes.clear()
        has_written = any(note.written for note in notes)
        differences = self._wire.read()
        sent = sum(differences.values()) if self._wire.is_complete else None
        everyone = self._transport.exchange(
            (_digests(notes), _first_change(self._rank, notes), has_written, sent), "comparison of replicas"
        )
        digests = [theirs for theirs, *_ in everyone]
        if any(len({theirs[group] for theirs in digests if group in theirs}) > 1 for group in set().union(*digests)):
            # A second collective is safe, because all ranks have compared the same digests and reach this line together.
            of_ranks = dict(self._transport.exchange((self._rank, notes), "comparison of replicas"))
            self._refuse(_first_difference(of_ranks), step)
        changes = [change for _, change, *_ in everyone if change is not None]
        if changes:
            _refuse_change(min(changes, key=lambda change: (change.step, change.rank)))
        self._compare_wire([theirs for *_, theirs in everyone], differences, step)
        if any(written for _, _, written, _ in everyone):
            effects = self._transport.exchange((self._rank, [note.effects() for note in notes]), "comparison of writes")
            _refuse_lone_writes(dict(effects), notes)

    def _compare_wire(self, sums: Sequence[int | None], differences: dict[str, int], step: int) -> None:
        """Compares checksums of sent and received messages; see [Note: one number for all messages].

        Args:
            sums: each rank's sum of differences; None if the rank still has collectives under way, which the next comparison
                includes.
            differences: this rank's differences by kind of message.
            step: the step about to be made.
        """
        if None in sums:
            return
        self._wire.forget()
        if not sum(filter(None, sums)) % WRAPS:
            return
        of_ranks = self._transport.exchange(differences, "comparison of sent messages")
        kinds = sorted(set().union(*of_ranks))
        changed = [words for words in kinds if sum(theirs.get(words, 0) for theirs in of_ranks) % WRAPS]
        raise ReplicasDivergedError(
            f"hf_zero: by step {step}, ranks received different values than other ranks sent: {', '.join(changed[:_LISTED])}. "
            "The network or the memory of a rank is faulty. Resume from an earlier checkpoint; see docs/troubleshooting.md."
        )

    # ---- the values of this rank ----

    def _untouched(self) -> _Sums:
        """Returns checksums of the tensors never written by an update."""
        whole = [(self._copy(p, name, -1), p.data) for name, p in self._frozen]
        return _sums([*whole, *self._weights(self._untrained)])

    def _weights(self, buckets: Sequence[Bucket]) -> Iterator[tuple[_Copy, torch.Tensor]]:
        """Yields this rank's parameters: whole ones, and its part of sharded ones if other ranks hold the same part."""
        for bucket in buckets:
            if isinstance(bucket.memory, UnshardedMemory):
                yield from self._whole(bucket)
            elif self._has_copies:
                yield from self._parts_of(bucket, bucket.memory.read_own())

    def _whole(self, bucket: Bucket) -> Iterator[tuple[_Copy, torch.Tensor]]:
        for slot in bucket.slots:
            yield self._copy(slot.parameter, slot.name, -1), slot.view_of(bucket.flat)

    def _held(self, buckets: Sequence[Bucket], own: _Noted) -> _Sums:
        whole = (bucket for bucket in buckets if isinstance(bucket.memory, UnshardedMemory))
        return _sums(each for bucket in whole for each in self._whole(bucket)) | self._shared(own)

    def _shared(self, own: _Noted) -> _Sums:
        """Returns the checksums of this rank's own values that other ranks hold too."""
        return {copy: mark.sum for copy, mark in own.items()} if self._has_copies else {}

    def _own_values(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> Iterator[_Own]:
        yield from self._own_shards(buckets)
        yield from self._state(optimizer, buckets)

    def _own_shards(self, buckets: Sequence[Bucket]) -> Iterator[_Own]:
        """Yields this rank's part of each sharded parameter. Parts in files are read only if other ranks hold copies."""
        for bucket in buckets:
            if isinstance(bucket.memory, UnshardedMemory) or (self._weights_in_files and not self._has_copies):
                continue
            values = bucket.memory.read_own()
            for slot, part in bucket.own_parts.items():
                own = values[part.in_shard.start : part.in_shard.stop]
                counted = (slot.parameter, own) if slot.row is None else (slot.parameter, own, slot.row.tensor)
                writes = None if self._weights_in_files else self._writes(*counted)
                yield _Own(self._copy_of(slot), own, writes)

    def _own_gradients(self, buckets: Iterable[Bucket]) -> Iterator[_Own]:
        for row in (row for bucket in buckets for row in bucket.rows):
            gradient = row.tensor.grad
            if gradient is not None:
                # Not `gradient` itself: a read would multiply by the clip coefficient, which a kernel later does for free.
                values = gradient.plain if isinstance(gradient, ClippedGradient) else gradient.detach()
                yield _Own(
                    self._copy_of(row.slot, _GRADIENT), values, (gradient._version, id(gradient), values.data_ptr())
                )

    def _writes(self, *tensors: torch.Tensor) -> tuple[int, ...]:
        return (self._storage.loads, *(tensor._version for tensor in tensors))

    def _parts_sent(self, bucket: Bucket) -> Iterator[_Own]:
        """Yields this rank's part of each parameter of a bucket whose parameters are whole on all ranks."""
        for part, slot in zip(self._parts_of(bucket, bucket.memory.read_own()), bucket.own_parts):
            yield _Own(*part, self._writes(*(() if slot.row is None else (slot.row.tensor,))))

    def _parts_of(self, bucket: Bucket, own: torch.Tensor) -> Iterator[tuple[_Copy, torch.Tensor]]:
        for slot, part in bucket.own_parts.items():
            yield self._copy_of(slot), own[part.in_shard.start : part.in_shard.stop]

    def _state(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> Iterator[_Own]:
        """Yields master weights and optimizer state in memory."""
        # Skip state in files, because each step would read the files.
        if self._storage.is_in_files:
            return
        for row in (row for bucket in buckets for row in bucket.rows):
            if row.slot.bucket.keeps_master and not row.slot.bucket.memory.is_master:
                master = self._storage.master_view(row).detach()
                yield _Own(
                    self._copy_of(row.slot, MASTER), master, self._writes(row.tensor, master, row.slot.bucket.master)
                )
            for kind, value in optimizer.state.get(row.tensor, {}).items():
                if not torch.is_tensor(value):
                    continue
                is_elementwise = value.dim() > 0 and value.shape == row.tensor.shape
                values = self._storage.view(row, kind, value).detach() if is_elementwise else value
                # Includes the id, because a script may replace the tensor.
                yield _Own(self._copy_of(row.slot, kind), values, (*self._writes(value), id(value)))

    def _copy(self, parameter: nn.Parameter, name: str, shard: int, kind: str = _WEIGHTS) -> _Copy:
        return _Copy(self._copies_of(parameter)[0], shard, name, kind)

    def _copy_of(self, slot: ParameterSlot, kind: str = _WEIGHTS) -> _Copy:
        """Returns the key of this rank's shard of a slot."""
        return self._copy(slot.parameter, slot.name, self._copies_of(slot.parameter)[1], kind)

    def _refuse(self, found: _Findings, step: int) -> None:
        alike: dict[int, list[int]] = {}
        for rank, value in found.values.items():
            alike.setdefault(value, []).append(rank)
        listed = "; ".join(
            in_words(ranks, _LISTED) for ranks in sorted(alike.values(), key=len, reverse=True)[:_LISTED]
        )
        when = f"between the updates of steps {found.note.since} and {found.note.step + 1}"
        culprits = f" The copy of {in_words(found.at_fault, _LISTED)} has changed by itself." if found.at_fault else ""
        raise ReplicasDivergedError(
            f"hf_zero: the ranks' copies of the parameters have diverged by step {step}: the first that differs is "
            f"{found.copy}, {when}.{culprits} Ranks with the same values: {listed}. Resume from an earlier checkpoint; "
            "see docs/troubleshooting.md."
        )


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns the checksum of each tensor by its name, with one transfer per device."""
    return _read({name: checksum(values) for name, values in tensors.items()})


def _noted(own: Iterable[_Own]) -> _Noted:
    return {copy: _Mark(checksum(values), writes, values.numel()) for copy, values, writes in own}


def _unwritten(left: _Noted, found: _Noted) -> tuple[_Sums, _Sums]:
    """Returns the checksums then and now of the values without a counted write in between."""
    same = [
        copy
        for copy, mark in found.items()
        if copy in left and mark.writes is not None and left[copy].writes == mark.writes
    ]
    return {copy: left[copy].sum for copy in same}, {copy: found[copy].sum for copy in same}


def _written(left: _Noted, found: _Noted) -> _Sums:
    """Returns the change of each optimizer state written to by a script, excluding loaded state."""
    written = {}
    for copy in found.keys() & left.keys():
        before, now = left[copy].writes, found[copy].writes
        if before is None or now is None or now == before or now[_LOADS] != before[_LOADS]:
            continue
        if copy.is_state:
            written[copy] = found[copy].sum - left[copy].sum
    return written


def _key(copy: _Copy) -> tuple[int, str, str]:
    return copy.part[0], copy.name, copy.kind


def _first_change(rank: int, notes: Sequence[_Note[int]]) -> _Change | None:
    for note in notes:
        for copy, value in note.left.items():
            if note.found[copy] != value:
                return _Change(rank, copy, note.since, note.step)
    return None


def _refuse_change(change: _Change) -> None:
    raise ReplicasDivergedError(
        f"hf_zero: {change.copy} has changed by itself on rank {change.rank}, between the updates of steps {change.since} and "
        f"{change.step + 1}: its memory is faulty, or a script wrote through `.data`. Resume from an earlier checkpoint; see "
        "docs/troubleshooting.md."
    )


def _refuse_lone_writes(of_ranks: Mapping[int, Sequence[_Effects]], notes: Sequence[_Note[int]]) -> None:
    """Raises for writes on only some ranks; see [Note: writes that only one rank has made]."""
    for number, note in enumerate(notes):
        by_effect: dict[tuple[int, str, str], dict[_Effect, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank in sorted(of_ranks):
            for key, effect in of_ranks[rank][number].items():
                by_effect[key][effect].append(rank)
        writes = [
            (key, effect)
            for key, found in by_effect.items()
            for effect, ranks in found.items()
            if effect is not _Effect.UNWRITTEN
            for _ in ranks
        ]
        for key, effect in sorted(writes, key=lambda write: write[0]):
            _, name, kind = key
            ranks, others = by_effect[key][effect], by_effect[key][_Effect.UNWRITTEN]
            when = f"between the updates of steps {note.since} and {note.step + 1}"
            if others and effect is not _Effect.SAME:
                raise ReplicasDivergedError(
                    f"hf_zero: {kind} of {name!r} was written to on {in_words(ranks, _LISTED)} and not on "
                    f"{in_words(others, _LISTED)}, {when}. Edit it on all ranks, as `optimizer.state[parameter]`. If no script "
                    "did, see docs/troubleshooting.md."
                )
            if effect is _Effect.ONE_BIT and len(writes) == 1:
                raise ReplicasDivergedError(
                    f"hf_zero: one bit of {kind} of {name!r} has changed on rank {ranks[0]}, {when}, and nothing else in the "
                    "optimizer state of any rank. Resume from an earlier checkpoint; see docs/troubleshooting.md."
                )


def _sums(copies: Iterable[tuple[_Copy, torch.Tensor]]) -> _Sums:
    return {copy: checksum(values) for copy, values in copies}


def _read(sums: dict[_Key, torch.Tensor]) -> dict[_Key, int]:
    """Reads checksums with one transfer per device."""
    devices = {value.device for value in sums.values()}
    found: dict[_Key, int] = {}
    for device in devices:
        there = {copy: value for copy, value in sums.items() if value.device == device}
        # Unsigned, because `_at_fault` adds the shards' checksums modulo 2^64 and compares the sum with a whole parameter's
        # checksum.
        found |= zip(there, (value % WRAPS for value in torch.stack(list(there.values())).tolist()))
    return found


def _digests(notes: Sequence[_Note[int]]) -> dict[tuple[tuple[int, ...], int], str]:
    """Returns a digest for each part and shard of the model, from the checksums its ranks share."""
    held: dict[tuple[tuple[int, ...], int], list] = {}
    for number, note in enumerate(notes):
        for copy, value in sorted(note.held.items()):
            held.setdefault(copy[:2], []).append((number, copy, value))
    return {group: hashlib.sha256(repr(values).encode()).hexdigest() for group, values in held.items()}


def _first_difference(of_ranks: Mapping[int, Sequence[_Note[int]]]) -> _Findings:
    """Finds the first differing copy. Ranks make notes at the same moments, so notes with the same index correspond."""
    for notes in zip(*of_ranks.values()):
        here = dict(zip(of_ranks, notes))
        for copy in dict.fromkeys(copy for note in notes for copy in note.held):
            values = {rank: note.held[copy] for rank, note in here.items() if copy in note.held}
            if len(set(values.values())) > 1:
                return _Findings(copy, notes[0], values, _at_fault(copy, values, here))
    raise AssertionError(
        "hf_zero: bug: replicas differ, but all compared values are equal. Open an issue with this traceback."
    )


def _at_fault(copy: _Copy, values: Mapping[int, int], here: Mapping[int, _Note[int]]) -> list[int]:
    """Returns the ranks whose copy differs from its owners' after the last update; empty if in doubt."""
    owned = {
        rank: {
            each.shard: value for each, value in (note.owned or {}).items() if each._replace(shard=copy.shard) == copy
        }
        for rank, note in here.items()
    }
    if copy.shard >= 0:
        expected = {rank: theirs.get(copy.shard) for rank, theirs in owned.items() if rank in values}
    else:
        # Each shard's owners. Replicas already different after the update have diverged before.
        by_shard: dict[int, set[int]] = {}
        for theirs in owned.values():
            for shard, value in theirs.items():
                by_shard.setdefault(shard, set()).add(value)
        if not by_shard or any(len(found) > 1 for found in by_shard.values()):
            return []
        expected = dict.fromkeys(values, sum(min(found) for found in by_shard.values()) % WRAPS)
    at_fault = [rank for rank, value in values.items() if value != expected[rank]]
    # If all copies differ from the owners' note, the note itself may be wrong.
    return [] if len(at_fault) == len(values) else at_fault
