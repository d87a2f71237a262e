"""Which form of a kernel runs: Triton's on a CUDA device where triton is installed, else the torch reference."""

import functools
import importlib.util
import os

import torch

from ..config import AUTO

_GIVEN_UP: set[str] = set()
"""Types of devices on which no kernel is launched any more."""


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed; found without importing it."""
    return importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether kernels on tensors of `device` run in their Triton form; on the host, where TRITON_INTERPRET=1 asks for it."""
    if device.type in _GIVEN_UP:
        return False
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
    return device.type == "cuda" and torch.version.cuda is not None and has_triton()


def give_up_triton(device: torch.device) -> None:
    """From now on, kernels on this kind of device run as their torch references in this process."""
    _GIVEN_UP.add(device.type)


def uses_kernels(wanted: str, device: torch.device) -> bool:
    """Whether an engine on `device` measures gradients and steps by kernels.

    Args:
        wanted: the config's `kernels`. `auto` is where they run in their Triton form.
    """
    return runs_triton(device) if wanted == AUTO else wanted == "always"
