"""torch.distributed's own flat collectives, asynchronous: what NCCL and other device backends are best at."""

import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist

from .control.collective_log import ENDED
from .control.control import control_of
from .control.gather_order import GatherOrder
from .control.lookout import Lookout, watch_over
from .control.meetings import Meetings
from .groups.groups import Groups, RankGroup
from .ledger import Ledger
from .profiling import hidden_from_profiler, shown
from .transport import Handle, Label, Transport, Value

# torch 2.13 has renamed them.
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""`(output, input, op, group, async_op)` on contiguous tensors."""

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""`(output, input, group, async_op)` on contiguous tensors."""


class CollectiveTransport(Transport):
    """One call of the backend a bucket. Works on any backend; on gloo its reduce-scatter moves twice what it must."""

    def __init__(self, groups: Groups, ledger: Ledger | None = None):
        super().__init__(ledger or Ledger(watch=watch_over(groups)))
        self._groups = groups
        # Ranks of a group → how many of this rank's peers there are on other nodes.
        self._elsewhere: dict[tuple[int, ...], int] = {}
        # Device backends note the end of a work object at once, for the device to pass.
        self._unseen = hidden_from_profiler if groups.backend == "gloo" else nullcontext
        self._gathers = GatherOrder(groups.gather.ranks)
        self._control = control_of(groups, self.watch, self._gathers)
        self._name = self.exchange(uuid.uuid4().hex, "exchange of a name")[0]
        watch = self.watch
        self._meetings = Meetings(groups.world, watch, self._name) if isinstance(watch, Lookout) else None

    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        target = out if out.dtype == flat.dtype else torch.empty(out.shape, dtype=flat.dtype, device=flat.device)
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = reduce_scatter_flat(target, flat, op=dist.ReduceOp.SUM, group=group.handle, async_op=True)

        def complete() -> None:
            work.wait()
            if target is not out:
                out.copy_(target)

        return Handle(label, self.ledger, complete)

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.gather
        self._count(label, group, flat.nbytes)
        self._gathers.note(str(label))
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = all_gather_flat(flat, own, group=group.handle, async_op=True)
        return Handle(label, self.ledger, lambda: work.wait())

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        self._count(label, group, flat.nbytes)
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = dist.all_to_all_single(out, flat, group=group.handle, async_op=True)
        return Handle(label, self.ledger, lambda: work.wait())

    def start_all_reduce(self, flat: torch.Tensor, label: Label) -> Handle:
        self._count(label, self._groups.replicate, 2 * flat.nbytes)
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = dist.all_reduce(flat, group=self._groups.replicate.handle, async_op=True)
        return Handle(label, self.ledger, lambda: work.wait())

    def broadcast(self, tensor: torch.Tensor, label: Label) -> None:
        sent = tensor.nbytes if self._groups.rank == 0 else 0
        entry = self.ledger.count(label, sent, sent if len(set(self._groups.nodes)) > 1 else 0)
        with self.ledger.waiting(label.kind), self.watch.inside(label):
            # Backends have few dtypes: NCCL no int16, gloo no bool.
            values = tensor.detach().contiguous()
            dist.broadcast(
                values.view(-1).view(torch.uint8), src=self._groups.world.ranks[0], group=self._groups.world.handle
            )
        entry[ENDED] = time.monotonic()
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        self._count(label, self._groups.shard, 2 * values.nbytes)
        result = values.clone()
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = dist.all_reduce(result, group=self._groups.shard.handle, async_op=True)
        Handle(label, self.ledger, lambda: work.wait()).finish()
        return result

    def start_agree_max(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        take = self._start_swap(values, label)
        return lambda: take().amax(0)

    def meet(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        if self._meetings is not None:
            self._meetings.meet(purpose, timeout_s, alone)
            self.exchange(None, purpose)

    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        return self._control.exchange(value, purpose)

    def _start_swap(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        """Sends this rank's small host tensor; the result waits for every rank's, and returns them in rank order."""
        self._count(label, self._groups.world, self._groups.world.size * values.nbytes)
        entry, take = self.ledger.began(label), self._control.start_swap(values, label)

        def wait() -> torch.Tensor:
            with self.ledger.finishing(label.kind, entry):
                return take()

        return wait

    def _count(self, label: Label, group: RankGroup, nbytes: int) -> None:
        """Notes a collective in which this rank sends each peer of the group its part of `nbytes`.

        A backend may pass parts on from rank to rank; which link they take is then its own affair, and their number the same.
        """
        size, elsewhere = len(group.ranks), self._elsewhere.get(group.ranks)
        if elsewhere is None:
            elsewhere = self._elsewhere[group.ranks] = self._groups.peers_elsewhere(group)
        sent = nbytes * (size - 1) // size
        between = sent * elsewhere // max(size - 1, 1)
        self.ledger.count(label, sent, between)
