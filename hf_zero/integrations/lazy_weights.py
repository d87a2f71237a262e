"""Weights left in their files until an engine reads its part of each."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..buckets.unread_weights import mark_loaded, wanted_dtype
from ..checkpoint.mapped_tensors import mapped_tensors
from ..engine.agreed_start import FILES_ATTRIBUTE

if TYPE_CHECKING:
    pass
from .saved_weights import weight_files

_HEADER_BYTES = 64 * 1024


def leave_in_checkpoint(model: torch.nn.Module, folder: Path) -> bool:
    """Makes each parameter a view of a checkpoint's memory-mapped weights file, as `hf_zero.init` does with pretrained ones.

    Returns:
        False, with the model unchanged, if the files do not contain exactly the model's tensors under their own names.
    """
    files = [folder / name for name in weight_files(folder)]
    views: dict[str, torch.Tensor] = {}
    for file in files:
        views |= mapped_tensors(file)
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    held = {id(tensors[name]) for name in views if name in tensors}
    if not views.keys() <= tensors.keys() or not all(id(p) in held for p in model.parameters()):
        return False
    if any(tensors[name].shape != view.shape for name, view in views.items()):
        return False
    for name, view in views.items():
        tensor = tensors[name]
        if isinstance(tensor, torch.nn.Parameter):
            # Before `data` is replaced, which changes the parameter's dtype.
            wanted = wanted_dtype(tensor)
            tensor.data = view
            mark_loaded(tensor, wanted)
        else:
            tensor.copy_(view)
    model.__dict__[FILES_ATTRIBUTE] = describe_files(files)
    return True


def describe_files(files: Iterable[str | Path]) -> str:
    """Describes the files by sizes and headers, so ranks can check that they read the same model."""
    described = []
    for file in map(Path, files):
        with file.open("rb") as opened:
            # Only the start, with names, dtypes and shapes: otherwise each rank would read all files to use only a part.
            header = hashlib.sha256(opened.read(_HEADER_BYTES)).hexdigest()[:12]
        described.append(f"{file.name} ({file.stat().st_size} bytes, starts with {header})")
    return ", ".join(described)
