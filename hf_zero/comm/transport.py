"""The collectives of the engine, and their handles."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from .all_or_none import Merged
from .collective_log import ENDED
from .groups import Groups, RankGroup
from .ledger import Ledger
from .profiler_ranges import shown
from .waits import Label, Watch
from .wire_sums import WireSums


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
            try:
                ledger.watch.during(self._label, complete)
            finally:
                if entry is not None:
                    entry[ENDED] = monotonic()
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

    def prepare_all_gather(self, flat: torch.Tensor, own: torch.Tensor, label: Label) -> Callable[[], Handle]:
        """Prepares a gather repeated in each step; returns a function without arguments for `start_all_gather`."""
        return partial(self.start_all_gather, flat, own, label)

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
