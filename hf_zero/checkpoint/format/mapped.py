"""Tensors of a safetensors file in memory-mapped pages, none of which is read before somebody looks at it."""

import mmap
from pathlib import Path

import torch

from .headers import is_whole_safetensors, spans_in
from .manifest import CheckpointError
from .pieces import dtype_named


def mapped_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Name → tensor, in its shape. What is written to one stays in this process.

    safetensors' own `get_tensor` touches a tensor's first page, and the system then reads what lies around it.

    Raises:
        CheckpointError: not a whole safetensors file.
        OSError: it cannot be read.
    """
    spans = spans_in(path)
    if spans is None or not is_whole_safetensors(path):
        raise CheckpointError(
            f"hf_zero: {path} cannot be read (its header is missing, or says another length); the checkpoint is damaged, "
            "resume from an earlier one."
        )
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    tensors = {}
    for name, span in spans.items():
        dtype = dtype_named(span.dtype)
        numel = (span.end - span.begin) // dtype.itemsize
        flat = (
            torch.frombuffer(pages, dtype=dtype, count=numel, offset=span.begin)
            if numel
            else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.view(span.shape)
    return tensors
