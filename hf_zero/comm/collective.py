"""torch.distributed's own flat collectives, asynchronous: fastest on NCCL and the backends of other devices."""

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from time import monotonic
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from ..presence.watchdog import Watchdog, watch_over
from ..presence.watched_barrier import call_of, hold_barrier
from .all_or_none import Merged
from .collective_log import ENDED
from .control import GatherOrder, control_of, rounds
from .groups import Groups, RankGroup
from .ledger import Ledger
from .profiler_ranges import hidden_from_profiler, shown
from .transport import Handle, Transport, Value
from .waits import Label, Wait

# torch 2.13 renamed these functions.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# From torch 2.13 on, a process group has methods of the same names. The functions check their arguments before they call the
# methods, and the checks take longer on the host than the call.
_GROUPS_START = hasattr(dist.ProcessGroup, "all_gather_single")
_SUM, _GATHER = ReduceScatterOptions(), AllgatherOptions()
# The default operation is a sum, also for `_SUM`.
_SUM.asyncOp = _GATHER.asyncOp = True


def reduce_scatter_flat(
    output: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Sums contiguous tensors, as `reduce_scatter_tensor` of torch.distributed does."""
    if async_op and group is not None and _GROUPS_START:
        return group.reduce_scatter_single(output, flat, _SUM)
    return _reduce_scatter(output, flat, group=group, async_op=async_op)


def all_gather_flat(
    flat: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Gathers contiguous tensors, as `all_gather_into_tensor` of torch.distributed does."""
    if async_op and group is not None and _GROUPS_START:
        return group.all_gather_single(flat, own, _GATHER)
    return _all_gather(flat, own, group=group, async_op=async_op)


class CollectiveTransport(Transport):
    """Makes one backend call per bucket, on any backend. On gloo, its reduce-scatter moves twice the necessary bytes."""

    def __init__(self, groups: Groups, ledger: Ledger | None = None):
        super().__init__(ledger or Ledger(watch=watch_over(groups)))
        self._groups = groups
        self._tallies = self.watch.tallies
        world, nodes = groups.world, groups.nodes
        told = [
            world.ranks[(world.index + each) % world.size] for distances in rounds(world.size) for each in distances
        ]
        # Number of messages of this rank in an agreement, and of these the ones to other nodes.
        self._told = len(told), sum(nodes[each] != nodes[world.ranks[world.index]] for each in told)
        # Device backends record the end of a work object at once. gloo records the end later; see `hidden_from_profiler`.
        self._unseen = hidden_from_profiler if groups.backend == "gloo" else nullcontext
        self._gathers = GatherOrder(groups.gather.ranks)
        self._control = control_of(groups, self.watch, self._gathers)
        self._name = self.exchange(uuid.uuid4().hex, "exchange of a name")[0]
        self._barriers = 0

    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        if out.dtype == flat.dtype:
            if not _GROUPS_START or group.handle is None or profiler._is_profiler_enabled:
                entry, work = self._start_work(label, reduce_scatter_flat, out, flat, group)
            else:
                # The same, with fewer calls.
                entry = self._count(label, group, flat.nbytes)
                work = self.watch.during(label, group.handle.reduce_scatter_single, out, flat, _SUM)
            return Handle(label, self.ledger, work.wait, None, entry)
        target = torch.empty(out.shape, dtype=flat.dtype, device=flat.device)
        entry, wider = self._start_work(label, reduce_scatter_flat, target, flat, group)

        def complete() -> None:
            wider.wait()
            out.copy_(target)

        return Handle(label, self.ledger, complete, None, entry)

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.gather
        # Note the gather at its start, in the host's order: NCCL matches collectives by order only, without tags.
        self._gathers.note(label.words)
        noted = None if self.wire is None else self.wire.over(label, [own], flat.chunk(group.size), copies=group.size)
        entry, work = self._start_work(label, all_gather_flat, flat, own, group)
        return Handle(label, self.ledger, work.wait if noted is None else noted(work.wait), None, entry)

    def prepare_all_gather(self, flat: torch.Tensor, own: torch.Tensor, label: Label) -> Callable[[], Handle]:
        is_inherited = type(self).start_all_gather is CollectiveTransport.start_all_gather
        if not (_GROUPS_START and is_inherited) or self._groups.gather.handle is None:
            # An older torch, a group of one rank, or a subclass that starts gathers in another way.
            return super().prepare_all_gather(flat, own, label)
        return _RepeatedGather(self, self._gathers, self._groups.gather, flat, own, label).start

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        entry = self._count(label, group, flat.nbytes)
        noted = None if self.wire is None else self.wire.over(label, flat.chunk(group.size), out.chunk(group.size))
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = dist.all_to_all_single(out, flat, group=group.handle, async_op=True)
        return Handle(label, self.ledger, work.wait if noted is None else noted(work.wait), entry=entry)

    def start_all_reduce(self, flat: torch.Tensor, label: Label) -> Handle:
        entry = self._count(label, self._groups.replicate, 2 * flat.nbytes)
        with self._starting(label):
            work = dist.all_reduce(flat, group=self._groups.replicate.handle, async_op=True)
        return Handle(label, self.ledger, work.wait, entry=entry)

    def broadcast(self, tensor: torch.Tensor, label: Label, source: int | None = None) -> None:
        group, first = (self._groups.world, 0) if source is None else (self._groups.shard, source)
        sent = tensor.nbytes if group.index == first else 0
        entry = self.ledger.count(label, sent, sent if len(set(self._groups.nodes)) > 1 else 0)
        with self.ledger.waiting(label.kind), self.watch.inside(label):
            # Send bytes: backends support few dtypes (NCCL no int16, gloo no bool).
            values = tensor.detach().contiguous()
            dist.broadcast(values.view(-1).view(torch.uint8), src=group.ranks[first], group=group.handle)
        entry[ENDED] = monotonic()
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        entry = self._count(label, self._groups.shard, 2 * values.nbytes)
        # Clone the values: the all-reduce writes in place, and the caller keeps its own values.
        result = values.clone()
        with self._starting(label):
            work = dist.all_reduce(result, group=self._groups.shard.handle, async_op=True)
        Handle(label, self.ledger, work.wait, entry=entry).finish()
        return result

    def start_agree_max(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        receivers, elsewhere = self._told
        entry = self.ledger.count(label, receivers * values.nbytes, elsewhere * values.nbytes)
        return self._finishing(label, entry, self._control.start_swap(values, label))

    def barrier(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        if isinstance(self.watch, Watchdog):
            self._barriers += 1
            name = f"{self._name}/{self._barriers}"
            hold_barrier(self.watch, self._groups.world.ranks, name, purpose, timeout_s, alone)
            # The barrier only counts ranks. The exchange finds ranks with a different purpose.
            self.exchange(None, call_of(purpose))

    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        return self._control.exchange(value, purpose)

    def merge(self, value: Merged, purpose: str = "merge of values") -> Merged:
        return self._control.merge(value, purpose)

    def _start_swap(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        """Sends this rank's small host tensor. The returned function waits for all ranks' tensors, in rank order."""
        entry = self._count(label, self._groups.world, self._groups.world.size * values.nbytes)
        return self._finishing(label, entry, self._control.start_swap(values, label, stacks=True))

    def _finishing(
        self, label: Label, entry: list[Any], take: Callable[[], torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        """Notes a started swap; the returned function waits for the swap and notes its end."""
        has_begun = self.ledger.began(label)

        def wait() -> torch.Tensor:
            with self.ledger.finishing(label.kind, entry, has_begun=has_begun):
                return take()

        return wait

    def _starting(self, label: Label) -> AbstractContextManager[object]:
        """Opens a context for the start of a collective: the watch knows of the start, and a running profiler shows its name."""
        inside = Wait(label, self.watch)
        if not profiler._is_profiler_enabled:
            return inside
        stack = ExitStack()
        for each in (inside, shown("start", label), self._unseen()):
            stack.enter_context(each)
        return stack

    def _start_work(
        self, label: Label, start: Callable[..., Any], output: torch.Tensor, flat: torch.Tensor, group: RankGroup
    ) -> tuple[list[Any], Any]:
        """Counts a collective and starts it, as in the context of `_starting`.

        Returns:
            Its entry in the log, and torch's work.
        """
        # Of an all-gather, the output is larger; of a reduce-scatter, the input is.
        entry = self._count(label, group, max(output.nbytes, flat.nbytes))
        if not profiler._is_profiler_enabled:
            return entry, self.watch.during(label, start, output, flat, group.handle, True)
        with self._starting(label):
            return entry, start(output, flat, group.handle, True)

    def _count(self, label: Label, group: RankGroup, nbytes: int) -> list[Any]:
        """Counts a collective in which this rank sends each peer of the group its part of `nbytes`; returns the log entry.

        A backend may forward parts from rank to rank. It then chooses the links, but the number of bytes is the same.
        """
        tally = self._tallies.get(label.words)
        if tally is None or tally.group is not group or tally.nbytes != nbytes:
            tally, size = self.ledger.tally_of(label), group.size
            sent = nbytes * (size - 1) // size
            # `or 1`: a group of one rank sends nothing.
            between = sent * self._groups.peers_elsewhere(group) // (size - 1 or 1)
            tally.send(sent, between, group, nbytes)
        return self.ledger.note(label, tally)


class _RepeatedGather(Handle):
    """An all-gather of the same tensors in each step, and its handle. `start` does not look up what does not change.

    Args:
        order: the checksum of gathers.
    """

    def __init__(
        self,
        transport: CollectiveTransport,
        order: GatherOrder,
        group: RankGroup,
        flat: torch.Tensor,
        own: torch.Tensor,
        label: Label,
    ):
        self._transport, self._order = transport, order
        self._start = partial(transport.start_all_gather, flat, own, label)
        self._label, self._ledger = label, transport.ledger
        self._complete, self._entry = None, None
        self._call = partial(cast(Any, group.handle).all_gather_single, flat, own, _GATHER)
        self._words = label.words.encode()
        self._tally = transport.ledger.tally_of(label)
        self._sends: object = None

    def start(self) -> Handle:
        """Starts the gather, which must have finished before the next start."""
        ledger, tally = self._ledger, self._tally
        if (
            ledger.is_timed
            or profiler._is_profiler_enabled
            or self._transport.wire is not None
            or tally.sends is not self._sends
            or self._complete is not None
        ):
            # For another reader of these collectives, the first gather with this tally, or a gather that has not finished.
            handle, self._sends = self._start(), tally.sends
            return handle
        order = self._order
        order.checksum = crc32(self._words, order.checksum)
        self._entry = ledger.note(self._label, tally)
        self._complete = ledger.watch.during(self._label, self._call).wait
        return self
