"""The ranks of a sequence: each has a part of the tokens, and of the heads inside attention. They sum and gather with gradients.

Ulysses: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023.

[Note: gradients of a sequence]
The engine divides gradients by the number of all ranks, those of a sequence among them, and each rank computes the gradient of
its own tokens alone. A sequence's loss is the same on all of its ranks, and its gradient is the sum of theirs. So a loss that is
summed over the ranks, and an output that is gathered from them, pass back their gradient times the number of these ranks:
parameters behind them then have the gradient of one rank with the whole sequence. Parameters of the script's own, which take
gathered outputs, have that gradient on each rank, and its mean is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..comm.groups import Groups
from ..comm.ledger import Label, Ledger
from ..comm.transport import Transport, choose_transport
from ..config import CommConfig

_CHANNEL = 0x8000
"""Above those of buckets: their messages between the same ranks may be under way at the same time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceRanks:
    """The ranks of one sequence. Rank i has the i-th part of the tokens.

    Attributes:
        size: how many they are.
        index: of this rank among them.
        transport: between them.
    """

    size: int
    index: int
    transport: Transport
    _labels: dict[tuple[str, str], Label] = field(default_factory=dict)

    @classmethod
    def create(
        cls, sets: Sequence[tuple[int, ...]], device: torch.device, comm: CommConfig, ledger: Ledger
    ) -> "SequenceRanks":
        """Makes the groups of all sequences. Collective.

        Args:
            sets: the ranks of each sequence, as many in each. Each rank of the run is in one of them.
            comm: of the engine, for limits of time.
            ledger: to count in.
        """
        plain = CommConfig(timeout_s=comm.timeout_s, late_s=comm.late_s, node_size=comm.node_size)
        groups = Groups.create(stage=1, device_type=device.type, comm=plain, apart=sets)
        transport = choose_transport(groups, device, groups.timeout_s, ledger)
        return cls(size=len(sets[0]), index=groups.rank, transport=transport)

    def exchange(self, tensor: torch.Tensor, split: int, join: int, what: str) -> torch.Tensor:
        """Sends part i of dimension `split` to rank i, and joins what comes along `join`, in rank order. Collective.

        Differentiable: backward exchanges the gradient the other way.

        Args:
            what: names the tensor in the ledger.
        """
        return _Exchange.apply(tensor, self, split, join, self._label("all-to-all of heads", what))

    def gather(self, tensor: torch.Tensor, dim: int, what: str) -> torch.Tensor:
        """Joins the ranks' tensors along a dimension, in rank order. Collective.

        Differentiable: see [Note: gradients of a sequence].
        """
        return _Gather.apply(tensor, self, dim, self._label("all-gather of outputs", what))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Adds the ranks' scalars, with the same bits on all. Collective.

        Differentiable: see [Note: gradients of a sequence].
        """
        return _Sum.apply(value, self, self._label("sum of losses", "the sequence"))

    def _label(self, kind: str, what: str) -> Label:
        # One object each: the ring log looks entries up by it.
        return self._labels.setdefault((kind, what), Label(kind=kind, subject=what, channel=_CHANNEL))

    def _exchanged(self, tensor: torch.Tensor, split: int, join: int, label: Label) -> torch.Tensor:
        sent = tensor.unflatten(split, (self.size, -1)).movedim(split, 0).contiguous()
        received = torch.empty_like(sent)
        self.transport.start_all_to_all(sent.view(-1), received.view(-1), label).finish()
        return torch.cat(received.unbind(), join)

    def _gathered(self, tensor: torch.Tensor, dim: int, label: Label) -> torch.Tensor:
        own = tensor.contiguous()
        # As bytes: backends have few dtypes, and no bool among them.
        flat = own.new_empty(self.size * own.nbytes, dtype=torch.uint8)
        self.transport.start_all_gather(flat, own.view(-1).view(torch.uint8), label).finish()
        return torch.cat(flat.view(own.dtype).view(self.size, *own.shape).unbind(), dim)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, ranks: SequenceRanks, split: int, join: int, label: Label
    ) -> torch.Tensor:
        ctx.ranks, ctx.split, ctx.join, ctx.label = ranks, split, join, label
        return ranks._exchanged(tensor, split, join, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks._exchanged(gradient, ctx.join, ctx.split, ctx.label), None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: SequenceRanks, dim: int, label: Label) -> torch.Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks._gathered(tensor, dim, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ranks = ctx.ranks
        return gradient.chunk(ranks.size, ctx.dim)[ranks.index] * ranks.size, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, ranks: SequenceRanks, label: Label) -> torch.Tensor:
        ctx.size = ranks.size
        # No view: autograd refuses writes to views out of a function, and Trainer scales losses in place.
        return ranks.transport.agree_sum(value.reshape(1), label).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient * ctx.size, None, None
