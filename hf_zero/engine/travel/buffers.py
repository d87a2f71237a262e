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

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from ...comm.transport import Label, Transport

_LABEL = Label(kind="broadcast buffers", subject="the model")
_BUFFERS = attrgetter("_buffers")


class ModelBuffers:
    """Broadcasts all buffers of a model in one message: behind each step, and where forwards lie in between as DDP does.

    Args:
        device: that the transport sends from.
        wanted: False leaves every rank its own (`broadcast_buffers: false`, or one rank alone).

    Attributes:
        is_due: the next collective sends them.
    """

    def __init__(self, model: nn.Module, transport: Transport, device: torch.device, wanted: bool):
        self._model = model
        self._modules = list(model.modules())
        self._transport = transport
        self._device = device
        self._wanted = wanted and next(iter(model.buffers()), None) is not None
        self.is_due = self._wanted

    def before_forward(self) -> None:
        """Collective where it is due: a training forward behind one that was not under no_sync, without a step in between."""
        if self._is_training:
            self._send()

    def after_forward(self, *, under_no_sync: bool) -> None:
        """Notes whether ranks' buffers may differ now, and rank 0's are to be sent."""
        if self._is_training:
            self.is_due = self._wanted and not under_no_sync

    def after_step(self) -> None:
        """Collective where a training forward came before; see [Note: buffers behind a step]."""
        self._send()

    @property
    def _is_training(self) -> bool:
        return self._model.training and torch.is_grad_enabled()

    def _send(self) -> None:
        if self.is_due:
            self.is_due = False
            _broadcast(self._modules, self._transport, self._device)


def start_buffers(model: nn.Module, transport: Transport, device: torch.device, *, placed: bool) -> None:
    """Makes buffers rank 0's before training. Collective.

    Args:
        device: that the transport sends from.
        placed: move them there, as the engine does with parameters.
    """
    if placed:
        place_buffers(model, device)
    broadcast_buffers(model, transport, device)


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves a model's buffers to `device`, as `Module.to` does; they stay the same objects.

    Raises:
        ValueError: one is on the meta device.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"hf_zero: the buffer {name!r} is on the meta device and has no values. Load the model with from_pretrained, or "
                "build it outside `torch.device('meta')`, before accelerator.prepare."
            )
        if buffer.device != device:
            buffer.data = buffer.data.to(device)


def broadcast_buffers(model: nn.Module, transport: Transport, device: torch.device) -> None:
    """Rank 0's buffers on every rank, in place; see [Note: buffers between a forward and its backward]. Collective.

    Args:
        device: that the transport sends from.
    """
    _broadcast(list(model.modules()), transport, device)


def _broadcast(modules: Sequence[nn.Module], transport: Transport, device: torch.device) -> None:
    held = [buffer for own in map(_BUFFERS, modules) if own for buffer in own.values() if buffer is not None]
    # By the size of an element: then each begins, among bytes, where its dtype can be read.
    buffers = sorted({id(buffer): buffer for buffer in held}.values(), key=lambda buffer: -buffer.itemsize)
    if not buffers:
        return
    flat = torch.cat([buffer.detach().reshape(-1).view(torch.uint8).to(device) for buffer in buffers])
    transport.broadcast(flat, _LABEL)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
        for buffer, values in zip(buffers, flat.split([buffer.nbytes for buffer in buffers])):
            buffer.copy_(values.view(buffer.dtype).view(buffer.shape))
