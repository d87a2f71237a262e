"""The collectives called by the engine, their handles, and the transports for NCCL, for gloo, and for a single rank."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from ..device import SideQueue
from ..presence.store_barrier import StoreBarrier, call_of
from ..presence.watchdog import Watchdog, watch_over
from .all_or_none import Merged
from .collective_log import ENDED
from .control import GatherOrder, control_of, rounds
from .groups import Groups, RankGroup
from .ledger import Label, Ledger, Wait, Watch
from .profiler_ranges import hidden_from_profiler, shown
from .wire_sums import WireSums

# ---- The interface of a transport, and its handles ----


class Handle:
    """A started collective. `finish` waits for its end once; later calls return at once.

    Until then, the buffers passed to `start_…` belong to the transport.

    Attributes:
        start_last: if the collective has several steps, starts the last step after waiting for the earlier ones. Does nothing
            for a collective of one step.

    Args:
        entry: the collective's entry in the ledger's log; None for the last entry with this label.
    """

    start_last: Callable[[], None] = staticmethod(lambda: None)
    _has_begun = False

    def __init__(
        self,
        label: Label,
        ledger: Ledger,
        complete: Callable[[], object],
        start_last: Callable[[], None] | None = None,
        entry: list[Any] | None = None,
    ):
        if start_last is not None:
            self.start_last = start_last
        self._label = label
        self._ledger = ledger
        self._complete: Callable[[], object] | None = complete
        self._entry = entry or ledger.log.latest(label)
        if ledger.is_timed:
            self._has_begun = ledger.began(label)

    def finish(self, *, is_exposed: bool = True) -> None:
        """Waits for the end of the collective.

        Args:
            is_exposed: False for a wait in parallel with training, which does not count as exposed communication.

        Raises:
            CommunicationError: a peer failed, or did not arrive within the group's time limit.
        """
        complete = self._complete
        if complete is None:
            return
        # Clear before the call: after an error, a second `finish` would wait for a broken group.
        self._complete = None
        ledger, entry = self._ledger, self._entry
        if not (ledger.is_timed or profiler._is_profiler_enabled):
            # Fast path: the same as below, without contexts. Waits on an accelerator are untimed until somebody asks for times.
            ledger.watch.during(self._label, complete, ends=entry)
            return
        label = self._label
        counted = ledger.finishing(label.kind, entry, has_begun=self._has_begun, is_exposed=is_exposed)
        with counted, ledger.watch.inside(label), shown("wait for", label):
            complete()


Value = TypeVar("Value")


class Transport(ABC):
    """Moves flat, contiguous buffers between the ranks of one engine.

    `start_…` returns at once with a `Handle`. All ranks must start the same collectives in the same order. Each method raises
    `CommunicationError` if a peer has already ended.

    Args:
        ledger: counts the collectives; by default a new ledger.

    Attributes:
        adds_in_wider: whether a reduce-scatter into a wider dtype adds in the wider dtype, and so rounds less. Otherwise the sum
            is first rounded to the dtype of the summands.
        watch: knows which collective this rank is waiting in.
        wire: notes checksums of the sent and received messages; None to note nothing.
    """

    adds_in_wider: bool = False
    wire: WireSums | None = None

    def __init__(self, ledger: Ledger | None = None):
        self.ledger = ledger or Ledger()
        self.watch: Watch = self.ledger.watch

    @property
    def name(self) -> str:
        """The name of the transport in tables."""
        return type(self).__name__

    @abstractmethod
    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        """Sums `flat` (ranks x n elements) over the ranks; this rank's n elements are written to `out`.

        `out` may be this rank's part of `flat`. The other parts of `flat` are undefined afterwards. The ranks are `among`, by
        default the shard group.
        """

    @abstractmethod
    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        """Fills `flat` (ranks x n elements) with the n elements `own` of each rank, in rank order.

        `own` may be this rank's part of `flat`. The ranks are `among`, by default the shard group.
        """

    @abstractmethod
    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        """Sends part i of `flat` (ranks x n elements) to the i-th rank; `out` receives one part from each rank.

        `out` has the shape of `flat`, in different memory. The ranks are `among`, by default the shard group.
        """

    @abstractmethod
    def start_all_reduce(self, flat: torch.Tensor, label: Label) -> Handle:
        """Sums `flat` over the replicate group in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, label: Label, source: int | None = None) -> None:
        """Copies rank 0's `tensor` to all ranks in place. With a `source`, copies from this shard rank to the shard group."""

    @abstractmethod
    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Returns the elementwise sum of a small tensor over the shard group, on the tensor's device."""

    def agree_largest(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the largest of the ranks' float64 scalars, on the scalar's device; NaN if one of them is NaN."""
        # Python's `max` ignores a NaN at any position after the first.
        return value.new_tensor(self.exchange(value.item())).max()

    @abstractmethod
    def start_agree_max(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        """Sends a small host tensor to the other ranks, without using the device's queue.

        Returns:
            A function to be called once. It waits for the other ranks' tensors, and returns the elementwise maximum of all.
        """

    def agree_max(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Returns the elementwise maximum of a small host tensor over the ranks, without using the device's queue."""
        return self.start_agree_max(values, label)()

    @abstractmethod
    def barrier(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """Waits until every rank has called `barrier` for the same purpose.

        Args:
            alone: for the error, how to do the same on one rank only: "wrap the call in ...".

        Raises:
            CommunicationError: within `timeout_s`, on the ranks that called, if other ranks did not call or had another purpose.
        """

    @abstractmethod
    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        """Returns every rank's picklable `value`, in rank order.

        Args:
            purpose: the same on all ranks. If ranks pass different purposes, all of them raise an error.
        """

    @abstractmethod
    def merge(self, value: Merged, purpose: str = "merge of values") -> Merged:
        """Returns every rank's picklable `value`, merged into one on the way, so that messages do not hold a value of each rank.

        Args:
            purpose: as of `exchange`.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class DataParallelGroup:
    """Ranks with the same part of the model which step together: they share the state and sum the gradients.

    Attributes:
        groups, transport: of these ranks.
        all_groups, all_transport: of all ranks with this part. With `comm.sync_every` there are more of them than in
            `groups`, and only outer steps make the values of all of them equal.
    """

    groups: Groups
    transport: Transport
    all_groups: Groups
    all_transport: Transport

    @property
    def is_first(self) -> bool:
        """Whether this rank is in the first of the groups with the same state."""
        return self.all_groups.rank == self.all_groups.shard_rank


# ---- The transport of a single rank, which sends nothing ----


class LocalTransport(Transport):
    """The transport for a world size of 1, with or without a process group."""

    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        if out.data_ptr() != flat.data_ptr() or out.dtype != flat.dtype:
            out.copy_(flat)
        return self._nothing(label)

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        if own.data_ptr() != flat.data_ptr():
            flat.copy_(own)
        return self._nothing(label)

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        out.copy_(flat)
        return self._nothing(label)

    def start_all_reduce(self, flat: torch.Tensor, label: Label) -> Handle:
        return self._nothing(label)

    def broadcast(self, tensor: torch.Tensor, label: Label, source: int | None = None) -> None:
        """Does nothing: a single rank already has its own values."""

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        return values

    def agree_largest(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def start_agree_max(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        return lambda: values

    def barrier(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """Returns at once: a single rank is all ranks."""

    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        return [value]

    def merge(self, value: Merged, purpose: str = "merge of values") -> Merged:
        return value

    def _nothing(self, label: Label) -> Handle:
        return Handle(label, self.ledger, lambda: None)


# ---- Collectives of several steps: each step needs the result of the step before ----
#
# [Note: the order of steps] A step may start when the previous step has ended, but nobody is notified of this moment. So the
# engine advances the steps when the next collective begins, and when a result is needed. No collective leaves its first step
# before all older ones are at their last step. So on every rank all later steps start in the same order, whichever result the
# rank needs first, and all steps except the last run in parallel with backward.
#
# On an accelerator, a later step waits for the previous one in a side queue. In the computing queue, this wait would delay the
# backward of the next bucket until the first step has ended.

Start = Callable[[], Handle]


class Steps:
    """A collective of several steps: the running step, and the later ones.

    Args:
        order: keeps the order of all collectives of several steps.
        queue: the side queue in which later steps wait for the previous step; None is the computing queue.
    """

    def __init__(self, order: "StepsInOrder", first: Start, later: tuple[Start, ...], queue: SideQueue | None):
        self._order = order
        # A wait in a side queue does not order the computing queue. The memory of the first step must not be reallocated to the
        # computing queue before that queue waits, too, so this reference keeps the memory until `finish`.
        self._first: Start | None = first
        self._running = first()
        self._later = list(later)
        self._queue = queue

    @property
    def is_at_its_last(self) -> bool:
        return not self._later

    def advance(self) -> None:
        """Waits for the running step and starts the next."""
        if self._queue is None:
            self._running.finish()
            self._running = self._later.pop(0)()
            return
        # Wait in the side queue: the computing queue must not stop here, in the middle of backward.
        with self._queue.aside():
            self._running.finish(is_exposed=False)
            self._running = self._later.pop(0)()

    def start_last(self) -> None:
        """Waits for all steps except the last, and starts the last."""
        self._order.reach_last(self)

    def finish(self) -> None:
        """Waits for the end of the last step."""
        self._order.reach_last(self)
        self._running.finish()
        self._first = None


class StepsInOrder:
    """Starts the steps of all collectives in the same order on every rank.

    Attributes:
        may_advance: whether `begin` may wait for running steps.
    """

    def __init__(self):
        self._under_way: list[Steps] = []
        self.may_advance = True

    def begin(self, first: Start, *later: Start, queue: SideQueue | None = None) -> Steps:
        """Starts another collective, and advances the running ones by one step, as far as their order allows.

        Args:
            queue: the side queue in which each of `later` waits for the previous step; None is the computing queue.
        """
        for steps in self._under_way if self.may_advance else ():
            steps.advance()
            if not steps.is_at_its_last:
                break
        self._forget_those_at_their_last()
        steps = Steps(self, first, later, queue)
        if later:
            self._under_way.append(steps)
        return steps

    def reach_last(self, steps: Steps) -> None:
        """Starts the last step of a collective, and of all older ones."""
        if steps in self._under_way:
            for older in self._under_way[: self._under_way.index(steps) + 1]:
                while not older.is_at_its_last:
                    older.advance()
            self._forget_those_at_their_last()

    def _forget_those_at_their_last(self) -> None:
        self._under_way = [steps for steps in self._under_way if not steps.is_at_its_last]


# ---- torch.distributed's own flat collectives, asynchronous: the fastest choice with NCCL and other device backends ----

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
        # Device backends record the end of a work object at once. gloo records it later; see `hidden_from_profiler`.
        self._unseen = hidden_from_profiler if groups.backend == "gloo" else nullcontext
        self._gathers = GatherOrder(groups.gather.ranks)
        self._control = control_of(groups, self.watch, self._gathers)
        self._name = self.exchange(uuid.uuid4().hex, "exchange of a name")[0]
        watch = self.watch
        self._barrier = StoreBarrier(groups.world, watch, self._name) if isinstance(watch, Watchdog) else None

    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        target = out if out.dtype == flat.dtype else torch.empty(out.shape, dtype=flat.dtype, device=flat.device)
        entry, work = self._start_work(label, reduce_scatter_flat, target, flat, group)
        if target is out:
            return Handle(label, self.ledger, work.wait, None, entry)

        def complete() -> None:
            work.wait()
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
        if self._barrier is not None:
            self._barrier.wait(purpose, timeout_s, alone)
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
