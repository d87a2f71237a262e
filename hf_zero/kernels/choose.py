"""Which form of a kernel runs: Triton's on a CUDA device where triton is installed, else the torch reference."""

import functools
import importlib.util
import os

import torch

from ..config import AUTO


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed; found without importing it."""
    return importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether kernels on tensors of `device` run in their Triton form; on the host, where TRITON_INTERPRET=1 asks for it."""
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
    return device.type == "cuda" and torch.version.cuda is not None and has_triton()


def uses_kernels(wanted: str, device: torch.device) -> bool:
    """Whether an engine on `device` measures gradients and steps by kernels.

    Args:
        wanted: the config's `kernels`. `auto` is where they run in their Triton form.
    """
    return runs_triton(device) if wanted == AUTO else wanted == "always"
