"""The ranks of a sequence: each has a part of the tokens, and inside attention a part of the heads. Sums and gathers with
gradients.

Ulysses: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023.

[Note: gradients of a sequence]
The engine divides gradients by the number of all ranks, including the ranks of a sequence, and each rank computes the gradient of
its own tokens only. All ranks of a sequence have the same loss, and the gradient of the sequence is the sum of their gradients.
So the backward of a loss that is summed over the ranks, and of an output that is gathered from them, multiplies the gradient by
the number of these ranks. The parameters that produced them then get the gradient of one rank with the whole sequence. Parameters
of the script that receive gathered outputs have that gradient on each rank, and its mean is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..comm.choice import choose_transport
from ..comm.groups import Groups
from ..comm.ledger import Ledger
from ..comm.transport import Transport
from ..comm.waits import Label
from ..config import CommConfig

_CHANNEL = 0x8000
"""Greater than the channels of buckets, because messages of both may be in transit between the same ranks at the same time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceRanks:
    """The ranks of one sequence. Rank i has part i of the tokens.

    Attributes:
        size: number of ranks.
        index: index of this rank in the sequence.
        transport: transport between the ranks.
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
            sets: the ranks of each sequence, all of equal length. Each rank of the run is in one of them.
            comm: the engine's settings, for time limits.
            ledger: counts the messages.
        """
        plain = CommConfig(timeout_s=comm.timeout_s, late_s=comm.late_s, node_size=comm.node_size)
        groups = Groups.create(stage=1, device_type=device.type, comm=plain, separate=sets)
        transport = choose_transport(groups, device, groups.timeout_s, ledger)
        return cls(size=len(sets[0]), index=groups.rank, transport=transport)

    def exchange(self, tensor: torch.Tensor, split: int, join: int, what: str) -> torch.Tensor:
        """Sends part i of dimension `split` to rank i, and joins the received parts along `join`, in rank order. Collective.

        Differentiable: backward exchanges the gradient in the opposite direction.

        Args:
            what: name of the tensor in the ledger.
        """
        return _Exchange.apply(tensor, self, split, join, self._label("all-to-all of heads", what))

    def gather(self, tensor: torch.Tensor, dim: int, what: str) -> torch.Tensor:
        """Joins the ranks' tensors along a dimension, in rank order. Collective.

        Differentiable: see [Note: gradients of a sequence].
        """
        return _Gather.apply(tensor, self, dim, self._label("all-gather of outputs", what))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Adds the ranks' scalars, with the same bits on all ranks. Collective.

        Differentiable: see [Note: gradients of a sequence].
        """
        return _Sum.apply(value, self, self._label("sum of losses", "the sequence"))

    def _label(self, kind: str, what: str) -> Label:
        # The ring log looks entries up by the label object, so use one object for each kind.
        return self._labels.setdefault((kind, what), Label(kind=kind, subject=what, channel=_CHANNEL))

    def _exchanged(self, tensor: torch.Tensor, split: int, join: int, label: Label) -> torch.Tensor:
        sent = tensor.unflatten(split, (self.size, -1)).movedim(split, 0).contiguous()
        received = torch.empty_like(sent)
        self.transport.start_all_to_all(sent.view(-1), received.view(-1), label).finish()
        return torch.cat(received.unbind(), join)

    def _gathered(self, tensor: torch.Tensor, dim: int, label: Label) -> torch.Tensor:
        own = tensor.contiguous()
        # Send bytes, because backends support few dtypes, and bool is not among them.
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
        # `sum` avoids a view: autograd refuses in-place writes to a view from a function, and Trainer scales losses in place.
        return ranks.transport.agree_sum(value.reshape(1), label).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient * ctx.size, None, None
