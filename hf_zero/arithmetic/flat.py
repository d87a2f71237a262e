"""Checks of flat tensors, and the choice between Triton's kernels and torch."""

import functools
import importlib.util
import os
from collections.abc import Sequence

import torch

from ..config import AUTO
from ..extras import is_installed

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ceil_div(numel: int, block: int) -> int:
    return -(-numel // block)


def check_flat(
    name: str, tensor: torch.Tensor, *, numel: int, device: torch.device, dtypes: Sequence[torch.dtype]
) -> None:
    """Raises `ValueError` unless `tensor` is flat, contiguous, on `device`, and has `numel` elements of one of `dtypes`."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"hf_zero: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, and kernels take flat contiguous "
            "tensors. Pass a contiguous `view(-1)`."
        )
    if tensor.numel() != numel:
        raise ValueError(f"hf_zero: {name} has {tensor.numel()} elements, and {numel} are needed. Cut or pad it.")
    if tensor.device != device:
        raise ValueError(f"hf_zero: {name} is on {tensor.device}, and the others are on {device}. Move it there.")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"hf_zero: {name} is {tensor.dtype}, and {allowed} are allowed. Cast it first.")


_GIVEN_UP: set[str] = set()
"""Types of devices on which no kernel is launched any more."""


@functools.cache
def has_triton() -> bool:
    """Whether triton and the room of kernels are installed; found without importing them."""
    return is_installed("kernels") and importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether kernels on tensors of `device` run in Triton; on the host, only under TRITON_INTERPRET=1."""
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
