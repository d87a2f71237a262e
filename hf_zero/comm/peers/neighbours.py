"""Ranks of one host hand each other open files and short signals, over sockets that have no name in any folder.

Nothing is left behind by a process that is killed: its sockets and files go with it, which is how the others come to know.
"""

import os
import select
import socket
import struct
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path

from ..groups.failures import PeerFailure
from ..groups.groups import RankGroup
from ..transport import Transport

_TOKEN = struct.Struct("<BI")
_HELLO = struct.Struct("<I")
_LOOK_S = 0.2
"""After this long without news, a wait looks whether it is to end."""


class Signal(IntEnum):
    """See [Note: who may write when]."""

    READY = 1
    TAKEN = 2


class Neighbours:
    """The connections of one rank.

    Args:
        sockets: by the peer's place in the group.
        ranks: of the group, for errors.
        timeout_s: how long a peer is waited for.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], ranks: Sequence[int], timeout_s: float):
        self._sockets = dict(sockets)
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._came: Counter[tuple[int, Signal, int]] = Counter()
        self._files: dict[int, deque[int]] = {place: deque() for place in sockets}
        self._gone: set[int] = set()
        self.is_closing = False
        for connection in self._sockets.values():
            connection.setblocking(False)

    @property
    def places(self) -> list[int]:
        """Of the peers."""
        return sorted(self._sockets)

    def swap_files(self, descriptor: int) -> dict[int, int]:
        """Gives an open file to each peer; their descriptors, by place, are the caller's to close. Collective."""
        for connection in self._sockets.values():
            socket.send_fds(connection, [b"file"], [descriptor])
        received: dict[int, int] = {}
        try:
            for place in self.places:
                received[place] = self._take_file(place)
        except BaseException:
            for other in received.values():
                os.close(other)
            raise
        return received

    def _take_file(self, place: int) -> int:
        if self._files[place]:
            return self._files[place].popleft()
        connection = self._sockets[place]
        if not select.select([connection], [], [], self._timeout_s)[0]:
            raise self._late(place)
        _, descriptors, _, _ = socket.recv_fds(connection, _TOKEN.size, 1)
        if not descriptors:
            raise self._left(place)
        return descriptors[0]

    def tell(self, place: int, signal: Signal, channel: int) -> None:
        """Called by the thread that trains, while another one reads."""
        self._send(place, signal, channel, lambda: time.sleep(1e-3))

    def answer(self, place: int, signal: Signal, channel: int) -> None:
        """Called by the thread that reads."""
        # Two readers that both only wrote would wait for each other once their sockets are full.
        self._send(place, signal, channel, lambda: self._read(1e-3))

    def wait_for(self, place: int, signal: Signal, channel: int) -> None:
        """Returns when the signal has come once more. Called by the thread that reads.

        Raises:
            RuntimeError: the peer has ended, or does not come in time; or this rank lets go.
        """
        key, deadline_s = (place, signal, channel), time.monotonic() + self._timeout_s
        while not self._came[key]:
            if place in self._gone and signal is Signal.TAKEN:
                # Who has ended reads no more.
                return
            if place in self._gone:
                raise self._left(place)
            if self.is_closing:
                raise RuntimeError("it was dropped by this rank")
            if time.monotonic() > deadline_s:
                raise self._late(place)
            self._read(_LOOK_S)
        self._came[key] -= 1

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    def _send(self, place: int, signal: Signal, channel: int, meanwhile: Callable[[], None]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                self._sockets[place].send(_TOKEN.pack(signal, channel))
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise self._late(place) from None
                meanwhile()
            except (BrokenPipeError, ConnectionResetError):
                # It is told where something is waited for that would have come from there.
                return

    def _read(self, timeout_s: float) -> None:
        place_of = {connection: place for place, connection in self._sockets.items() if place not in self._gone}
        for connection in select.select(list(place_of), [], [], timeout_s)[0]:
            place = place_of[connection]
            try:
                token, descriptors, _, _ = socket.recv_fds(connection, _TOKEN.size, 1)
            except ConnectionResetError:
                # The peer has ended without reading all; what it sent before is still there, and then comes its end.
                continue
            if descriptors:
                # A peer whose gather has ended shares the next memory, while this one still waits for a third.
                self._files[place].extend(descriptors)
            elif token:
                signal, channel = _TOKEN.unpack(token)
                self._came[place, Signal(signal), channel] += 1
            else:
                self._gone.add(place)

    def _left(self, place: int) -> PeerFailure:
        return PeerFailure(self._ranks[place], "has ended")

    def _late(self, place: int) -> PeerFailure:
        return PeerFailure(self._ranks[place], f"did not come within {self._timeout_s:.0f} s")


def meet_neighbours(group: RankGroup, transport: Transport, timeout_s: float) -> Neighbours:
    """Connects the ranks of a group. Collective among the transport's ranks.

    Raises:
        OSError: they cannot be connected: they are on several hosts, or this is no Linux.
    """
    host = _host_identity()
    name = f"\0hf_zero-{uuid.uuid4().hex}"
    listener = None if host is None else _listen(name, group.size)
    everyone = transport.exchange((host, name))
    found = everyone if len(everyone) == group.size else [everyone[rank] for rank in group.ranks]
    hosts, names = zip(*found, strict=True)
    if listener is None or None in hosts:
        raise OSError(f"rank {group.ranks[hosts.index(None)]} is not on Linux, whose sockets and memory files it takes")
    if len(set(hosts)) > 1:
        other = next(place for place, each in enumerate(hosts) if each != hosts[0])
        raise OSError(
            f"ranks {group.ranks[0]} and {group.ranks[other]} are on different hosts, or in different containers"
        )
    with listener:
        return Neighbours(_connect(listener, names, group.place, timeout_s), group.ranks, timeout_s)


def _listen(name: str, size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name)
    listener.listen(size)
    return listener


def _connect(listener: socket.socket, names: Sequence[str], own: int, timeout_s: float) -> dict[int, socket.socket]:
    """Calls those before this rank and is called by those behind it, who know its name from no one else."""
    sockets = {}
    for place in range(own):
        sockets[place] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sockets[place].connect(names[place])
        sockets[place].send(_HELLO.pack(own))
    listener.settimeout(timeout_s)
    while len(sockets) < len(names) - 1:
        connection, _ = listener.accept()
        connection.settimeout(timeout_s)
        [place] = _HELLO.unpack(connection.recv(_HELLO.size))
        sockets[place] = connection
    return sockets


def _host_identity() -> str | None:
    """What ranks share that can connect: a running system, its network names, and a user. None where this is no Linux."""
    if sys.platform != "linux":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"
