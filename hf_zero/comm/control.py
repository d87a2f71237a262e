"""Exchanges small host values between ranks, and checks the order of their gathers."""

import pickle
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from .arrivals import CommunicationError, PeerFailure
from .groups import Groups
from .ledger import Watch, first_line, hidden_from_profiler
from .rank_state import script_line

# ---- Do all ranks gather the same parameters in the same order? A device backend cannot tell ----
#
# NCCL's collectives have no tags. Ranks that gathered different layers of equal size at a time would get each other's values in
# silence. So each rank keeps a checksum of the gathers that it has started, and the ranks compare them whenever they agree on
# something, at the latest at the end of each backward.


class GatherOrder:
    """A checksum of the gathers that this rank has started. `ranks`: those that gather together."""

    def __init__(self, ranks: tuple[int, ...]):
        self.ranks = frozenset(ranks)
        self.checksum = 0

    def note(self, what: str) -> None:
        """Adds a gather to the checksum; `what` is the same on all ranks."""
        self.checksum = zlib.crc32(what.encode(), self.checksum)


# ---- Sends and receives between ranks of one gloo group, awaited together for a bounded time ----

_LEAST_S = 1e-3
_NEARLY_S = 0.1
"""By which a backend's clock may be ahead of this one."""

_ABANDONED: list[dist.Work] = []
"""Sends and receives that were under way when the last reference to their handle went, as with an engine that is dropped
behind its last step. gloo takes a receive back whose work object goes, and the pair of ranks hangs in what it does next; so
they are kept here until the next transport is made."""


class Transfers:
    """The sends and receives of one collective.

    Args:
        works: each with the rank at its other end.
        timeout_s: for all of them together, from the moment when they are waited for.
    """

    def __init__(self, works: Sequence[tuple[int, dist.Work]], timeout_s: float):
        self._works = works
        self._timeout_s = timeout_s
        self._is_awaited = False

    def __del__(self) -> None:
        if not self._is_awaited:
            _ABANDONED.extend(work for _, work in self._works)

    def wait(self) -> None:
        """Waits for all; raises `PeerFailure` for a peer that has ended or does not come in time."""
        self._is_awaited = True
        deadline_s = time.monotonic() + self._timeout_s
        for rank, work in self._works:
            # One deadline for all: a limit each would add up to ranks times the limit.
            left_s = max(_LEAST_S, deadline_s - time.monotonic())
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                # By the clock: gloo raises one class for a time limit and for a closed connection.
                if time.monotonic() >= deadline_s - _NEARLY_S:
                    raise PeerFailure(rank, f"did not come within {self._timeout_s:.0f} s") from error
                raise PeerFailure(rank, "closed its connection") from error


def finish_abandoned(timeout_s: float) -> None:
    """Waits for the transfers of engines that are gone. Raises `CommunicationError`: it does not arrive."""
    while _ABANDONED:
        try:
            _ABANDONED.pop().wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise CommunicationError(
                f"hf_zero: what an engine that is gone had under way did not arrive: {first_line(error)}\nA peer ended, or "
                "took another number of steps with it."
            ) from error


# ---- Exchanges of small host values between the ranks, in messages that name their purpose ----
#
# [Note: a rank that comes alone]
# If ranks call different collectives of gloo, each takes the other's message for its own, and one of another size ends the
# process in gloo's thread. Here a message carries the purpose and the number of its exchange, so that ranks that have come to
# different ones know it at once, and both say so.

_Value = TypeVar("_Value")
_MESSAGE_BYTES = 1024
_HEAD = struct.Struct("<QQQH")
_LONGEST_PURPOSE = 200
_TAG, _TAG_OF_THE_REST = 0x5A480000, 0x5A490000


class Control:
    """Exchanges values between all ranks of some groups.

    Each rank sends every other rank one message, and a second one for the bytes that do not fit in the first.

    Args:
        watch: is told of each wait.
        order: of this rank's gathers, compared with each message; None where nothing is gathered, or messages have tags.
    """

    def __init__(self, groups: Groups, watch: Watch, order: GatherOrder | None):
        self._group = groups.control_group
        self._timeout_s = groups.timeout_s
        self._watch = watch
        self._ranks = groups.world.ranks
        self._place = groups.world.index
        self._peers = groups.world.peers
        self._count = 0
        self._order = order or GatherOrder(())

    def exchange(self, value: _Value, purpose: str) -> list[_Value]:
        """Returns every rank's picklable value, in rank order.

        Raises:
            CommunicationError: a rank does not come in time, has ended, or came for another purpose.
        """
        with self._watch.inside(purpose):
            everyone = self._start(pickle.dumps(value), purpose)()
        return [value if place == self._place else pickle.loads(data) for place, data in enumerate(everyone)]

    def start_swap(self, values: torch.Tensor, purpose: object) -> Callable[[], torch.Tensor]:
        """Sends this rank's small tensor in host memory to every other rank, and returns without waiting for theirs.

        Returns:
            A function to call once. It waits for every rank's tensor and returns them stacked in rank order, (ranks,
            *values.shape). Errors: as of `exchange`.
        """
        with self._watch.inside(purpose):
            wait = self._start(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), str(purpose))

        def take() -> torch.Tensor:
            with self._watch.inside(purpose):
                everyone = wait()
            tensors = [torch.frombuffer(data, dtype=values.dtype) for data in everyone]
            return torch.stack(tensors).view(-1, *values.shape)

        return take

    def _start(self, data: bytes, purpose: str) -> Callable[[], list[bytearray]]:
        """Sends `data`; returns a function that waits for every rank's. All ranks start overlapping exchanges in one order."""
        self._count += 1
        name = purpose.encode()[:_LONGEST_PURPOSE]
        head = _HEAD.pack(len(data), self._count, self._order.checksum, len(name)) + name
        room = _MESSAGE_BYTES - len(head)
        message = bytearray(_MESSAGE_BYTES)
        message[: len(head) + min(room, len(data))] = head + data[:room]
        # Sends start before receives are waited for: two ranks that received first would wait for each other.
        sends = self._send(message, _TAG)
        if len(data) > room:
            sends += self._send(bytearray(data[room:]), _TAG_OF_THE_REST)
        sent = Transfers(sends, self._timeout_s)
        found = {place: bytearray(_MESSAGE_BYTES) for place in self._peers}
        received = Transfers(self._receive(found, _TAG), self._timeout_s)
        order, count = self._order.checksum, self._count

        def wait() -> list[bytearray]:
            # Receives before sends: a peer that has failed shows in its missing message, while a send may lie in a
            # buffer.
            received.wait()
            sizes = {place: self._open(place, theirs, name, count, order) for place, theirs in found.items()}
            # Long data is rare. One fixed size lets the receive start before the size is known.
            rests = {place: bytearray(nbytes - room) for place, nbytes in sizes.items() if nbytes > room}
            if rests:
                Transfers(self._receive(rests, _TAG_OF_THE_REST), self._timeout_s).wait()
            sent.wait()
            everyone = {
                place: theirs[len(head) : len(head) + sizes[place]] + rests.get(place, b"")
                for place, theirs in found.items()
            }
            everyone[self._place] = bytearray(data)
            return [everyone[place] for place in range(len(self._ranks))]

        return wait

    def _open(self, place: int, message: bytearray, name: bytes, own_count: int, own_order: int) -> int:
        """Checks that a message has the same purpose; returns the bytes of data that begin in the message.

        Args:
            own_count, own_order: this rank's number of the exchange, and its order of gathers before.
        """
        nbytes, count, order, length = _HEAD.unpack_from(message)
        theirs = message[_HEAD.size : _HEAD.size + length]
        # Before the bytes are unpickled: they belong to another exchange.
        if theirs != name or count != own_count:
            raise CommunicationError(
                f"hf_zero: the ranks called different collectives: rank {self._ranks[self._place]} the "
                f"{name.decode(errors='replace')} ({script_line()[0]}), rank {self._ranks[place]} the "
                f"{theirs.decode(errors='replace')}. Call each on every rank, in one order, outside of `if "
                "is_main_process`."
            )
        # Values in the wrong layer raise no error by themselves: this is the only place that notices.
        if order != own_order and self._ranks[place] in self._order.ranks:
            raise CommunicationError(
                f"hf_zero: rank {self._ranks[self._place]} and rank {self._ranks[place]} have gathered parameters in different "
                f"orders before the {name.decode(errors='replace')}, so that a layer may have got another one's. Call layers "
                "outside of the model's forward on all ranks alike."
            )
        return nbytes

    # The group has these ranks in this order, so an index among them is a rank of the group.

    def _send(self, data: bytearray, tag: int) -> list[tuple[int, dist.Work]]:
        values = [torch.frombuffer(data, dtype=torch.uint8)]
        with hidden_from_profiler():
            return [(self._ranks[place], self._group.send(values, place, tag)) for place in self._peers]

    def _receive(self, into: dict[int, bytearray], tag: int) -> list[tuple[int, dist.Work]]:
        with hidden_from_profiler():
            return [
                (self._ranks[place], self._group.recv([torch.frombuffer(data, dtype=torch.uint8)], place, tag))
                for place, data in into.items()
            ]


class FakeControl:
    """Answers for torch's fake backend, which sends nothing: every other rank has this rank's value."""

    def __init__(self, groups: Groups):
        self._size = groups.world.size

    def exchange(self, value: _Value, purpose: str) -> list[_Value]:
        return [value] * self._size

    def start_swap(self, values: torch.Tensor, purpose: object) -> Callable[[], torch.Tensor]:
        return lambda: values.expand(self._size, *values.shape)


def control_of(groups: Groups, watch: Watch, order: GatherOrder | None = None) -> Control | FakeControl:
    """Chooses the exchanges for the ranks of these groups."""
    return FakeControl(groups) if groups.backend == "fake" else Control(groups, watch, order)
