"""A model's buffers (batch-norm statistics, position ids) kept as rank 0's, as DDP does.

[Note: buffers between a forward and its backward]
Several forwards may come before one backward, and what autograd has saved of a buffer in the first must still be there then: so
DDP, before the second, writes rank 0's buffers without counting it as an edit. What differs between ranks
then, as batch-norm statistics do, no backward may read.

[Note: buffers behind a step]
DDP also broadcasts before the first forward of an evaluation, which so sees rank 0's buffers. Here the script may have called it
on one rank alone, with the model that all ranks train, and no forward without gradients is collective. A step is, so they
are sent behind it.
"""

import torch
from torch import nn

from ..comm.transport import Label, Transport

_LABEL = Label(kind="broadcast buffers", subject="the model")


class ModelBuffers:
    """Broadcasts all buffers of a model in one message a dtype: behind each step, and where forwards lie in between as DDP does.

    Args:
        wanted: False leaves every rank its own (`broadcast_buffers: false`, or one rank alone).
    """

    def __init__(self, model: nn.Module, transport: Transport, wanted: bool):
        self._model = model
        self._transport = transport
        self._wanted = wanted and next(iter(model.buffers()), None) is not None
        self._due = self._wanted

    def before_forward(self) -> None:
        """Collective where it is due: a training forward behind one that was not under no_sync, without a step in between."""
        if self._is_training:
            self._send()

    def after_forward(self, *, under_no_sync: bool) -> None:
        """Notes whether ranks' buffers may differ now, and rank 0's are to be sent."""
        if self._is_training:
            self._due = self._wanted and not under_no_sync

    def after_step(self) -> None:
        """Collective where a training forward came before; see [Note: buffers behind a step]."""
        self._send()

    @property
    def _is_training(self) -> bool:
        return self._model.training and torch.is_grad_enabled()

    def _send(self) -> None:
        if self._due:
            self._due = False
            broadcast_buffers(self._model, self._transport)


def broadcast_buffers(model: nn.Module, transport: Transport) -> None:
    """Rank 0's buffers on every rank, in place; see [Note: buffers between a forward and its backward]. Collective."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for dtype, buffers in by_dtype.items():
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        # gloo has no boolean broadcast; bytes travel the same.
        transport.broadcast(flat.view(torch.uint8) if dtype == torch.bool else flat, _LABEL)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers])):
                buffer.copy_(values.view(buffer.shape))
