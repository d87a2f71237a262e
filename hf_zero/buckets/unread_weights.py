"""Parameters still in a memory-mapped checkpoint file, from which the engine reads this rank's part."""

from dataclasses import dataclass

import torch
from torch import nn

from ..comm.transport import Transport
from ..comm.waits import Label
from ..read_ahead import ask_for

_MARK = "_hf_zero_loaded"


@dataclass(frozen=True, kw_only=True)
class LoadedFromFile:
    """Marks a parameter whose data is a view of a file.

    Attributes:
        dtype: dtype in the model; the file's may differ.
    """

    dtype: torch.dtype


def mark_loaded(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Notes a parameter's dtype in the model. All ranks read its values from equal files."""
    parameter.__dict__[_MARK] = LoadedFromFile(dtype=dtype)


def is_loaded(parameter: nn.Parameter) -> bool:
    """Whether all ranks read this parameter's values from a file, so no rank has to send them."""
    return _MARK in parameter.__dict__


def wanted_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Returns the dtype in which a parameter will be trained."""
    return parameter.__dict__[_MARK].dtype if is_loaded(parameter) else parameter.dtype


def forget_loaded(parameter: nn.Parameter) -> None:
    """Removes the mark, because the parameter now has its own memory."""
    parameter.__dict__.pop(_MARK, None)


def take_from_file(parameter: nn.Parameter, device: torch.device) -> None:
    """Copies a parameter from its file to the device, in the model's dtype."""
    if not is_loaded(parameter):
        return
    ask_for(parameter.data)
    # Copy even if dtype and device match: otherwise the parameter would stay a view of the mapped file.
    parameter.data = parameter.detach().to(device, wanted_dtype(parameter), copy=True)
    forget_loaded(parameter)


def take_rank_0s(parameter: nn.Parameter, device: torch.device, transport: Transport) -> None:
    """Copies rank 0's values of a parameter to this device, unless all ranks read the values from a file. Collective."""
    if is_loaded(parameter):
        return
    # As in DDP, rank 0's values are trained, regardless of the other ranks' seeds.
    with torch.no_grad():
        # Contiguous, because a collective sends memory in its order, and a rank with different strides would get permuted
        # values.
        values = parameter.detach().to(device).contiguous()
        transport.broadcast(values, Label(kind="broadcast of parameters", subject="the model"))
        # If the address is the same, nothing was copied, and the broadcast has written to the parameter's own memory.
        if values.data_ptr() != parameter.data_ptr():
            parameter.data = values
