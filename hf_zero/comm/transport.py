"""The collectives that the engine calls, their handles, and the transport of a single rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.autograd import profiler

from ..config import ConfigError
from ..device import SideQueue
from .groups import Groups, RankGroup
from .ledger import Label, Ledger
from .watch import Watch

# ---- Collectives under torch.profiler: ranges that name them, and no crash where one outlasts the profile ----

_NOTHING = nullcontext()


def shown(does: str, what: object) -> AbstractContextManager:
    """Opens a range "hf_zero: `does` `what`" in a running profile; nothing without one."""
    return profiler.record_function(f"hf_zero: {does} {what}") if profiler._is_profiler_enabled else _NOTHING


def hidden_from_profiler() -> AbstractContextManager:
    """Suppresses profiler events of work that starts inside.

    `shown` ranges stand in their place.
    """
    # gloo's work objects note their end in the event of their start. If the profile has ended in between, as behind its last
    # step, that event is freed memory, and the process crashes then or later.
    return _hidden() if profiler._is_profiler_enabled else _NOTHING


@contextmanager
def _hidden() -> Iterator[None]:
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


# ---- The interface of a transport, and its handles ----


class Handle:
    """A started collective. `finish` waits for it once; later calls return at once.

    The buffers handed to `start_…` belong to the transport until then.

    Attributes:
        start_last: of several steps starts the last one, and waits for those before; nothing where there is one.
    """

    def __init__(
        self, label: Label, ledger: Ledger, complete: Callable[[], None], start_last: Callable[[], None] = lambda: None
    ):
        self.start_last = start_last
        self._label = label
        self._ledger = ledger
        self._complete: Callable[[], None] | None = complete
        self._entry = ledger.began(label)

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
