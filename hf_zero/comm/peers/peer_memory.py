"""All-gathers without a collective: each rank copies the shards out of memory that its peers share.

[Note: who may write when]
A gather has two signals between each two ranks. "Ready": what I have written into my part before I started the gather is there
to be read. "Taken": I have copied your part. A rank copies a peer's part behind that peer's "ready", and its own handle is
finished behind the "taken" of all peers. So an owner that keeps to the rule of every transport, to leave the buffers alone from
`start_…` to `finish`, writes its part when no peer reads it, and each peer reads what the owner wrote last before it started.
No rank waits for what a peer's script does in between: signals and copies are made beside it (by a thread on the host, by
a stream on a GPU), so ranks may finish gathers in different orders.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...layout.intervals import Interval
from ..groups.groups import Groups, RankGroup
from ..ledger import Ledger
from ..transport import Handle, Label


@dataclass(frozen=True, kw_only=True)
class SharedBuffer:
    """Memory of this rank that its peers can read, and theirs.

    Attributes:
        own: (numel,), zero or undefined at first.
        parts: by place in the group, the elements of each rank's memory that gathers take, this rank's too.
        signals: what its owner needs to tell the ranks of it.
    """

    own: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    signals: Any = None


class PeerMemory(ABC):
    """The ranks of the shard group, each of which can read what others share.

    Args:
        ledger: to count in.
    """

    def __init__(self, groups: Groups, ledger: Ledger):
        self.group: RankGroup = groups.gather
        self._groups = groups
        self._ledger = ledger

    @abstractmethod
    def share(self, numel: int, dtype: torch.dtype, parts: Sequence[Interval]) -> SharedBuffer:
        """Memory for `numel` elements on each rank, of which gathers will take `parts[place]`. Collective.

        All of it is shared before the first gather is started.
        """

    def start_all_gather(self, flat: torch.Tensor, shared: SharedBuffer, label: Label) -> Handle:
        """Fills `flat` (ranks x n elements) with each rank's part of `shared`, in the group's order.

        `flat` may be `shared.own`, where this rank's part has its place in it.
        """
        sent = flat.nbytes * (self.group.size - 1) // self.group.size
        between = sent * self._groups.peers_elsewhere(self.group) // (self.group.size - 1)
        self._ledger.count(label, sent, between)
        return self._start(flat, shared, label)

    @abstractmethod
    def _start(self, flat: torch.Tensor, shared: SharedBuffer, label: Label) -> Handle:
        """The same, uncounted."""
