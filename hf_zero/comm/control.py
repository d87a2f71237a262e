"""Small values between the ranks, from host to host, in messages that say what they are for.

[Note: a rank that comes alone]
Where ranks call different collectives of gloo, each takes the other's message for its own, and one of another size ends the
process in gloo's thread. Here a message carries the purpose and the number of its exchange, so that ranks that have come to
different ones know it at once, and both say so.
"""

import pickle
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .failures import CommunicationError
from .groups import Groups
from .profiling import hidden_from_profiler
from .transfers import Transfers
from .watch import Watch
from .whereabouts import script_line

_MESSAGE_BYTES = 1024
_HEAD = struct.Struct("<QQH")
_LONGEST_PURPOSE = 200
_TAG, _TAG_OF_THE_REST = 0x5A480000, 0x5A490000


class Control:
    """Exchanges between all ranks of some groups.

    Each rank sends to each other one: a message, and the rest of what does not fit.

    Args:
        watch: is told of each wait.
    """

    def __init__(self, groups: Groups, watch: Watch):
        self._group = groups.control
        self._timeout_s = groups.timeout_s
        self._watch = watch
        self._ranks = groups.world.ranks
        self._place = groups.world.place
        self._peers = groups.world.peers
        self._count = 0

    def exchange(self, value: object, purpose: str) -> list[object]:
        """Every rank's picklable value, in rank order.

        Raises:
            CommunicationError: a rank does not come in time, has ended, or came for another purpose.
        """
        with self._watch.inside(purpose):
            everyone = self._swap(pickle.dumps(value), purpose)
        return [value if place == self._place else pickle.loads(data) for place, data in enumerate(everyone)]

    def swap(self, values: torch.Tensor, purpose: object) -> torch.Tensor:
        """Every rank's small tensor in host memory, one beside the other in rank order. Errors: as of `exchange`."""
        with self._watch.inside(purpose):
            everyone = self._swap(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), str(purpose))
        return torch.stack([torch.frombuffer(data, dtype=values.dtype) for data in everyone]).view(-1, *values.shape)

    def _swap(self, data: bytes, purpose: str) -> list[bytearray]:
        self._count += 1
        name = purpose.encode()[:_LONGEST_PURPOSE]
        head = _HEAD.pack(len(data), self._count, len(name)) + name
        room = _MESSAGE_BYTES - len(head)
        message = _bytes(head + data[:room] + bytes(max(0, room - len(data))))
        rest = _bytes(data[room:])
        sends = self._send(message, _TAG) + (self._send(rest, _TAG_OF_THE_REST) if rest.numel() else [])
        messages = {place: torch.empty(_MESSAGE_BYTES, dtype=torch.uint8) for place in self._peers}
        arriving = Transfers(self._receive(messages, _TAG), self._timeout_s)
        sent = Transfers(sends, self._timeout_s)
        arriving.wait()
        parts = {place: self._open(place, message.numpy().tobytes(), purpose) for place, message in messages.items()}
        rests = {place: torch.empty(more, dtype=torch.uint8) for place, (_, more) in parts.items() if more}
        Transfers(self._receive(rests, _TAG_OF_THE_REST), self._timeout_s).wait()
        sent.wait()
        found = {
            place: part + (rests[place].numpy().tobytes() if more else b"") for place, (part, more) in parts.items()
        }
        found[self._place] = data
        return [bytearray(found[place]) for place in range(len(self._ranks))]

    def _open(self, place: int, message: bytes, purpose: str) -> tuple[bytes, int]:
        """What a message has, and how many bytes are to come."""
        numel, count, length = _HEAD.unpack_from(message)
        end = _HEAD.size + length
        theirs = message[_HEAD.size : end].decode(errors="replace")
        if theirs != purpose.encode()[:_LONGEST_PURPOSE].decode(errors="replace") or count != self._count:
            raise CommunicationError(
                f"hf_zero: the ranks came to different collectives: rank {self._ranks[self._place]} to the {purpose} "
                f"({script_line()[0]}), and rank "
                f"{self._ranks[place]} to the {theirs}. Each is collective: call it on every rank, in the same order, outside of "
                "`if is_main_process`."
            )
        return message[end : end + numel], max(0, numel - (_MESSAGE_BYTES - end))

    def _send(self, data: torch.Tensor, tag: int) -> list[tuple[int, dist.Work]]:
        ranks = [self._ranks[place] for place in self._peers]
        with hidden_from_profiler():
            return [(rank, dist.isend(data, dst=rank, group=self._group, tag=tag)) for rank in ranks]

    def _receive(self, into: dict[int, torch.Tensor], tag: int) -> Sequence[tuple[int, dist.Work]]:
        ranks = {place: self._ranks[place] for place in into}
        with hidden_from_profiler():
            return [
                (ranks[place], dist.irecv(data, src=ranks[place], group=self._group, tag=tag))
                for place, data in into.items()
            ]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class PretendedControl:
    """Of torch's fake backend, which sends nothing: every other rank says what this one says."""

    def __init__(self, groups: Groups):
        self._size = groups.world.size

    def exchange(self, value: object, purpose: str) -> list[object]:
        return [value] * self._size

    def swap(self, values: torch.Tensor, purpose: object) -> torch.Tensor:
        return values.expand(self._size, *values.shape)


def control_of(groups: Groups, watch: Watch) -> Control | PretendedControl:
    """What the ranks of these groups agree by."""
    return PretendedControl(groups) if groups.backend == "fake" else Control(groups, watch)
