"""The transport of a single rank, which sends nothing."""

from collections.abc import Callable

import torch

from .all_or_none import Merged
from .groups import RankGroup
from .transport import Handle, Transport, Value
from .waits import Label


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
