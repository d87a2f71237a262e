"""Checks that ranks which hold copies of the same parameters and optimizer state hold the same values.

Copies are whole parameters below stage 3, frozen ones among them; and the shards and the optimizer state of ranks of a replicate
group, which at stage 0 is all ranks.
Copies go apart by a bit that flips in memory, by an edit on one rank alone, or by sums that are not made alike.

[Note: values that nothing writes between two updates]
An owner's shard, masters and optimizer state have no other copy from one update to the next, and no code of the engine writes to
them in between, unless a script edits or loads them. So the checksum that a rank takes after an update has to be equal to the one
before the next update. Edits and loads are known by torch's counts of writes and by `StateHolder.loads`. Below stage 3 a script
may edit whole parameters without a trace (`p.data`), so the owner's checksum is compared earlier: with the one at the moment when
the parameters have arrived, before the script can reach them.

[Note: writes that one rank alone has made]
A script runs on every rank, so an edit of a parameter's optimizer state is counted on every rank that owns a part of the
parameter. If one owner has counted a write and another has not, the state is edited in part, and the ranks report it. A parameter
with a single owner has no other rank to compare with. There, only the change of one bit is reported, and only if no rank has
written to any other state since the update: an edit by a script changes more. Masters and weights are left out, since the engine
writes to them for edits that change only some ranks' parts.

[Note: what an update hides]
An update writes over a copy: below stage 3 by what its owner sends, and in optimizer state by a mean in which a small difference
is rounded away. So each rank notes checksums of its copies before every update, and of what it owns behind it. The notes of
several steps are compared at once. Of ranks that differ, the one is at fault whose copy is not what its owner had.
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
from ..buckets.memory import UnshardedMemory
from ..buckets.rows import MASTER
from ..buckets.sharded import ClippedGradient
from ..comm.arrivals import in_words
from ..comm.transport import Transport
from ..comm.wire_sums import WireSums
from .holder import StateHolder

_LISTED = 8
_WEIGHTS = ""
_GRADIENT, _GATHERED = "reduced gradient", "gathered copy"
"""Kinds of values that are compared only if the next step compares copies: they last for less than a step."""
_LOADS = 0
"""Index of `StateHolder.loads` in `_Own.writes`."""


class ReplicasDivergedError(RuntimeError):
    """Ranks hold different values of the same parameters or of their optimizer state, or an owner's values have changed."""


class _Copy(NamedTuple):
    """A kind of copies that several ranks hold.

    Attributes:
        part: the ranks that have the same part of the model.
        shard: number of the shard that it is of; -1 of a whole parameter.
        kind: the optimizer's name for its state; "" for the parameter itself, "master" for its master.
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
    """What writes since the last update have done to a value. `SAME`: counted, and without a change."""

    UNWRITTEN = 0
    SAME = 1
    CHANGED = 2
    ONE_BIT = 3


_Effects = dict[tuple[int, str, str], _Effect]
"""By the first rank that has this part of the model, the parameter's name, and the kind of state."""


_Sum = TypeVar("_Sum", torch.Tensor, int)
"""A checksum, on its device or read."""

_Key = TypeVar("_Key")


@dataclass(kw_only=True)
class _Note(Generic[_Sum]):
    """Checksums of some copies before an update, and of what their owners had behind the one before.

    Attributes:
        since, step: the updates behind which they were looked at last, and are looked at now.
        owned: by shard for a parameter that ranks hold whole; None where no update was seen.
        left, found: of this rank's own values, after the last update and now. Nothing may have written to them in between.
        written: change of the checksum of each optimizer state to which a write has been counted since.
        scalars: those of `written` that have one element.
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
        """Returns what has happened to each optimizer state of this rank since the last update."""
        effects: _Effects = {_key(copy): _Effect.UNWRITTEN for copy in self.left if copy.is_state}
        for copy, change in self.written.items():
            is_one_bit = change in ONE_BIT and copy not in self.scalars
            effects[_key(copy)] = _Effect.ONE_BIT if is_one_bit else _Effect.CHANGED if change else _Effect.SAME
        return effects


_Sums = dict[_Copy, torch.Tensor]


class _Own(NamedTuple):
    """A value that only this rank writes.

    Attributes:
        writes: changes with each write that leaves a trace; None for values that are not compared.
    """

    copy: _Copy
    values: torch.Tensor
    writes: tuple[int, ...] | None


class _Mark(NamedTuple):
    """The checksum of an own value, its `_Own.writes` and its number of elements."""

    sum: torch.Tensor
    writes: tuple[int, ...] | None
    numel: int


_Noted = dict[_Copy, _Mark]


class _Change(NamedTuple):
    """The first own value of a rank that has changed between two updates."""

    rank: int
    copy: _Copy
    since: int
    step: int


@dataclass
class _Findings:
    """The faults of one copy: the note, each rank's checksum, and the ranks whose copy differs from its owner's."""

    copy: _Copy
    note: _Note[int]
    values: dict[int, int]
    at_fault: list[int] = field(default_factory=list)


class ReplicaCheck:
    """Notes checksums at each step, and compares them over the ranks every few steps; see [Note: what an update hides].

    Args:
        every: steps between two comparisons.
        buckets: all of the model's.
        frozen: parameters of no bucket, by name.
        has_copies: other ranks hold this rank's shards and optimizer state, too.
        weights_in_files: shards of stage 3 are in files, which have checksums of their own.
        transport: of the ranks that step together.
        rank: this one.
        place_of: for a parameter: the ranks that have the same part of the parameter, and which shard of that this rank has.
    """

    def __init__(
        self,
        every: int,
        buckets: Sequence[Bucket],
        frozen: Iterable[tuple[str, nn.Parameter]],
        holder: StateHolder,
        transport: Transport,
        rank: int,
        place_of: Callable[[nn.Parameter], tuple[tuple[int, ...], int]],
        *,
        has_copies: bool,
        weights_in_files: bool,
    ):
        self._every = every
        self._untrained = [bucket for bucket in buckets if not bucket.trained]
        self._frozen = list(frozen)
        self._holder = holder
        self._transport = transport
        self._rank = rank
        self._place_of = place_of
        self._has_copies = has_copies
        self._weights_in_files = weights_in_files
        self._wire = WireSums()
        # Of the rows with a reduced gradient, as the last pass or a clip has left it.
        self._gradients: _Noted = {}
        self._notes: list[_Note[torch.Tensor]] = []
        # By the optimizer that has made the last update.
        self._owned: dict[torch.optim.Optimizer, _Sums] = {}
        self._left: dict[torch.optim.Optimizer, _Noted] = {}
        # By bucket, from the update to the arrival, and from there to the next update.
        self._sent: dict[Bucket, _Noted] = {}
        self._arrived: dict[Bucket, tuple[_Sums, _Sums]] = {}
        self._owned_frozen = self._untouched()
        self._left_frozen = _noted(self._own_shards(self._untrained))
        self._compared = 0

    @torch.no_grad()
    def before_update(self, step: int, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Notes this rank's copies of an optimizer's buckets. Their gathers are finished.

        Args:
            step: updates that the run has made.
        """
        self.compare_gradients(step, buckets)
        own = _noted(self._own_values(optimizer, buckets))
        before = self._left.get(optimizer, {})
        left, found = _unwritten(before, own)
        # Early steps have written to the state of some buckets by now, on each rank to that of others.
        written = {} if self._holder.timing.steps_early else _written(before, own)
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
        """Notes this rank's own values before they are sent; and at the start, the first values."""
        self._left[optimizer] = own = _noted(self._own_values(optimizer, buckets))
        whole = [bucket for bucket in buckets if isinstance(bucket.memory, UnshardedMemory)]
        parts = {bucket: _noted(self._parts_sent(bucket)) for bucket in whole}
        if optimizer in self._owned:
            # Not at the start, when nothing is sent. Blocks of a wire have fewer digits than what their owner keeps.
            exact = (bucket for bucket in whole if bucket.layout.shards > 1 and bucket.precision.weights is None)
            self._sent |= {bucket: parts[bucket] for bucket in exact}
        sums = {copy: mark.sum for noted in parts.values() for copy, mark in noted.items()}
        self._owned[optimizer] = sums | self._shared(own)

    @torch.no_grad()
    def arrived(self, bucket: Bucket) -> None:
        """Notes this rank's part of a bucket whose gather has ended, before the script can read or edit the parameters."""
        sent = self._sent.pop(bucket, None)
        # None: not sent by an update, but after an edit or a load.
        if sent is not None:
            self._arrived[bucket] = _unwritten(sent, _noted(self._parts_sent(bucket)))

    def is_due(self, step: int) -> bool:
        """Whether copies are compared before the update that makes this step."""
        return step % self._every == 0

    def watch(self, step: int) -> None:
        """Has what is sent before the update that makes this step noted, if copies are compared then."""
        self._transport.wire = self._wire if self.is_due(step) else None
        self._gradients.clear()

    @property
    def watches(self) -> bool:
        """Whether copies are compared before the next update. What lasts for less than a step is noted only then."""
        return self._transport.wire is not None

    @torch.no_grad()
    def note_gradients(self, buckets: Iterable[Bucket]) -> None:
        """Notes this rank's reduced gradients after a pass or a clip. From now on only the script writes to them, if anybody."""
        # Early steps have used some of them by now.
        if self.watches and not self._holder.timing.steps_early:
            self._gradients = _noted(self._own_gradients(buckets))

    @torch.no_grad()
    def compare_gradients(self, step: int, buckets: Iterable[Bucket]) -> None:
        """Compares this rank's reduced gradients with the note, before a clip or an update.

        Args:
            step: updates that the run has made.
        """
        if self.watches:
            own = _noted(self._own_gradients(buckets))
            left, found = _unwritten(self._gradients, own)
            held = self._shared(own)
            self._notes.append(_Note(since=step, step=step, held=held, owned=None, left=left, found=found))

    @torch.no_grad()
    def compare(self, step: int, gathered: Iterable[tuple[Sequence[ParameterSlot], torch.Tensor]] = ()) -> None:
        """Collective: one exchange of a digest for each shard; raises the same `ReplicasDivergedError` on all ranks.

        Args:
            gathered: parameters that were whole in a pass, and whether each has changed in that time, (n,) bool.
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
        # Here and not at each step: a read waits for the device.
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
            # A second collective is safe: all ranks have compared the same digests, and come here together.
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
        """See [Note: one number for all messages].

        Args:
            sums: of each rank's differences; None while the rank has collectives under way, and the next comparison counts these.
        """
        if None in sums:
            return
        self._wire.forget()
        if not sum(filter(None, sums)) % WRAPS:
            return
        of_ranks = self._transport.exchange(differences, "comparison of what was sent")
        kinds = sorted(set().union(*of_ranks))
        changed = [words for words in kinds if sum(theirs.get(words, 0) for theirs in of_ranks) % WRAPS]
        raise ReplicasDivergedError(
            f"hf_zero: ranks have not received what others sent, by step {step}: {', '.join(changed[:_LISTED])}. The network or "
            "the memory of a rank is broken. Resume from a checkpoint from before; see docs/troubleshooting.md."
        )

    # ---- what is held ----

    def _untouched(self) -> _Sums:
        """Returns the tensors that no update writes."""
        whole = [(self._copy(p, name, -1), p.data) for name, p in self._frozen]
        return _sums([*whole, *self._weights(self._untrained)])

    def _weights(self, buckets: Sequence[Bucket]) -> Iterator[tuple[_Copy, torch.Tensor]]:
        """Returns this rank's parameters: whole ones, and its part of sharded ones that other ranks have too."""
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
        """Those of this rank's own values that other ranks have too."""
        return {copy: mark.sum for copy, mark in own.items()} if self._has_copies else {}

    def _own_values(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> Iterator[_Own]:
        yield from self._own_shards(buckets)
        yield from self._state(optimizer, buckets)

    def _own_shards(self, buckets: Sequence[Bucket]) -> Iterator[_Own]:
        """This rank's part of each sharded parameter. In files they are read only to be compared with other ranks' copies."""
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
                # A read would multiply a clip coefficient in, which a kernel does on the way.
                values = gradient.behind if isinstance(gradient, ClippedGradient) else gradient.detach()
                yield _Own(
                    self._copy_of(row.slot, _GRADIENT), values, (gradient._version, id(gradient), values.data_ptr())
                )

    def _writes(self, *tensors: torch.Tensor) -> tuple[int, ...]:
        return (self._holder.loads, *(tensor._version for tensor in tensors))

    def _parts_sent(self, bucket: Bucket) -> Iterator[_Own]:
        """This rank's part of each parameter of a bucket that ranks hold whole."""
        for part, slot in zip(self._parts_of(bucket, bucket.memory.read_own()), bucket.own_parts):
            yield _Own(*part, self._writes(*(() if slot.row is None else (slot.row.tensor,))))

    def _parts_of(self, bucket: Bucket, own: torch.Tensor) -> Iterator[tuple[_Copy, torch.Tensor]]:
        for slot, part in bucket.own_parts.items():
            yield self._copy_of(slot), own[part.in_shard.start : part.in_shard.stop]

    def _state(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> Iterator[_Own]:
        """Masters and optimizer state in memory."""
        # State in files would be read from the disk at every step.
        if self._holder.is_in_files:
            return
        for row in (row for bucket in buckets for row in bucket.rows):
            if row.slot.bucket.keeps_master and not row.slot.bucket.memory.is_master:
                master = self._holder.master_view(row).detach()
                yield _Own(
                    self._copy_of(row.slot, MASTER), master, self._writes(row.tensor, master, row.slot.bucket.master)
                )
            for kind, value in optimizer.state.get(row.tensor, {}).items():
                if not torch.is_tensor(value):
                    continue
                is_elementwise = value.dim() > 0 and value.shape == row.tensor.shape
                values = self._holder.view(row, kind, value).detach() if is_elementwise else value
                # A script may put another tensor in its place.
                yield _Own(self._copy_of(row.slot, kind), values, (*self._writes(value), id(value)))

    def _copy(self, parameter: nn.Parameter, name: str, shard: int, kind: str = _WEIGHTS) -> _Copy:
        return _Copy(self._place_of(parameter)[0], shard, name, kind)

    def _copy_of(self, slot: ParameterSlot, kind: str = _WEIGHTS) -> _Copy:
        """Of this rank's shard."""
        return self._copy(slot.parameter, slot.name, self._place_of(slot.parameter)[1], kind)

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
            f"{found.copy}, {when}.{culprits} Ranks with the same values: {listed}. Resume from a checkpoint from "
            "before; see docs/troubleshooting.md."
        )


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Reads the checksum of each tensor by its name, in one transfer from each device."""
    return _read({name: checksum(values) for name, values in tensors.items()})


def _noted(own: Iterable[_Own]) -> _Noted:
    return {copy: _Mark(checksum(values), writes, values.numel()) for copy, values, writes in own}


def _unwritten(left: _Noted, found: _Noted) -> tuple[_Sums, _Sums]:
    """Then and now, of those values to which nothing has been written in between."""
    same = [
        copy
        for copy, mark in found.items()
        if copy in left and mark.writes is not None and left[copy].writes == mark.writes
    ]
    return {copy: left[copy].sum for copy in same}, {copy: found[copy].sum for copy in same}


def _written(left: _Noted, found: _Noted) -> _Sums:
    """Returns the change of each optimizer state that a script has written to, and nothing that was loaded."""
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
        f"{change.step + 1}: its memory is broken, or a script wrote through `.data`. Resume from a checkpoint from before; "
        "see docs/troubleshooting.md."
    )


def _refuse_lone_writes(of_ranks: Mapping[int, Sequence[_Effects]], notes: Sequence[_Note[int]]) -> None:
    """See [Note: writes that one rank alone has made]."""
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
                    f"hf_zero: one bit of {kind} of {name!r} has changed on rank {ranks[0]}, {when}, and no other "
                    "optimizer state of any rank. Resume from a checkpoint from before; see docs/troubleshooting.md."
                )


def _sums(copies: Iterable[tuple[_Copy, torch.Tensor]]) -> _Sums:
    return {copy: checksum(values) for copy, values in copies}


def _read(sums: dict[_Key, torch.Tensor]) -> dict[_Key, int]:
    """In one transfer from each device."""
    devices = {value.device for value in sums.values()}
    found: dict[_Key, int] = {}
    for device in devices:
        there = {copy: value for copy, value in sums.items() if value.device == device}
        # Without a sign: `_at_fault` adds checksums of shards modulo 2^64, and compares the sum with that of a whole parameter.
        found |= zip(there, (value % WRAPS for value in torch.stack(list(there.values())).tolist()))
    return found


def _digests(notes: Sequence[_Note[int]]) -> dict[tuple[tuple[int, ...], int], str]:
    """Digests all copies: each part and shard of the model → the checksums that its ranks share."""
    held: dict[tuple[tuple[int, ...], int], list] = {}
    for number, note in enumerate(notes):
        for copy, value in sorted(note.held.items()):
            held.setdefault(copy[:2], []).append((number, copy, value))
    return {group: hashlib.sha256(repr(values).encode()).hexdigest() for group, values in held.items()}


def _first_difference(of_ranks: Mapping[int, Sequence[_Note[int]]]) -> _Findings:
    """Ranks make notes at the same moments, so that theirs of one number belong together."""
    for notes in zip(*of_ranks.values()):
        here = dict(zip(of_ranks, notes))
        for copy in dict.fromkeys(copy for note in notes for copy in note.held):
            values = {rank: note.held[copy] for rank, note in here.items() if copy in note.held}
            if len(set(values.values())) > 1:
                return _Findings(copy, notes[0], values, _at_fault(copy, values, here))
    raise AssertionError(
        "hf_zero: bug: replicas differ, and no value of theirs does. Open an issue with this traceback."
    )


def _at_fault(copy: _Copy, values: Mapping[int, int], here: Mapping[int, _Note[int]]) -> list[int]:
    """Finds the ranks whose copy differs from its owners' after the last update; none in doubt."""
    owned = {
        rank: {
            each.shard: value for each, value in (note.owned or {}).items() if each._replace(shard=copy.shard) == copy
        }
        for rank, note in here.items()
    }
    if copy.shard >= 0:
        expected = {rank: theirs.get(copy.shard) for rank, theirs in owned.items() if rank in values}
    else:
        # Each shard's owners; replicas that disagreed behind the update had come apart before.
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
