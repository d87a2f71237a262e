"""The transport of a single rank, which sends nothing."""

from collections.abc import Callable

import torch

from .groups.groups import RankGroup
from .transport import Handle, Label, Transport, Value


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

    def broadcast(self, tensor: torch.Tensor, label: Label) -> None:
        """One rank already holds its own values."""

    def agree_sum(self, values: torch.Tensor, label: Label) -> torch.Tensor:
        return values

    def start_agree_max(self, values: torch.Tensor, label: Label) -> Callable[[], torch.Tensor]:
        return lambda: values

    def meet(self, purpose: str, timeout_s: float, alone: str = "") -> None:
        """One rank is all ranks."""

    def exchange(self, value: Value, purpose: str = "exchange of a few values") -> list[Value]:
        return [value]

    def _nothing(self, label: Label) -> Handle:
        return Handle(label, self.ledger, lambda: None)
