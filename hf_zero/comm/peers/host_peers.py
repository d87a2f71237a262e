"""Memory that the ranks of one host can read: files that exist in memory only, mapped by all of them.

A gather through gloo copies each byte into the system and out of it again, with a connection in between; here it is one
copy from a peer's pages, by a thread beside training. Such a file has no name: nothing is left of it in /dev/shm or elsewhere,
however the processes end, and neither is it bounded by the size of that folder.
"""

import os
import queue
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ...layout.intervals import Interval
from ..groups.failures import PeerFailure
from ..groups.groups import Groups
from ..transport import Handle, Label, Transport
from .neighbours import Neighbours, Signal, meet_neighbours
from .peer_memory import PeerMemory, SharedBuffer

_JOIN_S = 5.0


@dataclass(eq=False)
class _Gather:
    """One that has been started.

    Attributes:
        parts: of `flat`, and what is to be copied there, by place.
        channel: of its signals.
        ended: what its handle waits for.
    """

    parts: list[tuple[torch.Tensor, torch.Tensor]]
    channel: int
    ended: Future = field(default_factory=Future)


class _Copies:
    """The work of the thread that copies: gathers one after the other, in the order in which they were started."""

    def __init__(self, neighbours: Neighbours, place: int, size: int):
        self._neighbours = neighbours
        self._place = place
        # Each rank begins with another peer, so that not all read from one.
        self._order = [(place + step) % size for step in range(1, size)]
        self._gathers: queue.SimpleQueue[_Gather | None] = queue.SimpleQueue()

    def put(self, gather: _Gather | None) -> None:
        """None: nothing more will come."""
        self._gathers.put(gather)

    def run(self) -> None:
        while (gather := self._gathers.get()) is not None:
            try:
                self._copy(gather)
            except PeerFailure as error:
                gather.ended.set_exception(error.with_traceback(None))
            except (OSError, RuntimeError) as error:
                gather.ended.set_exception(RuntimeError(str(error)))
            else:
                gather.ended.set_result(None)
            # Not kept while the next one is waited for: it holds a layer's memory.
            del gather

    def _copy(self, gather: _Gather) -> None:
        _copy_bytes(*gather.parts[self._place])
        for place in self._order:
            self._neighbours.wait_for(place, Signal.READY, gather.channel)
            _copy_bytes(*gather.parts[place])
            self._neighbours.answer(place, Signal.TAKEN, gather.channel)
        for place in self._order:
            self._neighbours.wait_for(place, Signal.TAKEN, gather.channel)


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    # Not `copy_`: in a thread of its own that would start as many further threads as torch may take for an operation.
    if target.data_ptr() != source.data_ptr():
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


class HostPeers(PeerMemory):
    """Ranks of one host that train on it. Building it is collective, and tries it.

    Args:
        transport: of the ranks that take each step together.
        timeout_s: how long a peer is waited for.

    Raises:
        OSError, RuntimeError: it cannot be had on this rank, or between these.
    """

    def __init__(self, groups: Groups, transport: Transport, timeout_s: float):
        super().__init__(groups, transport.ledger)
        self._neighbours = meet_neighbours(self.group, transport, timeout_s)
        self._copies = _Copies(self._neighbours, self.group.place, self.group.size)
        thread = threading.Thread(target=self._copies.run, name="hf_zero copies of peers' memory", daemon=True)
        thread.start()
        # At the end of the process nothing has to be let go, and gathers that are under way then may still be waited for.
        weakref.finalize(self, _let_go, self._neighbours, self._copies, thread).atexit = False
        self._try_it()

    def share(self, numel: int, dtype: torch.dtype, parts: Sequence[Interval]) -> SharedBuffer:
        own = os.memfd_create("hf_zero", os.MFD_CLOEXEC)
        descriptors = {self.group.place: own}
        try:
            os.ftruncate(own, numel * dtype.itemsize)
            descriptors |= self._neighbours.swap_files(own)
            # A mapping outlives the descriptors, of which a process may have a thousand or so.
            buffers = [_map(descriptors[place], numel, dtype) for place in range(self.group.size)]
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return SharedBuffer(
            own=buffers[self.group.place],
            parts=tuple(buffer[part.start : part.stop] for buffer, part in zip(buffers, parts, strict=True)),
        )

    def _start(self, flat: torch.Tensor, shared: SharedBuffer, label: Label) -> Handle:
        gather = _Gather(list(zip(flat.chunk(self.group.size), shared.parts, strict=True)), label.channel)
        for place in self._neighbours.places:
            self._neighbours.tell(place, Signal.READY, gather.channel)
        self._copies.put(gather)
        # The handle keeps this object until then, and with it the thread.
        return Handle(label, self._ledger, partial(self._finish, gather))

    def _finish(self, gather: _Gather) -> None:
        gather.ended.result()

    def _try_it(self) -> None:
        """A gather of each rank's place."""
        size = self.group.size
        shared = self.share(1, torch.int32, [Interval(0, 1)] * size)
        shared.own.fill_(self.group.place)
        found = torch.full((size,), -1, dtype=torch.int32)
        self._start(found, shared, Label(kind="all-gather a trial", subject="peers' memory")).finish()
        if found.tolist() != list(range(size)):
            raise RuntimeError(f"a trial read {found.tolist()} from the memory of {size} ranks")


def _map(descriptor: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An open file's elements, for all who map it."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=numel, dtype=dtype)


def _let_go(neighbours: Neighbours, copies: _Copies, thread: threading.Thread) -> None:
    """Ends the thread first: the peers take the end of a connection for the end of all reading."""
    neighbours.is_closing = True
    copies.put(None)
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)
    neighbours.close()
