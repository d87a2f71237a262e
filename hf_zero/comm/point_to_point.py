"""Reduce-scatter and all-gather by send and receive, straight from and into the flat buffer.

gloo has no reduce-scatter of its own: the stock one is an all-reduce and a copy, twice the bytes on the wire. Here each
rank sends a peer the peer's part and adds what it receives in rank order, so that the sum does not depend on timing.
"""

from collections.abc import Mapping, Sequence

import torch

from ..kernels.reduce import sum_in_rank_order
from .collectives import CollectiveTransport
from .control.transfers import Transfers, finish_abandoned
from .groups.groups import Groups, RankGroup
from .ledger import Ledger
from .profiling import shown
from .transport import Handle, Label

_REDUCE_TAG, _GATHER_TAG, _EXCHANGE_TAG = 0x5A450000, 0x5A460000, 0x5A470000
"""Keep our messages apart from sends of the script's own in the same process group; the channel is added."""


class PointToPointTransport(CollectiveTransport):
    """The transport for gloo on host tensors. Broadcasts and all-reduces stay gloo's own."""

    adds_in_wider = True

    def __init__(self, groups: Groups, timeout_s: float, ledger: Ledger | None = None):
        super().__init__(groups, ledger)
        self._timeout_s = timeout_s
        self._control_group = groups.control_group
        # Of a rank in the control group, which is of all ranks of the world.
        self._places = {rank: place for place, rank in enumerate(groups.world.ranks)}
        finish_abandoned(timeout_s)

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        if self._groups.shard.size < self._groups.world.size:
            return super().agree_sum(values, label)
        return self._start_swap(values, label)().sum(0)

    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        parts = list(flat.chunk(group.size))
        received = {peer: torch.empty_like(parts[peer]) for peer in group.peers[1:]}
        # `out` takes the first peer's part, unless it lies in `flat` itself or has another dtype.
        first = group.peers[0]
        received[first] = out if self._is_scratch(out, flat) else torch.empty_like(parts[first])
        transfers = self._start(_REDUCE_TAG, label, group, received, parts)

        def complete() -> None:
            transfers.wait()
            received[group.place] = parts[group.place]
            sum_in_rank_order([received[place] for place in range(group.size)], out)

        return Handle(label, self.ledger, complete)

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        parts = flat.chunk(group.size)
        transfers = self._start(_GATHER_TAG, label, group, parts, [own] * group.size)
        if own.data_ptr() != parts[group.place].data_ptr():
            parts[group.place].copy_(own)
        return Handle(label, self.ledger, transfers.wait)

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        parts, places = flat.chunk(group.size), out.chunk(group.size)
        transfers = self._start(_EXCHANGE_TAG, label, group, places, parts)
        places[group.place].copy_(parts[group.place])
        return Handle(label, self.ledger, transfers.wait)

    def _start(
        self,
        tag: int,
        label: Label,
        group: RankGroup,
        received: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        sent: Sequence[torch.Tensor],
    ) -> Transfers:
        """Receives from each peer and sends to it what is at its place."""
        tag += label.channel
        ranks, control = group.ranks, self._control_group
        with self.watch.inside(label), shown("start", label), self._unseen():
            works = [(ranks[p], control.recv([received[p]], self._places[ranks[p]], tag)) for p in group.peers]
            works += [(ranks[p], control.send([sent[p]], self._places[ranks[p]], tag)) for p in group.peers]
        return Transfers(works, self._timeout_s)

    @staticmethod
    def _is_scratch(out: torch.Tensor, flat: torch.Tensor) -> bool:
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        return out.dtype == flat.dtype and not begin <= out.data_ptr() < end
