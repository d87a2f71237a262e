"""Tensors of a safetensors file in memory-mapped pages, which are only read on access."""

import mmap
from pathlib import Path

import torch

from .faults import CheckpointError
from .live_pieces import DTYPE_NAMES
from .safetensors_headers import is_whole_safetensors, spans_in

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype of a safetensors name. Raises `CheckpointError` for a dtype unknown to torch."""
    if name not in _DTYPES:
        raise CheckpointError(f"hf_zero: a safetensors file has dtype {name}; allowed: {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def mapped_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Maps a safetensors file into memory: name → tensor. Writes to a tensor stay in this process.

    Raises:
        CheckpointError: the file is no complete safetensors file.
        OSError: the file cannot be read.
    """
    spans = spans_in(path)
    if spans is None or not is_whole_safetensors(path):
        raise CheckpointError(
            f"hf_zero: {path} cannot be read (its header is missing or states a different length); the checkpoint is damaged, "
            "resume from an earlier one."
        )
    with path.open("rb") as file:
        # Not safetensors' `get_tensor`: it touches a tensor's first page, so the system also reads the pages after it,
        # and a rank would read far more than its part.
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    tensors = {}
    for name, span in spans.items():
        dtype = dtype_named(span.dtype)
        numel = (span.end - span.begin) // dtype.itemsize
        # torch makes no tensor from a buffer without elements.
        flat = (
            torch.frombuffer(pages, dtype=dtype, count=numel, offset=span.begin)
            if numel
            else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.view(span.shape)
    return tensors
