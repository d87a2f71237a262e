"""Checks of flat tensors, and the choice between Triton's kernels and torch."""

import functools
import importlib.util
import os
from collections.abc import Sequence
from operator import attrgetter

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
            f"hf_zero: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, but kernels need flat contiguous "
            "tensors. Pass a contiguous `view(-1)`."
        )
    if tensor.numel() != numel:
        raise ValueError(f"hf_zero: {name} has {tensor.numel()} elements, but must have {numel}. Cut or pad it.")
    if tensor.device != device:
        raise ValueError(
            f"hf_zero: {name} is on {tensor.device}, but the others are on {device}. Move it to that device."
        )
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"hf_zero: {name} is {tensor.dtype}; allowed: {allowed}. Cast it first.")


_DEVICE, _DTYPE, _FLOATS = attrgetter("device"), attrgetter("dtype"), frozenset(FLOAT_DTYPES)


def are_flat(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors pass `check_flat`, each with its own number of elements, on the device of the first. Runs in C loops."""
    return (
        {1}.issuperset(map(torch.Tensor.dim, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
        and len(set(map(_DEVICE, tensors))) == 1
        and _FLOATS.issuperset(map(_DTYPE, tensors))
    )


_GIVEN_UP: set[str] = set()
"""Device types on which this process launches no more kernels."""


@functools.cache
def has_triton() -> bool:
    """Whether triton and the package `kernels` are installed. Neither is imported."""
    return is_installed("kernels") and importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether kernels on tensors of `device` run in Triton. On the CPU, this needs TRITON_INTERPRET=1."""
    if device.type in _GIVEN_UP:
        return False
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
    return device.type == "cuda" and torch.version.cuda is not None and has_triton()


def give_up_triton(device: torch.device) -> None:
    """Makes this process run the torch references instead of Triton kernels on this type of device from now on."""
    _GIVEN_UP.add(device.type)


def uses_kernels(wanted: str, device: torch.device) -> bool:
    """Whether an engine on `device` computes norms and steps with kernels.

    Args:
        wanted: the setting `kernels`. `auto` uses kernels if they run in Triton.
    """
    return runs_triton(device) if wanted == AUTO else wanted == "always"
