"""The collectives that the engine calls, their handles, and the transports that send: NCCL's and gloo's ways, and one rank's."""

import hmac
import pickle
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from ..arithmetic.sums import sum_in_rank_order
from ..config import ConfigError
from ..device import SideQueue, clock
from .arrivals import CommunicationError
from .control import GatherOrder, Transfers, control_of, finish_abandoned, rounds
from .groups import Groups, RankGroup
from .ledger import ENDED, Label, Ledger, Wait, Watch, hidden_from_profiler, shown
from .store import CALL_S, Keys, StoreSilentError, StoreThread
from .watchdog import Watchdog, watch_over

# ---- The interface of a transport, and its handles ----


class Handle:
    """A started collective. `finish` waits for it once; later calls return at once.

    The buffers handed to `start_…` belong to the transport until then.

    Attributes:
        start_last: of several steps starts the last one, and waits for those before; nothing where there is one.

    Args:
        entry: of the collective in the ledger's log; None for the last one with this label.
    """

    def __init__(
        self,
        label: Label,
        ledger: Ledger,
        complete: Callable[[], object],
        start_last: Callable[[], None] = lambda: None,
        entry: list[Any] | None = None,
    ):
        self.start_last = start_last
        self._label = label
        self._ledger = ledger
        self._complete: Callable[[], object] | None = complete
        self._entry = ledger.began(label, entry)

    def finish(self, *, is_exposed: bool = True) -> None:
        """Waits for the collective's end.

        Args:
            is_exposed: False for a wait beside training, which counts as no exposed communication.

        Raises:
            CommunicationError: a peer failed or did not come within the group's time limit.
        """
        if self._complete is None:
            return
        # Cleared first: after an error, a second `finish` would wait for a group that is broken.
        complete, self._complete = self._complete, None
        label, ledger = self._label, self._ledger
        if not (ledger.is_timed or profiler._is_profiler_enabled):
            # As below, without contexts that would note nothing: on an accelerator, until somebody asks for times.
            try:
                with Wait(label, ledger.watch):
                    complete()
            finally:
                ledger.ended(label.kind, self._entry)
            return
        counted = ledger.finishing(label.kind, self._entry, is_exposed=is_exposed)
        with counted, ledger.watch.inside(label), shown("wait for", label):
            complete()


Value = TypeVar("Value")


class Transport(ABC):
    """Moves flat, contiguous buffers between the ranks of one engine.

    `start_…` returns at once with a `Handle`. All ranks must start the same collectives in the same order. Each raises
    `CommunicationError` where a peer has ended already.

    Args:
        ledger: to count in; by default a new one.

    Attributes:
        adds_in_wider: a reduce-scatter into a wider dtype adds in that one, and so rounds less than one in the dtype of what
            is summed. Elsewhere the sum is rounded to that dtype first.
        watch: knows the collective that this rank waits in.
    """

    adds_in_wider: bool = False

    def __init__(self, ledger: Ledger | None = None):
        self.ledger = ledger or Ledger()
        self.watch: Watch = self.ledger.watch

    @property
    def name(self) -> str:
        """Names the transport in tables."""
        return type(self).__name__

    @abstractmethod
    def start_reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        """Sums `flat` (ranks x n elements) over the ranks; this rank's n elements land in `out`.

        `out` may be this rank's part of `flat`. The rest of `flat` is undefined afterwards. The ranks are those of `among`,
        by default of the shard group.
        """

    @abstractmethod
    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        """Fills `flat` (ranks x n elements) with each rank's `own` n elements, in rank order.

        `own` may be this rank's part of `flat`. The ranks are those of `among`, by default of the shard group.
        """

    @abstractmethod
    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        """Sends part i of `flat` (ranks x n elements) to the i-th rank; `out` takes one part from each.

        `out` is like `flat`, and other memory. The ranks are those of `among`, by default of the shard group.
        """

    @abstractmethod
    def start_all_reduce(self, flat: torch.Tensor, label: Label) -> Handle:
        """Sums `flat` over the replicate group in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, label: Label, source: int | None = None) -> None:
        """Copies rank 0's `tensor` to every rank, in place; with a `source`, that shard's to the ranks of the shard group."""

    @abstractmethod
    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Returns the elementwise sum over the shard group of a small tensor, on its own device."""

    def agree_largest(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the largest of the ranks' float64 scalars, on its own device; NaN if one is NaN."""
        # Python's own `max` passes over a NaN that is not the first.
        return value.new_tensor(self.exchange(value.item())).max()

    @abstractmethod
    def start_agree_max(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        """Sends a small host tensor to the other ranks, without touching the device's queue.

        Returns:
            A function to call once. It waits for the other ranks' tensors and returns the elementwise maximum of all.
        """

    def agree_max(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Returns the elementwise maximum over the ranks of a small host tensor, without touching the device's queue."""
        return self.start_agree_max(values, label)()

    @abstractmethod
    def barrier(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """Waits until every rank has come here for the same purpose.

        Args:
            alone: what lets one rank do it by itself, for the error: "wrap the call in ...".

        Raises:
            CommunicationError: within `timeout_s` on the ranks that came, when some did not or came for something else.
        """

    @abstractmethod
    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        """Returns every rank's picklable `value`, in rank order.

        Args:
            purpose: the same on all ranks; ranks that come with different ones are told so.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class DataParallelGroup:
    """Ranks with the same part of the model that step together: they share its state and sum its gradients.

    Attributes:
        groups, transport: of these ranks.
        all_groups, all_transport: of all ranks that hold this part. With `comm.sync_every` these are more: outer steps alone
            bring the others to the same values.
    """

    groups: Groups
    transport: Transport
    all_groups: Groups
    all_transport: Transport

    @property
    def is_first(self) -> bool:
        """Whether this rank is in the first of the groups that have the same state."""
        return self.all_groups.rank == self.all_groups.shard_rank


# ---- The transport of a single rank, which sends nothing ----


class LocalTransport(Transport):
    """The transport of world size 1, with or without a process group."""

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
        """Does nothing: one rank already holds its own values."""

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        return values

    def agree_largest(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def start_agree_max(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        return lambda: values

    def barrier(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """Returns at once: one rank is all ranks."""

    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        return [value]

    def _nothing(self, label: Label) -> Handle:
        return Handle(label, self.ledger, lambda: None)


# ---- Collectives of several steps, each of which needs the result of the one before ----
#
# [Note: the order of steps] A step can start when the one before has ended, and nobody watches for that moment. It is
# looked at when the next collective begins, and when a result is needed. No collective leaves its first step before all
# older ones are at their last: so on every rank all further steps start in one order, whichever result it needs first, and
# all but the last ones run on behind backward.
#
# On an accelerator a later step waits for the one before in a queue beside the one that computes. Waited for in the computing
# queue, the first step of one bucket would hold up the backward of the next.

Start = Callable[[], Handle]


class Steps:
    """A collective of several steps: the running step, and the later ones.

    Args:
        order: of all of them.
        queue: in which later steps wait for the one before; None is the queue that computes.
    """

    def __init__(self, order: "StepsInOrder", first: Start, later: tuple[Start, ...], queue: SideQueue | None):
        self._order = order
        # A wait in a side queue orders no other queue. Memory that the first step works on must not be given out again to the
        # computing queue before that one waits too, so `finish` lets the memory go.
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
        # In the side queue: the computing queue must not stop here, in the middle of backward.
        with self._queue.aside():
            self._running.finish(is_exposed=False)
            self._running = self._later.pop(0)()

    def start_last(self) -> None:
        """Waits for all steps but the last, which is started."""
        self._order.reach_last(self)

    def finish(self) -> None:
        """Waits for the end."""
        self._order.reach_last(self)
        self._running.finish()
        self._first = None


class StepsInOrder:
    """Starts collectives of several steps so that every rank starts all steps in the same order."""

    def __init__(self):
        self._under_way: list[Steps] = []

    def begin(self, first: Start, *later: Start, queue: SideQueue | None = None) -> Steps:
        """Starts another collective, and moves those under way one step further as far as their order allows.

        Args:
            queue: in which each of `later` waits for the step before; None is the queue that computes.
        """
        for steps in self._under_way:
            steps.advance()
            if not steps.is_at_its_last:
                break
        self._forget_those_at_their_last()
        steps = Steps(self, first, later, queue)
        if later:
            self._under_way.append(steps)
        return steps

    def reach_last(self, steps: Steps) -> None:
        """Starts the last step of a collective, and those of all older ones."""
        if steps in self._under_way:
            for older in self._under_way[: self._under_way.index(steps) + 1]:
                while not older.is_at_its_last:
                    older.advance()
            self._forget_those_at_their_last()

    def _forget_those_at_their_last(self) -> None:
        self._under_way = [steps for steps in self._under_way if not steps.is_at_its_last]


# ---- Copies of a model that is split over ranks ----


class Agreement:
    """Sums small values over all ranks of a split model in two stages, with the same bits on all of them.

    First over the ranks with the same part of the model, then over the ranks of one copy.
    """

    def __init__(self, dp_group: Transport, copy: Transport):
        self._transports = (dp_group, copy)

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Returns the elementwise sum over the ranks of a small tensor, on its own device."""
        for transport in self._transports:
            values = transport.agree_sum(values, label)
        return values

    def agree_largest(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the largest of the ranks' float64 scalars, on its own device; NaN if one is NaN."""
        for transport in self._transports:
            value = transport.agree_largest(value)
        return value


@dataclass(frozen=True, kw_only=True)
class ModelCopies:
    """The copies of a model that is split over ranks.

    Attributes:
        copies: the ranks of each copy, in the order of their parts.
        dp_groups: the ranks that hold the same part, for each part: they are what ZeRO shards over.
    """

    copies: tuple[tuple[int, ...], ...]
    dp_groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, everyone: Sequence[tuple[int, ...]]) -> "ModelCopies":
        """
        Args:
            everyone: of each rank, in order, the ranks that its copy of the model is split over.

        Raises:
            ConfigError: these are not copies of equal size that have each rank once.
        """
        copies = tuple(dict.fromkeys(everyone))
        ranks = [rank for copy in copies for rank in copy]
        if sorted(ranks) != list(range(len(everyone))) or len({len(copy) for copy in copies}) > 1:
            raise ConfigError(
                f"hf_zero: the model is split over the ranks {[list(copy) for copy in copies]}; allowed: sets of one "
                f"size that have each of the {len(everyone)} ranks once. Load it with the same tp_size and ep_size "
                "on all ranks."
            )
        dp_groups = tuple(tuple(sorted(members)) for members in zip(*copies))
        return cls(copies=copies, dp_groups=dp_groups)

    def part_in_words(self, rank: int) -> str:
        """Names a rank's copy and part by their indices along the data and tensor parallel dimensions."""
        data, copy = next((place, copy) for place, copy in enumerate(self.copies) if rank in copy)
        return f"dp {data}, tp {copy.index(rank)}"


# ---- A barrier with a time limit, which leaves the process group usable when some ranks do not come ----

_PAUSE_S = 0.02
_LOOK_S = 10.0


class StoreBarrier:
    """A barrier of some ranks through the launcher's store.

    gloo's own monitored barrier keeps time on rank 0 alone, and its time limit closes the connections of the group.

    Args:
        world: the ranks that meet.
        name: the same on all ranks, and of this transport alone.
    """

    def __init__(self, world: RankGroup, watchdog: Watchdog, name: str):
        self._ranks = world.ranks
        self._own = self._ranks[world.index]
        self._watchdog = watchdog
        self._name = name
        self._count = 0

    def wait(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """Waits until every rank is here.

        Args:
            alone: what lets one rank do it by itself, for the error.

        Raises:
            CommunicationError: `timeout_s` have passed, a rank has ended or left without coming, or waits for this one in
                another collective; names those that did not come, and where they are.
        """
        self._count += 1
        with self._watchdog.inside(call_of(purpose)) as wait:
            try:
                self._wait(wait, purpose, timeout_s, alone)
            except (dist.DistNetworkError, StoreSilentError) as error:
                silent = str(error) if isinstance(error, StoreSilentError) else None
                what = silent or "the process that keeps the ranks' store has ended, rank 0's or the launcher's"
                raise _came_alone(purpose, what, alone) from error

    def _wait(self, wait: Wait, purpose: str, timeout_s: float, alone: str) -> None:
        if self._watchdog.with_store(self._arrive, CALL_S):
            raise _came_alone(purpose, "the others have given up waiting for this rank", alone)
        pause_s, look_s = 1e-3, _LOOK_S
        while missing := self._watchdog.with_store(self._missing, CALL_S):
            # A store tells nobody that a rank has died: the missing ones are looked up.
            lost = self._watchdog.with_store(lambda store: self._watchdog.gone(store, missing), CALL_S)
            if lost or wait.seconds >= timeout_s:
                # Before the raise: a rank that comes later must not wait for this one.
                self._give_up(purpose, missing)
                what = f"ranks {lost} have ended" if lost else f"waited {timeout_s:.0f} s for ranks {missing}"
                raise _came_alone(purpose, what, alone, self._watchdog.lines(wait, enough=lost[0] if lost else None))
            if wait.end is not None:
                self._give_up(purpose, missing)
                raise wait.end
            if wait.seconds >= look_s:
                look_s += _LOOK_S
                self._refuse_to_wait_in_vain(purpose, missing, wait, alone)
            # Not by the store's own `wait`: at the end of a patience it prints warnings.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def _refuse_to_wait_in_vain(self, purpose: str, missing: list[int], wait: Wait, alone: str) -> None:
        lines = self._watchdog.look_for(missing, wait)
        if lines is not None:
            self._give_up(purpose, missing)
            raise _came_alone(purpose, f"ranks {missing} wait for this one elsewhere", alone, lines)

    def _give_up(self, purpose: str, missing: list[int]) -> None:
        def tell(store: Keys) -> None:
            self._in(store).set("given up", "")
            self._watchdog.write_reason(store, f"only some ranks came to {purpose}", missing)

        self._watchdog.with_store(tell, CALL_S)

    # ---- in the thread of the store ----

    def _arrive(self, store: Keys) -> bool:
        """Registers this rank; returns whether the others have given up."""
        barrier = self._in(store)
        if barrier.check("given up"):
            return True
        barrier.set(f"came {self._own}", "")
        if barrier.add("count", 1) == len(self._ranks):
            barrier.set("complete", "")
        return False

    def _missing(self, store: Keys) -> list[int]:
        barrier = self._in(store)
        # One question where all ranks are here, in place of one for each rank.
        if barrier.check("complete"):
            return []
        return [rank for rank in self._ranks if not barrier.check(f"came {rank}")]

    def _in(self, store: Keys) -> Keys:
        return store.below(f"hf_zero/{self._name}/{self._count}")


def call_of(purpose: str) -> str:
    """Names a call of the script as a collective, for messages such as "has waited in the call of full_grad"."""
    return f"call of {purpose}"


def _came_alone(purpose: str, what: str, alone: str, lines: str = "") -> CommunicationError:
    where, otherwise = f"\n{lines}\n" if lines else " ", f", or {alone}" if alone else ""
    return CommunicationError(
        f"hf_zero: only some ranks came to {purpose}; {what}.{where}It is collective: call it on every rank, outside "
        f"`if is_main_process`{otherwise}. The time limit is `comm.late_s`, and of a save_state `comm.timeout_s`."
    )


# ---- torch.distributed's own flat collectives, asynchronous: what NCCL and other device backends are best at ----

# torch 2.13 has renamed them.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# From torch 2.13 on, a process group has methods of these names. The functions check their arguments before they call these
# methods, which takes the host longer than the start itself.
_GROUPS_START = hasattr(dist.ProcessGroup, "all_gather_single")
_SUM, _GATHER = ReduceScatterOptions(), AllgatherOptions()
# A sum by default, too.
_SUM.asyncOp = _GATHER.asyncOp = True


def reduce_scatter_flat(
    output: torch.Tensor, flat: torch.Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Sums contiguous tensors, as `reduce_scatter_tensor` of torch.distributed does."""
    if async_op and group is not None and _GROUPS_START:
        return group.reduce_scatter_single(output, flat, _SUM)
    return _reduce_scatter(output, flat, group=group, async_op=async_op)


def all_gather_flat(
    flat: torch.Tensor, own: torch.Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Gathers contiguous tensors, as `all_gather_into_tensor` of torch.distributed does."""
    if async_op and group is not None and _GROUPS_START:
        return group.all_gather_single(flat, own, _GATHER)
    return _all_gather(flat, own, group=group, async_op=async_op)


class CollectiveTransport(Transport):
    """Makes one backend call a bucket, on any backend. On gloo its reduce-scatter moves twice the necessary bytes."""

    def __init__(self, groups: Groups, ledger: Ledger | None = None):
        super().__init__(ledger or Ledger(watch=watch_over(groups)))
        self._groups = groups
        # Ranks of a group → how many of this rank's peers there are on other nodes.
        self._elsewhere: dict[tuple[int, ...], int] = {}
        world, nodes = groups.world, groups.nodes
        told = [
            world.ranks[(world.index + each) % world.size] for distances in rounds(world.size) for each in distances
        ]
        # Messages of this rank in an agreement, and those to other nodes.
        self._told = len(told), sum(nodes[each] != nodes[world.ranks[world.index]] for each in told)
        # Device backends note the end of a work object at once, for the device to pass.
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
        entry = self._count(label, group, flat.nbytes)
        target = out if out.dtype == flat.dtype else torch.empty(out.shape, dtype=flat.dtype, device=flat.device)
        with self._starting(label):
            work = reduce_scatter_flat(target, flat, group=group.handle, async_op=True)
        if target is out:
            return Handle(label, self.ledger, work.wait, entry=entry)

        def complete() -> None:
            work.wait()
            out.copy_(target)

        return Handle(label, self.ledger, complete, entry=entry)

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.gather
        entry = self._count(label, group, flat.nbytes)
        # Noted at the start, in the order of the host: NCCL matches by that order alone, without tags.
        self._gathers.note(label.words)
        with self._starting(label):
            work = all_gather_flat(flat, own, group=group.handle, async_op=True)
        return Handle(label, self.ledger, work.wait, entry=entry)

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        entry = self._count(label, group, flat.nbytes)
        with self.watch.inside(label), shown("start", label), self._unseen():
            work = dist.all_to_all_single(out, flat, group=group.handle, async_op=True)
        return Handle(label, self.ledger, work.wait, entry=entry)

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
            # Backends have few dtypes: NCCL no int16, gloo no bool.
            values = tensor.detach().contiguous()
            dist.broadcast(values.view(-1).view(torch.uint8), src=group.ranks[first], group=group.handle)
        entry[ENDED] = time.monotonic()
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        entry = self._count(label, self._groups.shard, 2 * values.nbytes)
        # A clone: the all-reduce writes in place, and the caller keeps its own values.
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
            # The barrier only counts ranks: the exchange finds ranks that have come for another purpose.
            self.exchange(None, call_of(purpose))

    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        return self._control.exchange(value, purpose)

    def _start_swap(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        """Sends this rank's small host tensor; the result waits for every rank's, in rank order."""
        entry = self._count(label, self._groups.world, self._groups.world.size * values.nbytes)
        return self._finishing(label, entry, self._control.start_swap(values, label, stacks=True))

    def _finishing(
        self, label: Label, entry: list[Any], take: Callable[[], torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        """Notes a swap that has been started; the result waits for it and notes its end."""
        self.ledger.began(label, entry)

        def wait() -> torch.Tensor:
            with self.ledger.finishing(label.kind, entry):
                return take()

        return wait

    def _starting(self, label: Label) -> AbstractContextManager[object]:
        """Opens a context in which a collective is started: known to the watch, and by name to a profiler that runs."""
        inside = Wait(label, self.watch)
        if not profiler._is_profiler_enabled:
            return inside
        stack = ExitStack()
        for each in (inside, shown("start", label), self._unseen()):
            stack.enter_context(each)
        return stack

    def _count(self, label: Label, group: RankGroup, nbytes: int) -> list[Any]:
        """Counts a collective in which this rank sends each peer of the group its part of `nbytes`; returns its log entry.

        A backend may pass parts on from rank to rank; which link they take is then its own affair, and their number the same.
        """
        ranks = group.ranks
        elsewhere = self._elsewhere.get(ranks)
        if elsewhere is None:
            elsewhere = self._elsewhere[ranks] = self._groups.peers_elsewhere(group)
        size = len(ranks)
        sent = nbytes * (size - 1) // size
        return self.ledger.count(label, sent, sent * elsewhere // max(size - 1, 1) if elsewhere else 0)


# ---- Reduce-scatter and all-gather by send and receive, straight from and into the flat buffer ----
#
# gloo has no reduce-scatter of its own: the stock one is an all-reduce and a copy, twice the bytes on the wire. Here each
# rank sends a peer the peer's part and adds what it receives in rank order, so that the sum does not depend on timing.

_REDUCE_TAG, _GATHER_TAG, _EXCHANGE_TAG = 0x5A450000, 0x5A460000, 0x5A470000
"""Keep our messages apart from sends of the script's own in the same process group; the channel is added."""


class PointToPointTransport(CollectiveTransport):
    """Sends and receives host tensors over gloo. Broadcasts and all-reduces stay gloo's own."""

    adds_in_wider = True

    def __init__(self, groups: Groups, timeout_s: float, ledger: Ledger | None = None):
        super().__init__(groups, ledger)
        self._timeout_s = timeout_s
        self._control_group = groups.control_group
        # Indices in the control group, which holds all ranks of the world.
        self._places = {rank: place for place, rank in enumerate(groups.world.ranks)}
        # A dropped engine's messages would otherwise be taken for those of this one.
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
        # `out` takes the first peer's part, unless it lies in `flat` itself or has another dtype.
        first = group.peers[0]
        received[first] = out if self._is_scratch(out, flat) else torch.empty_like(parts[first])
        transfers = self._start(_REDUCE_TAG, label, group, received, parts)

        def complete() -> None:
            # All parts first, then the sum in rank order: added as they arrive, the result would depend on timing.
            transfers.wait()
            received[group.index] = parts[group.index]
            sum_in_rank_order([received[place] for place in range(group.size)], out)

        return Handle(label, self.ledger, complete, entry=entry)

    def start_all_gather(
        self, flat: torch.Tensor, own: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        entry = self._count(label, group, flat.nbytes)
        parts = flat.chunk(group.size)
        transfers = self._start(_GATHER_TAG, label, group, parts, [own] * group.size)
        if own.data_ptr() != parts[group.index].data_ptr():
            # Behind the start: the messages are on their way while this rank copies.
            parts[group.index].copy_(own)
        return Handle(label, self.ledger, transfers.wait, entry=entry)

    def start_all_to_all(
        self, flat: torch.Tensor, out: torch.Tensor, label: Label, among: RankGroup | None = None
    ) -> Handle:
        group = among or self._groups.shard
        entry = self._count(label, group, flat.nbytes)
        parts, places = flat.chunk(group.size), out.chunk(group.size)
        transfers = self._start(_EXCHANGE_TAG, label, group, places, parts)
        places[group.index].copy_(parts[group.index])
        return Handle(label, self.ledger, transfers.wait, entry=entry)

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
            # All receives before all sends: a peer's send begins once its receive is posted.
            works = [(ranks[p], control.recv([received[p]], self._places[ranks[p]], tag)) for p in group.peers]
            works += [(ranks[p], control.send([sent[p]], self._places[ranks[p]], tag)) for p in group.peers]
        return Transfers(works, self._timeout_s)

    @staticmethod
    def _is_scratch(out: torch.Tensor, flat: torch.Tensor) -> bool:
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        return out.dtype == flat.dtype and not begin <= out.data_ptr() < end


# ---- Chooses the transport for a backend and a device, and makes data parallel groups ----


def choose_transport(groups: Groups, device: torch.device, timeout_s: float, ledger: Ledger | None = None) -> Transport:
    """Chooses: nothing for one rank, point to point for gloo on the host, the backend's own collectives otherwise."""
    is_alone = groups.world_size == 1
    if ledger is None:
        ledger = Ledger(clock(device), None if is_alone else watch_over(groups), is_timed=device.type == "cpu")
    if is_alone:
        return LocalTransport(ledger)
    if groups.backend == "gloo" and device.type == "cpu":
        return PointToPointTransport(groups, timeout_s, ledger)
    return CollectiveTransport(groups, ledger)


def choose_group(groups: Groups, device: torch.device, ledger: Ledger | None = None) -> DataParallelGroup:
    """Makes the data parallel group of these ranks; with `comm.sync_every`, also the one that steps together."""
    transport = choose_transport(groups, device, groups.timeout_s, ledger)
    in_step, own = groups.of_a_step(), transport
    if in_step is not groups:
        own = choose_transport(in_step, device, groups.timeout_s, transport.ledger)
    return DataParallelGroup(groups=in_step, transport=own, all_groups=groups, all_transport=transport)


# ---- Exchanges of small values through the launcher's store, for threads beside training ----

_GLANCE_S = 0.02
_SIGNATURE_BYTES = 32


class StoreExchange:
    """Exchanges values through the launcher's store, over a connection of its own.

    Args:
        name: the same on all ranks, and of this object alone.
        secret: the same on all ranks, which never had it from the store.
        timeout_s: how long an exchange waits for ranks that do not come.
    """

    def __init__(self, groups: Groups, name: str, secret: bytes, timeout_s: float):
        self._groups = groups
        self._secret = secret
        self._timeout_s = timeout_s
        self._count = 0
        self._thread: StoreThread | None = None
        if groups.world_size > 1:
            self._thread = StoreThread(timeout_s)
            # Also before Python ends: a thread that returns from a call to torch after that ends the process with an abort.
            weakref.finalize(self, self._thread.close)
            self._store = self._thread.keys.below(f"hf_zero/store_exchange/{name}")

    def hurry(self, seconds: float) -> None:
        """Shortens the waits for other ranks and for the store from now on: this process wants to end."""
        self._timeout_s = seconds
        if self._thread is not None:
            self._thread.within_s = seconds

    def exchange(self, value: Value) -> list[Value]:
        """Returns every rank's picklable value, in rank order.

        Raises:
            CommunicationError: a rank or the store has not answered in time, or a value was written by none of the ranks.
        """
        if self._groups.world_size == 1:
            return [value]
        try:
            return self._exchange(value)
        except StoreSilentError as error:
            raise CommunicationError(
                f"hf_zero: the ranks cannot finish a checkpoint together: {error}. Look at that process and its host."
            ) from error
        except dist.DistNetworkError as error:
            raise CommunicationError(
                f"hf_zero: the launcher's store is gone, so the ranks cannot finish a checkpoint together ({error}). The host "
                "that kept it was lost or has ended; its own error is the reason."
            ) from error

    def _exchange(self, value: Value) -> list[Value]:
        self._count += 1
        key, data = self._key(self._groups.rank), pickle.dumps(value)
        self._store.set(key, self._signature(key, data) + data)
        values = [value if rank == self._groups.rank else self._take(rank) for rank in range(self._groups.world_size)]
        # All have come here, so all have read what was left at the place before.
        self._store.delete(f"{self._count - 1}/{self._groups.rank}")
        return values

    def _key(self, rank: int) -> str:
        return f"{self._count}/{rank}"

    def _take(self, rank: int) -> Any:
        began_s = time.monotonic()
        # Not the store's own wait: its connection could not be told meanwhile to give up sooner.
        while not self._store.check(self._key(rank)):
            if time.monotonic() > began_s + self._timeout_s:
                raise CommunicationError(
                    f"hf_zero: rank {rank} did not come to finish a checkpoint. It ended, or was held up for more than "
                    f"{self._timeout_s:.0f} s; its own error is the reason."
                )
            time.sleep(_GLANCE_S)
        signed = self._store.get(self._key(rank))
        signature, data = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        # Before unpickling: torch's store answers everyone who reaches its port, and an unpickled value may run code.
        if not hmac.compare_digest(signature, self._signature(self._key(rank), data)):
            raise CommunicationError(
                f"hf_zero: what the launcher's store has from rank {rank} was not written by that rank. Others write into "
                "the store: let only the run's own nodes reach MASTER_PORT."
            )
        return pickle.loads(data)

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")
