"""Reduce-scatter and all-gather by send and receive, directly from and into the flat buffer.

gloo has no real reduce-scatter: its version is an all-reduce and a copy, which sends twice the bytes. Here each rank sends
each peer the peer's part, and adds the received parts in rank order, so the sum does not depend on timing.
"""

from collections.abc import Mapping, Sequence

import torch

from ..arithmetic.sums import sum_in_rank_order
from .collective import CollectiveTransport
from .control import Transfers, finish_abandoned
from .groups import Groups, RankGroup
from .ledger import Ledger
from .transport import Handle
from .waits import Label

_REDUCE_TAG, _GATHER_TAG, _EXCHANGE_TAG = 0x5A450000, 0x5A460000, 0x5A470000
"""Distinguish our messages from the script's own sends in the same process group. The channel is added to the tag."""


class PointToPointTransport(CollectiveTransport):
    """Sends and receives host tensors over gloo. Broadcasts and all-reduces remain gloo's own."""

    adds_in_wider = True

    def __init__(self, groups: Groups, timeout_s: float, ledger: Ledger | None = None):
        super().__init__(groups, ledger)
        self._timeout_s = timeout_s
        self._control_group = groups.control_group
        # Indices in the control group, which contains all ranks of the world.
        self._control_index = {rank: index for index, rank in enumerate(groups.world.ranks)}
        # Otherwise messages of a dropped engine could be mistaken for messages of this one.
        finish_abandoned(timeout_s)

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        if self._groups.shard.size < self._groups.world.size:
            return super().agree_sum(values, label)
        return self._start_swap(values, label)().sum(0)

    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        entry = self._count(label, group, flat.nbytes)
        parts = list(flat.chunk(group.size))
        received = {peer: torch.empty_like(parts[peer]) for peer in group.peers[1:]}
        # `out` receives the first peer's part, unless `out` is a part of `flat` or has another dtype.
        first = group.peers[0]
        received[first] = out if self._is_scratch(out, flat) else torch.empty_like(parts[first])
        arrivals = [*received.values(), parts[group.index]]
        noted = None if self.wire is None else self.wire.over(label, parts, arrivals)
        transfers = self._start(_REDUCE_TAG, label, group, received, parts)
        wait = transfers.wait if noted is None else noted(transfers.wait)

        def complete() -> None:
            # Wait for all parts before adding: a sum in the order of arrival would depend on timing.
            wait()
            received[group.index] = parts[group.index]
            sum_in_rank_order([received[index] for index in range(group.size)], out)

        return Handle(label, self.ledger, complete, entry=entry)

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        entry = self._count(label, group, flat.nbytes)
        parts = flat.chunk(group.size)
        noted = None if self.wire is None else self.wire.over(label, [own], parts, copies=group.size)
        transfers = self._start(_GATHER_TAG, label, group, parts, [own] * group.size)
        if own.data_ptr() != parts[group.index].data_ptr():
            # Copy after the start, while the messages are being sent.
            parts[group.index].copy_(own)
        return Handle(label, self.ledger, transfers.wait if noted is None else noted(transfers.wait), entry=entry)

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        entry = self._count(label, group, flat.nbytes)
        parts, targets = flat.chunk(group.size), out.chunk(group.size)
        noted = None if self.wire is None else self.wire.over(label, parts, targets)
        transfers = self._start(_EXCHANGE_TAG, label, group, targets, parts)
        targets[group.index].copy_(parts[group.index])
        return Handle(label, self.ledger, transfers.wait if noted is None else noted(transfers.wait), entry=entry)

    def _start(
        self,
        tag: int,
        label: Label,
        group: RankGroup,
        received: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        sent: Sequence[torch.Tensor],
    ) -> Transfers:
        """Receives a part from each peer and sends each peer its part."""
        tag += label.channel
        ranks, control = group.ranks, self._control_group
        with self._starting(label):
            # Post all receives before all sends: a peer's send starts once its receive is posted.
            works = [(ranks[p], control.recv([received[p]], self._control_index[ranks[p]], tag)) for p in group.peers]
            works += [(ranks[p], control.send([sent[p]], self._control_index[ranks[p]], tag)) for p in group.peers]
        return Transfers(works, self._timeout_s)

    @staticmethod
    def _is_scratch(out: torch.Tensor, flat: torch.Tensor) -> bool:
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        return out.dtype == flat.dtype and not begin <= out.data_ptr() < end
