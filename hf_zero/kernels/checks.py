"""What every kernel asks of the tensors it is given: a kernel trusts them and would write beside them."""

from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def check_scalar(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises `ValueError` unless `tensor` is one float32 element on `device`."""
    if tensor.numel() != 1 or tensor.dtype != torch.float32 or tensor.device != device:
        raise ValueError(
            f"hf_zero: {name} is {tensor.numel()} elements of {tensor.dtype} on {tensor.device}; it must be one float32 "
            f"element on {device}, so that no value crosses to the host."
        )
