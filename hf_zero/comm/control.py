"""Exchanges small host values between ranks, and checks the order of their gathers."""

import pickle
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..presence.arrivals import CommunicationError, PeerFailure
from ..presence.rank_state import script_line
from .all_or_none import Merged
from .collective_log import first_line
from .groups import Groups
from .profiler_ranges import hidden_from_profiler
from .waits import Watch

# ---- A check of the order of gathers, which a device backend does not check ----
#
# NCCL's collectives have no tags. If ranks gathered different layers of equal size at the same time, each would silently get the
# other's values. So each rank keeps a checksum of its started gathers, and the ranks compare the checksums in every agreement, at
# the latest at the end of each backward.


class GatherOrder:
    """A checksum of the gathers started by this rank. `ranks`: the ranks in these gathers."""

    def __init__(self, ranks: tuple[int, ...]):
        self.ranks = frozenset(ranks)
        self.checksum = 0

    def note(self, what: str) -> None:
        """Adds a gather to the checksum; the argument is the same on all ranks."""
        self.checksum = zlib.crc32(what.encode(), self.checksum)


# ---- Sends and receives between ranks of one gloo group, awaited together for a limited time ----

_LEAST_S = 1e-3
_NEARLY_S = 0.1
"""A backend's clock may be ahead of this one by this time."""

_ABANDONED: list[dist.Work] = []
"""Sends and receives whose handle was dropped while they were running, for example by an engine dropped right after its last
step. gloo cancels a receive when its work object is deleted, and the pair of ranks would hang in their next transfer. So the
work objects are kept here until the next transport is created."""


class Transfers:
    """The sends and receives of one collective.

    Args:
        works: each with the rank at its other end.
        timeout_s: time limit for all of them together, from the start of the wait.
    """

    def __init__(self, works: Sequence[tuple[int, dist.Work]], timeout_s: float):
        self._works = works
        self._timeout_s = timeout_s
        self._is_awaited = False

    def __del__(self) -> None:
        if not self._is_awaited:
            _ABANDONED.extend(work for _, work in self._works)

    def wait(self, deadline_s: float | None = None) -> None:
        """Waits for all transfers.

        Args:
            deadline_s: on the monotonic clock; by default the time limit from now.

        Raises:
            PeerFailure: a peer has ended, or did not arrive in time.
        """
        self._is_awaited = True
        if deadline_s is None:
            deadline_s = time.monotonic() + self._timeout_s
        for rank, work in self._works:
            # Use one deadline for all: separate limits would add up to ranks times the limit.
            left_s = max(_LEAST_S, deadline_s - time.monotonic())
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                # Decide by the clock, because gloo raises the same class for a time limit and for a closed connection.
                if time.monotonic() >= deadline_s - _NEARLY_S:
                    raise PeerFailure(rank, f"did not arrive within {self._timeout_s:.0f} s") from error
                raise PeerFailure(rank, "closed its connection") from error


def finish_abandoned(timeout_s: float) -> None:
    """Waits for the transfers of dropped engines. Raises `CommunicationError` if a transfer fails."""
    while _ABANDONED:
        try:
            _ABANDONED.pop().wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise CommunicationError(
                f"hf_zero: an exchange that a closed engine had started did not finish: {first_line(error)}\nA peer ended, or "
                "took a different number of steps with that engine."
            ) from error


# ---- Exchanges of small host values between the ranks, in messages with the name of their purpose ----
#
# [Note: a rank that comes alone]
# If ranks call different collectives of gloo, each mistakes the other's message for its own, and a message of another size ends
# the process in gloo's thread. Here each message contains the purpose and the number of its exchange. If a rank's neighbor called
# a different exchange, the rank marks its later messages, so after the last round all ranks know about the different calls. Then
# the ranks list all calls, and each rank raises an error with the name of a rank with a different call.
#
# [Note: rounds]
# A rank does not send its value to every other rank, because the work would grow with the number of ranks at the end of every
# backward. In each round, a rank sends all of its known values to a few ranks at fixed distances, and knows three times as many
# values after the round. Four rounds reach 64 ranks, eight rounds 4,096, with at most two messages per round. A maximum may
# count a value twice, so its messages do not grow. Other messages grow with the number of different values.

_Value = TypeVar("_Value")
_MESSAGE_BYTES = 1024
_PREFIX, _HEAD = struct.Struct("<QHB"), struct.Struct("<QQQ")
"""Prefix: bytes of data, bytes of the head, and the difference of the calls. Head: the number of the exchange, the checksum of
gathers, and the size of all ranks' values (if equal), followed by the purpose."""
_LONGEST_PURPOSE = 200
_TAG, _REMAINDER_TAG = 0x5A480000, 0x5A490000

_SAME, _ORDERS_DIFFER, _CALLS_DIFFER = range(3)

_MOST_TIMES = 3
"""Factor by which the number of known values grows in a round. A larger factor would save rounds and cost messages."""


def rounds(size: int) -> list[range]:
    """Lists by round the distances from each rank to its receivers; see [Note: rounds]."""
    count = 0
    while _MOST_TIMES**count < size:
        count += 1
    times = next(each for each in range(1, _MOST_TIMES + 1) if each**count >= size)
    found, known = [], 1
    while known < size:
        found.append(range(known, min(times * known, size), known))
        known *= times
    return found


def listed_bytes(values: Sequence[bytes | bytearray]) -> bytes:
    """Returns the message with these values of neighboring ranks."""
    # Send a value once for each run of ranks with this value: usually all ranks have the same one, and then the message does not
    # grow with the number of ranks.
    return pickle.dumps([(sum(1 for _ in run), value) for value, run in groupby(values)])


class _Listed:
    """One value of any size for each rank: first this rank's value, then the values of the ranks before this one."""

    same_nbytes = 0

    def __init__(self, own: bytes):
        self._found: list[bytes | bytearray] = [own]

    def data(self, count: int) -> bytes:
        """Returns the first `count` values as one message."""
        return listed_bytes(self._found[:count])

    def add(self, data: bytearray) -> None:
        """Adds the values of a message. A rank receives messages in the order of the ranks before this one."""
        for times, value in pickle.loads(data):
            self._found += [value] * times

    def in_order(self, index: int) -> list[bytes | bytearray]:
        """Returns the values in the order of the ranks; `index` is this rank's index."""
        return [self._found[index - each] for each in range(len(self._found))]


class _Stacked(_Listed):
    """Like `_Listed`, for tensors of the same size on all ranks."""

    def __init__(self, own: torch.Tensor):
        super().__init__(_bytes_of(own))
        self._dtype, self._shape = own.dtype, own.shape
        self.same_nbytes = own.nbytes

    def data(self, count: int) -> bytes:
        return b"".join(self._found[:count])

    def add(self, data: bytearray) -> None:
        self._found += [data[start : start + self.same_nbytes] for start in range(0, len(data), self.same_nbytes)]

    def result(self, index: int) -> torch.Tensor:
        """Returns the tensors stacked in rank order."""
        everyone = bytearray(b"".join(self.in_order(index)))
        return torch.frombuffer(everyone, dtype=self._dtype).view(-1, *self._shape)


class _Largest:
    """The elementwise maximum of all tensors so far."""

    def __init__(self, own: torch.Tensor):
        self._found = own
        self.same_nbytes = own.nbytes

    def data(self, _count: int) -> bytes:
        return _bytes_of(self._found)

    def add(self, data: bytearray) -> None:
        found = self._found
        # Do not work in place, because the first operand belongs to the caller.
        self._found = torch.maximum(found, torch.frombuffer(data, dtype=found.dtype).view(found.shape))

    def result(self, _index: int) -> torch.Tensor:
        return self._found


class _Merging:
    """Values merged into one. As a maximum does, the merged value may cover a rank twice."""

    same_nbytes = 0

    def __init__(self, own: Any):
        self.found = own

    def data(self, _count: int) -> bytes:
        return pickle.dumps(self.found)

    def add(self, data: bytearray) -> None:
        self.found = self.found.merged(pickle.loads(data))


def _bytes_of(values: torch.Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class _Exchange:
    """An exchange after the start of its first round.

    Args:
        values: this rank's values, to which the values of the other ranks are added.
        head: the beginning of the messages of all ranks in this exchange.
    """

    def __init__(self, control: "Control", values: "_Listed | _Largest | _Merging", head: bytes):
        self._control = control
        self._values = values
        self._head = head
        self._differ = _SAME
        self._left = control.rounds[:]
        self.is_finished = False
        self._begin_round()

    @property
    def has_later_rounds(self) -> bool:
        """Whether the other ranks need more messages from this one."""
        return bool(self._left)

    def finish(self) -> int:
        """Waits for all rounds. Returns the difference of the ranks' calls: `_SAME`, `_ORDERS_DIFFER` or `_CALLS_DIFFER`."""
        if not self.is_finished:
            deadline_s = time.monotonic() + self._control.timeout_s
            self._end_round(deadline_s)
            while self._left:
                self._begin_round()
                self._end_round(deadline_s)
            self.is_finished = True
        return self._differ

    def _begin_round(self) -> None:
        """Sends the known values, and starts to receive the messages of this round."""
        control, values, head = self._control, self._values, self._head
        group, ranks, steps = control.group, control.ranks, self._left.pop(0)
        # Wait for receives before sends: a failed peer shows in its missing message, while a send may sit in a buffer.
        sends, receives, remainders, found, known = [], [], [], [], 0
        with hidden_from_profiler():
            for receiver, sender, count in steps:
                if count != known:
                    # After different calls, the values are meaningless to the other rank.
                    data = b"" if self._differ == _CALLS_DIFFER else values.data(count)
                    begin = _PREFIX.pack(len(data), len(head), self._differ) + head
                    room = _MESSAGE_BYTES - len(begin)
                    # The message has a fixed size, so receives can start before the size of the data is known.
                    message = torch.frombuffer(
                        bytearray(begin + data[:room]).ljust(_MESSAGE_BYTES, b"\0"), dtype=torch.uint8
                    )
                    if not known:
                        self._begin, self._end = begin, len(begin) + len(data)
                    known = count
                sends.append((ranks[receiver], group.send([message], receiver, _TAG)))
                if len(data) > room:
                    more = torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8)
                    remainders.append((ranks[receiver], group.send([more], receiver, _REMAINDER_TAG)))
                theirs = bytearray(_MESSAGE_BYTES)
                found.append((sender, theirs))
                work = group.recv([torch.frombuffer(theirs, dtype=torch.uint8)], sender, _TAG)
                receives.append((ranks[sender], work))
        self._found = found
        self._transfers = Transfers(receives + sends, control.timeout_s)
        # Wait for these last: such a send ends once its receiver has asked for the data, after the first messages.
        self._remainders = Transfers(remainders, control.timeout_s) if remainders else None

    def _end_round(self, deadline_s: float) -> None:
        """Waits for the messages of this round, and adds their values."""
        self._transfers.wait(deadline_s)
        begin, end = self._begin, self._end
        for _, message in self._found:
            if end > _MESSAGE_BYTES or not message.startswith(begin):
                self._add_all(deadline_s)
                return
        if end > len(begin):
            for _, message in self._found:
                self._values.add(message[len(begin) : end])

    def _add_all(self, deadline_s: float) -> None:
        """Adds the values of messages with more than one part, or with a different beginning than this rank's."""
        control, begun = self._control, [_PREFIX.unpack_from(message) for _, message in self._found]
        room = _MESSAGE_BYTES - _PREFIX.size
        remainders = [bytearray(max(0, nbytes + length - room)) for nbytes, length, _ in begun]
        with hidden_from_profiler():
            receives = [
                (
                    control.ranks[sender],
                    control.group.recv([torch.frombuffer(remainder, dtype=torch.uint8)], sender, _REMAINDER_TAG),
                )
                for (sender, _), remainder in zip(self._found, remainders)
                if remainder
            ]
        Transfers(receives, control.timeout_s).wait(deadline_s)
        if self._remainders is not None:
            self._remainders.wait(deadline_s)
        for (_, message), (nbytes, length, differ), remainder in zip(self._found, begun, remainders):
            end = _PREFIX.size + length
            theirs = message[_PREFIX.size : end]
            if theirs != self._head:
                differ = max(differ, _difference(theirs, self._head))
            self._differ = max(self._differ, differ)
            # Check before unpickling the values, which may belong to another exchange.
            if self._differ != _CALLS_DIFFER:
                self._values.add(message[end : end + nbytes] + remainder)


def _difference(theirs: bytes | bytearray, own: bytes) -> int:
    """Compares two heads: either the calls differ, or only the orders of gathers."""
    (count, _, nbytes), (own_count, _, own_nbytes) = _HEAD.unpack_from(theirs), _HEAD.unpack_from(own)
    is_same = (count, nbytes) == (own_count, own_nbytes) and theirs[_HEAD.size :] == own[_HEAD.size :]
    return _ORDERS_DIFFER if is_same else _CALLS_DIFFER


class Control:
    """Exchanges values between all ranks of some groups; see [Note: rounds].

    Args:
        watch: is informed of each wait.
        order: this rank's gathers, which are compared in each exchange; None if nothing is gathered, or if messages have tags.

    Attributes:
        group, timeout_s, ranks: from the groups.
        rounds: for each round, (rank to send to, rank to receive from, number of values to send), as indices in the group.
    """

    def __init__(self, groups: Groups, watch: Watch, order: GatherOrder | None):
        self.group = groups.control_group
        self.timeout_s = groups.timeout_s
        self._watch = watch
        self.ranks = groups.world.ranks
        self._index = groups.world.index
        size = len(self.ranks)
        self.rounds = [
            [
                ((self._index + each) % size, (self._index - each) % size, min(distances.start, size - each))
                for each in distances
            ]
            for distances in rounds(size)
        ]
        self._count = 0
        self._order = order or GatherOrder(())
        self._open: _Exchange | None = None

    def exchange(self, value: _Value, purpose: str) -> list[_Value]:
        """Returns every rank's picklable value, in rank order.

        Raises:
            CommunicationError: a rank did not arrive in time, has ended, or had another purpose.
        """
        values = _Listed(pickle.dumps(value))
        with self._watch.inside(purpose):
            self._start(values, purpose)()
        everyone = values.in_order(self._index)
        return [value if index == self._index else pickle.loads(data) for index, data in enumerate(everyone)]

    def merge(self, value: Merged, purpose: str) -> Merged:
        """Returns the values of all ranks merged into one. A message is as large as a merged value. Raises like `exchange`."""
        values = _Merging(value)
        with self._watch.inside(purpose):
            self._start(values, purpose)()
        return values.found

    def start_swap(self, own: torch.Tensor, purpose: object, *, stacks: bool = False) -> Callable[[], torch.Tensor]:
        """Sends a small tensor in host memory, and returns without waiting for the other ranks.

        Args:
            stacks: keep every rank's tensor, instead of their maximum.

        Returns:
            A function to be called once. It waits for the other ranks, and returns the elementwise maximum, or all tensors
            stacked in rank order: (ranks, *own.shape). It raises the errors of `exchange`.
        """
        values = _Stacked(own) if stacks else _Largest(own)
        with self._watch.inside(purpose):
            wait = self._start(values, str(purpose))

        def take() -> torch.Tensor:
            with self._watch.inside(purpose):
                wait()
            return values.result(self._index)

        return take

    def _start(self, values: "_Listed | _Largest | _Merging", purpose: str) -> Callable[[], None]:
        """Starts an exchange; returns a function to wait for all ranks. Overlapping exchanges start in the same order."""
        if self._open is not None:
            # The later rounds of the open exchange come first on all ranks. The exchange may also belong to a pass ended by an
            # exception on this rank, while the other ranks still wait.
            self._open.finish()
        self._count += 1
        name = purpose.encode()[:_LONGEST_PURPOSE]
        own = _HEAD.pack(self._count, self._order.checksum, values.same_nbytes) + name
        exchange = _Exchange(self, values, own)
        self._open = exchange if exchange.has_later_rounds else None

        def wait() -> None:
            differ = exchange.finish()
            if exchange is self._open:
                self._open = None
            if differ:
                self._refuse_differences(own)

        return wait

    def _refuse_differences(self, own: bytes) -> None:
        """Lists the calls of all ranks, and raises for a call different from this rank's. Collective."""
        values = _Listed(own)
        _Exchange(self, values, b"").finish()
        name, order = own[_HEAD.size :], _HEAD.unpack_from(own)[1]
        for index, theirs in enumerate(values.in_order(self._index)):
            if _difference(theirs, own) == _CALLS_DIFFER:
                raise CommunicationError(
                    f"hf_zero: the ranks called different collectives: rank {self.ranks[self._index]} the "
                    f"{name.decode(errors='replace')} ({script_line()[0]}), rank {self.ranks[index]} the "
                    f"{theirs[_HEAD.size :].decode(errors='replace')}. Call each on every rank, in the same order, outside of "
                    "`if is_main_process`."
                )
            # Values in the wrong layer raise no error by themselves, so this check is the only one.
            if _HEAD.unpack_from(theirs)[1] != order and self.ranks[index] in self._order.ranks:
                raise CommunicationError(
                    f"hf_zero: rank {self.ranks[self._index]} and rank {self.ranks[index]} gathered parameters in different "
                    f"orders before the {name.decode(errors='replace')}, so a layer may have another layer's "
                    "parameters. Call layers outside of the forward in the same order on all ranks."
                )


class FakeControl:
    """The exchanges of torch's fake backend, which sends nothing: every other rank has this rank's value."""

    def __init__(self, groups: Groups):
        self._size = groups.world.size

    def exchange(self, value: _Value, purpose: str) -> list[_Value]:
        return [value] * self._size

    def merge(self, value: Merged, purpose: str) -> Merged:
        return value

    def start_swap(self, own: torch.Tensor, purpose: object, *, stacks: bool = False) -> Callable[[], torch.Tensor]:
        return (lambda: own.expand(self._size, *own.shape)) if stacks else (lambda: own)


def control_of(groups: Groups, watch: Watch, order: GatherOrder | None = None) -> Control | FakeControl:
    """Chooses the exchanges for the ranks of these groups."""
    return FakeControl(groups) if groups.backend == "fake" else Control(groups, watch, order)
