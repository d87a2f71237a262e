"""A model's buffers (batch-norm statistics, position ids) kept as rank 0's, as DDP does.

[Note: buffers between a forward and its backward]
Several forwards may precede one backward, and autograd may have saved a buffer in the first forward. So DDP writes rank 0's
buffers before the second forward without increasing version counters. No backward may read buffers that differ between ranks at
that time, such as batch-norm statistics.

[Note: buffers after a step]
DDP also broadcasts before the first forward of an evaluation, which therefore sees rank 0's buffers. Here no forward without
gradients is collective, because the script may evaluate the training model on only one rank. Instead, buffers are also sent
after a step, which is collective. This is only done for models with buffers in their state dict, such as batch norms. Other
buffers (position ids, rotary frequencies) are constants.

[Note: buffers before a forward]
A script may write a buffer on any rank, in place, through `.data` or by assignment, and no rank can detect another rank's write.
So a training forward always sends all buffers, in the same cases as DDP.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ..comm.transport import Transport
from ..comm.waits import Label
from .models import named_models_in

_LABEL = Label(kind="broadcast of buffers", subject="the model")


def ignored_by_ddp(model: nn.Module) -> frozenset[str]:
    """Returns the names of parameters and buffers excluded from DDP by a script.

    DDP reads `_ddp_params_and_buffers_to_ignore` of the wrapped module.
    """
    return frozenset(
        f"{prefix}.{name.removeprefix('.')}" if prefix else name
        for prefix, each in named_models_in(model)
        for name in getattr(each, "_ddp_params_and_buffers_to_ignore", ())
    )


def ignored_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Returns the parameters in `ignored_by_ddp`. They are in no bucket, so each rank trains and keeps its own values.

    As in DDP's reducer, a trained parameter is excluded only if all of its names are listed (a tied weight has several names).
    Parameters directly in the model have names with a leading dot.
    """
    ignored = ignored_by_ddp(model)
    if not ignored:
        return frozenset()
    held = [
        (f"{path}.{name}", parameter)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    reduced = {parameter for name, parameter in held if name not in ignored}
    return frozenset(
        parameter
        for name, parameter in model.named_parameters()
        if (parameter not in reduced if parameter.requires_grad else name in ignored)
    )


class _SharedBuffers:
    """A model's buffers that are equal on all ranks. Looked up again at each call, because a script may assign new tensors."""

    def __init__(self, model: nn.Module):
        ignored = ignored_by_ddp(model)
        # Each module, and the names of its excluded buffers. DDP's names of buffers directly in the model have no leading dot,
        # unless its names of parameters.
        self._holders = [
            (module, frozenset(name for name in module._buffers if f"{path}.{name}".removeprefix(".") in ignored))
            for path, module in model.named_modules()
        ]

    def held(self) -> list[torch.Tensor]:
        """Returns the buffers, each once."""
        places = ((module._buffers, ignored) for module, ignored in self._holders if module._buffers)
        held = (b for own, ignored in places for name, b in own.items() if b is not None and name not in ignored)
        return list({id(buffer): buffer for buffer in held}.values())

    @property
    def are_saved(self) -> bool:
        """Whether some of the buffers are in the state dict."""
        return any(
            module._buffers.keys() - module._non_persistent_buffers_set - ignored for module, ignored in self._holders
        )


def has_buffers(model: nn.Module) -> bool:
    """Whether the model has buffers to be kept equal on all ranks."""
    return bool(_SharedBuffers(model).held())


class ModelBuffers:
    """Broadcasts all buffers of a model in one message, before training forwards as DDP does, and after steps.

    Args:
        device: device from which the transport sends.

    Attributes:
        is_due: the next training forward sends the buffers, like DDP's `require_forward_param_sync`.
    """

    def __init__(self, model: nn.Module, transport: Transport, device: torch.device):
        self._model = model
        self._buffers = _SharedBuffers(model)
        self._are_saved = self._buffers.are_saved
        self._transport = transport
        self._device = device
        self.is_due = True
        self._is_due_after_step = False
        # The number of training forwards begun so far, and the same number at the end of the last pass.
        self._begun = self._begun_before = 0

    def before_forward(self) -> None:
        """Collective in a training forward, except after a forward under no_sync; see [Note: buffers before a forward]."""
        if self._is_training:
            self._begun += 1
            if self.is_due:
                self._send()

    def after_forward(self, *, under_no_sync: bool) -> None:
        """Notes whether the next training forward sends the buffers."""
        if self._is_training:
            self.is_due = not under_no_sync
            self._is_due_after_step = self.is_due and self._are_saved

    def after_step(self) -> None:
        """Collective after a training forward outside no_sync; see [Note: buffers after a step]."""
        self._begun_before = self._begun
        if self._is_due_after_step:
            self._send()

    def after_pass(self, *, failed: bool) -> None:
        """Called after a forward and backward, also if some rank has failed.

        Args:
            failed: this rank's pass has failed. Then this rank joins the broadcast with which the others' forward has begun.
        """
        # If this rank's forward had begun, its buffers are already sent, and a second broadcast would hang.
        if failed and self._begun == self._begun_before and self.is_due and self._is_training:
            self._send()
        self._begun_before = self._begun

    @property
    def _is_training(self) -> bool:
        return self._model.training and torch.is_grad_enabled()

    def _send(self) -> None:
        self._is_due_after_step = False
        _broadcast(self._buffers.held(), self._transport, self._device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves a model's buffers to `device`, as `Module.to` does. The tensors stay the same objects.

    Raises:
        ValueError: a buffer is on the meta device.
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
    """Copies rank 0's buffers to every rank, in place; see [Note: buffers between a forward and its backward]. Collective.

    Args:
        device: device from which the transport sends.
    """
    _broadcast(_SharedBuffers(model).held(), transport, device)


def _broadcast(held: Sequence[torch.Tensor], transport: Transport, device: torch.device) -> None:
    # Sort by element size, largest first, so that each buffer starts at a byte offset aligned to its dtype.
    buffers = sorted(held, key=lambda buffer: -buffer.itemsize)
    if not buffers:
        return
    flat = torch.cat([buffer.detach().reshape(-1).view(torch.uint8).to(device) for buffer in buffers])
    # One message for all buffers, because each message adds latency.
    transport.broadcast(flat, _LABEL)
    for buffer, values in zip(buffers, flat.split([buffer.nbytes for buffer in buffers])):
        # Write through `data`, which has the effect of DDP's copy: a backward that has saved the buffer notices no edit.
        buffer.data.copy_(values.view(buffer.dtype).view(buffer.shape))
