"""A model's buffers (batch-norm statistics, position ids) kept as rank 0's, as DDP does.

[Note: buffers between a forward and its backward]
Several forwards may come before one backward, and what autograd has saved of a buffer in the first must still be there then: so
DDP, before the second, writes rank 0's buffers without counting it as an edit. What differs between ranks
then, as batch-norm statistics do, no backward may read.

[Note: buffers behind a step]
DDP also broadcasts before the first forward of an evaluation, which so sees rank 0's buffers. Here the script may have called it
on one rank alone, with the model that all ranks train, and no forward without gradients is collective. A step is, so they
are sent behind it, too: those of a model that saves some, as batch norms do. Others (position ids, rotary frequencies) are
constants that training does not change.

[Note: buffers before a forward]
A script may write a buffer on any rank, in place, by `.data` or by assignment, and no rank sees another's write. So nothing
is left out because this rank has seen no change: a training forward sends all buffers wherever DDP's would.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ..comm.ledger import Label
from ..comm.transport import Transport
from .models import named_models_in

_LABEL = Label(kind="broadcast buffers", subject="the model")


def ignored_by_ddp(model: nn.Module) -> frozenset[str]:
    """Names of parameters and buffers that a script has told DDP to leave to each rank.

    DDP reads `_ddp_params_and_buffers_to_ignore` of the module that it wraps.
    """
    return frozenset(
        f"{prefix}.{name.removeprefix('.')}" if prefix else name
        for prefix, each in named_models_in(model)
        for name in getattr(each, "_ddp_params_and_buffers_to_ignore", ())
    )


def ignored_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """The parameters among `ignored_by_ddp`: in no bucket, so that each rank trains and keeps its own.

    As for DDP's reducer, a trained parameter is left out if all of its names are listed (a tied weight has several), and the
    model's own have names with a leading dot.
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
    """The buffers of a model that all ranks have alike. They are looked up anew each time: a script may assign others."""

    def __init__(self, model: nn.Module):
        ignored = ignored_by_ddp(model)
        # Each module, and the names of its buffers that are left out.
        # DDP lists buffers without the leading dot that its names of the model's own parameters have.
        self._places = [
            (module, frozenset(name for name in module._buffers if f"{path}.{name}".removeprefix(".") in ignored))
            for path, module in model.named_modules()
        ]

    def held(self) -> list[torch.Tensor]:
        """Each once."""
        places = ((module._buffers, ignored) for module, ignored in self._places if module._buffers)
        held = (b for own, ignored in places for name, b in own.items() if b is not None and name not in ignored)
        return list({id(buffer): buffer for buffer in held}.values())

    @property
    def are_saved(self) -> bool:
        """Whether some are in the state dict."""
        return any(
            module._buffers.keys() - module._non_persistent_buffers_set - ignored for module, ignored in self._places
        )


def has_buffers(model: nn.Module) -> bool:
    """Whether the model has buffers that all ranks are to have alike."""
    return bool(_SharedBuffers(model).held())


class ModelBuffers:
    """Broadcasts all buffers of a model in one message: before training forwards as DDP does, and behind steps.

    Args:
        device: that the transport sends from.

    Attributes:
        is_due: the next training forward sends them; DDP's `require_forward_param_sync`.
    """

    def __init__(self, model: nn.Module, transport: Transport, device: torch.device):
        self._model = model
        self._buffers = _SharedBuffers(model)
        self._are_saved = self._buffers.are_saved
        self._transport = transport
        self._device = device
        self.is_due = True
        self._is_due_behind_step = False
        # Training forwards that have begun, and how many of them had when the last pass ended.
        self._begun = self._begun_before = 0

    def before_forward(self) -> None:
        """Collective for a training forward, but for those behind one under no_sync; see [Note: buffers before a forward]."""
        if self._is_training:
            self._begun += 1
            if self.is_due:
                self._send()

    def after_forward(self, *, under_no_sync: bool) -> None:
        """Notes whether the next training forward is to send."""
        if self._is_training:
            self.is_due = not under_no_sync
            self._is_due_behind_step = self.is_due and self._are_saved

    def after_step(self) -> None:
        """Collective where a training forward came before; see [Note: buffers behind a step]."""
        self._begun_before = self._begun
        if self._is_due_behind_step:
            self._send()

    def after_pass(self, *, failed: bool) -> None:
        """Called behind a forward and backward that may have failed on some rank.

        Args:
            failed: they did on this one, which then takes part in the broadcast that the others' forward has begun with.
        """
        # A forward that had begun has sent its buffers already: a second broadcast would meet no other rank.
        if failed and self._begun == self._begun_before and self.is_due and self._is_training:
            self._send()
        self._begun_before = self._begun

    @property
    def _is_training(self) -> bool:
        return self._model.training and torch.is_grad_enabled()

    def _send(self) -> None:
        self._is_due_behind_step = False
        _broadcast(self._buffers.held(), self._transport, self._device)


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
    _broadcast(_SharedBuffers(model).held(), transport, device)


def _broadcast(held: Sequence[torch.Tensor], transport: Transport, device: torch.device) -> None:
    # By the size of an element: then each begins, among bytes, where its dtype can be read.
    buffers = sorted(held, key=lambda buffer: -buffer.itemsize)
    if not buffers:
        return
    flat = torch.cat([buffer.detach().reshape(-1).view(torch.uint8).to(device) for buffer in buffers])
    # One message for all buffers: each would cost a latency of its own.
    transport.broadcast(flat, _LABEL)
    for buffer, values in zip(buffers, flat.split([buffer.nbytes for buffer in buffers])):
        # By `data`, as DDP does in effect: a backward that has saved the buffer sees no edit.
        buffer.data.copy_(values.view(buffer.dtype).view(buffer.shape))
