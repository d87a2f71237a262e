"""What the engine asks of a transport, and the handle it gets back."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from .control.watch import Watch
from .groups.failures import CommunicationError as CommunicationError
from .groups.groups import Groups, RankGroup
from .ledger import Label as Label
from .ledger import Ledger
from .profiling import shown


class Handle:
    """A started collective. `finish` waits for it once; later calls return at once.

    The buffers handed to `start_…` belong to the transport until then.
    """

    def __init__(self, label: Label, ledger: Ledger, complete: Callable[[], None]):
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
    """

    adds_in_wider: bool = False

    def __init__(self, ledger: Ledger | None = None):
        self.ledger = ledger or Ledger()

    @property
    def name(self) -> str:
        """For tables."""
        return type(self).__name__

    @property
    def watch(self) -> Watch:
        """Knows what this rank waits in, and which rank it waits for."""
        return self.ledger.watch

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
        """Part i of `flat` (ranks x n elements) goes to the i-th rank; `out` takes one part from each.

        `out` is like `flat`, and other memory. The ranks are those of `among`, by default of the shard group.
        """

    @abstractmethod
    def start_all_reduce(self, flat: torch.Tensor, label: Label) -> Handle:
        """Sums `flat` over the replicate group in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, label: Label) -> None:
        """Rank 0's `tensor` on every rank, in place."""

    @abstractmethod
    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Elementwise sum over the shard group of a small tensor, on its own device."""

    @abstractmethod
    def start_agree_max(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        """Sends a small host tensor to the other ranks, without touching the device's queue.

        Returns:
            A function to call once. It waits for the other ranks' tensors and returns the elementwise maximum of all.
        """

    def agree_max(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        """Elementwise maximum over the ranks of a small host tensor, without touching the device's queue."""
        return self.start_agree_max(values, label)()

    @abstractmethod
    def meet(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """Returns once every rank has come here for the same purpose.

        Args:
            alone: what lets one rank do it by itself, for the error: "wrap the call in ...".

        Raises:
            CommunicationError: within `timeout_s` on the ranks that came, when some did not or came for something else.
        """

    @abstractmethod
    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        """Every rank's picklable `value`, in rank order.

        Args:
            purpose: the same on all ranks; ranks that come with different ones are told so.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class DataParallelGroup:
    """Ranks that hold the same part of the model and take its steps together: they share its state and sum its gradients.

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
        """Whether this rank is of the first of the groups that have the same state."""
        return self.all_groups.rank == self.all_groups.shard_rank
