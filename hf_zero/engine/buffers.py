"""A model's buffers (batch-norm statistics, position ids) kept as rank 0's, as DDP does."""

import torch
from torch import nn

from ..comm.transport import Label, Transport

_LABEL = Label(kind="broadcast buffers", subject="the model")


class ModelBuffers:
    """Broadcasts all buffers of a model in one message a dtype."""

    def __init__(self, model: nn.Module, transport: Transport):
        self._model = model
        self._transport = transport

    def broadcast(self) -> None:
        """Collective. Rank 0's values on every rank, in place."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self._model.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for dtype, buffers in by_dtype.items():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            # gloo has no boolean broadcast; bytes travel the same.
            self._transport.broadcast(flat.view(torch.uint8) if dtype == torch.bool else flat, _LABEL)
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers])):
                with torch.no_grad():
                    buffer.copy_(values.view(buffer.shape))
