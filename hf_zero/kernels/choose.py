"""Which form of a kernel runs: Triton's on a CUDA device where triton is installed, else the torch reference."""

import functools
import importlib.util

import torch


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed; found without importing it."""
    return importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether kernels on tensors of `device` run in their Triton form."""
    return device.type == "cuda" and torch.version.cuda is not None and has_triton()
