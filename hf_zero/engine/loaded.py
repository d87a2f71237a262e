"""Parameters whose values still lie in a checkpoint file, memory-mapped, until the engine takes this rank's part."""

from dataclasses import dataclass

import torch
from torch import nn

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


def cast_as_wanted(parameter: nn.Parameter) -> None:
    """Gives a parameter memory of its own, in the dtype that it is wanted in."""
    parameter.data = parameter.detach().to(wanted_dtype(parameter))
    forget_loaded(parameter)
