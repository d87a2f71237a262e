"""A model's buffers (batch-norm statistics, position ids) kept as rank 0's, as DDP does."""

import torch
from torch import nn

from ..comm.transport import Label, Transport

_LABEL = Label(kind="broadcast buffers", subject="the model")


class ModelBuffers:
    """Broadcasts all buffers of a model in one message a dtype, before the forwards that DDP broadcasts before.

    Args:
        wanted: False leaves every rank its own (`broadcast_buffers: false`, or one rank alone).
    """

    def __init__(self, model: nn.Module, transport: Transport, wanted: bool):
        self._model = model
        self._transport = transport
        self._wanted = wanted and next(iter(model.buffers()), None) is not None
        self._due = self._wanted

    def before_forward(self) -> None:
        """Collective where it is due: a training forward, unless the last one was under no_sync."""
        if self._due and self._model.training and torch.is_grad_enabled():
            broadcast_buffers(self._model, self._transport)

    def after_forward(self, *, under_no_sync: bool) -> None:
        """Notes whether the next training forward starts from rank 0's buffers."""
        self._due = self._wanted and not under_no_sync


def broadcast_buffers(model: nn.Module, transport: Transport) -> None:
    """Rank 0's buffers on every rank, in place. Collective."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for dtype, buffers in by_dtype.items():
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        # gloo has no boolean broadcast; bytes travel the same.
        transport.broadcast(flat.view(torch.uint8) if dtype == torch.bool else flat, _LABEL)
        for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers])):
            with torch.no_grad():
                buffer.copy_(values.view(buffer.shape))
