"""Parameters whose values still lie in a checkpoint file, memory-mapped, until the engine takes this rank's part."""

from dataclasses import dataclass

import torch
from torch import nn

from ..comm.transport import Label, Transport
from ..read_ahead import ask_for

_MARK = "_hf_zero_loaded"


@dataclass(frozen=True, kw_only=True)
class LoadedFromFile:
    """What is known of a parameter whose data is a view of a file.

    Attributes:
        dtype: that the model wants; the file may have another.
    """

    dtype: torch.dtype


def mark_loaded(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Notes that every rank reads this parameter from equal files, and the dtype that it is wanted in."""
    parameter.__dict__[_MARK] = LoadedFromFile(dtype=dtype)


def is_loaded(parameter: nn.Parameter) -> bool:
    """Whether all ranks have this parameter's values from a file, so that none has to send them."""
    return _MARK in parameter.__dict__


def wanted_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype that a parameter is to be trained in."""
    return parameter.__dict__[_MARK].dtype if is_loaded(parameter) else parameter.dtype


def forget_loaded(parameter: nn.Parameter) -> None:
    """Takes the note away: the parameter has memory of its own now."""
    parameter.__dict__.pop(_MARK, None)


def take_from_file(parameter: nn.Parameter, device: torch.device) -> None:
    """Gives a parameter that still lies in a file memory of its own on the device, in the dtype that it is wanted in."""
    if not is_loaded(parameter):
        return
    ask_for(parameter.data)
    parameter.data = parameter.detach().to(device, wanted_dtype(parameter), copy=True)
    forget_loaded(parameter)


def take_rank_0s(parameter: nn.Parameter, device: torch.device, transport: Transport) -> None:
    """Puts a parameter on the device with rank 0's values, unless all ranks have them from a file. Collective."""
    if is_loaded(parameter):
        return
    # As DDP: what rank 0 has is what is trained, whatever the other ranks were seeded with.
    with torch.no_grad():
        values = parameter.detach().to(device).contiguous()
        transport.broadcast(values, Label(kind="broadcast parameters", subject="the model"))
        if values.data_ptr() != parameter.data_ptr():
            parameter.data = values
