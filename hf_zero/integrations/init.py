"""Loads a pretrained model without a copy on each rank."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, core_model_loading

from ..buckets.precision import mark_loaded, wanted_dtype
from ..checkpoint.pieces import mapped_tensors
from ..comm.watch import ErrorHook
from ..config import ZeroConfig
from ..engine.assemble import FILES_ATTRIBUTE
from .saved_weights import weight_files
from .seams import replaced

_HEADER_BYTES = 64 * 1024


@contextmanager
def init(plugin: Any = None) -> Iterator[None]:
    """`with hf_zero.init(plugin): model = AutoModel.from_pretrained(path)`: weights stay in their files until `prepare`.

    Inside, `from_pretrained` leaves each weight a view of its memory-mapped file, in the file's dtype. When the model is
    prepared at stage 3, each rank reads the bytes of its own shard from there and casts them to the dtype that
    `from_pretrained` was asked for; no rank ever holds, sends or receives the whole model. Weights that no file has (a
    new head) are made as usual and become rank 0's. A model made from a config is made as usual too, so that it has
    exactly the weights of an ordinary seeded run.

    Args:
        plugin: the ZeroPlugin that will train the model, or what one can be made from. Below stage 3, where every rank
            holds the whole model, nothing is changed.
    """
    ErrorHook.installed()
    config = ZeroConfig.of(getattr(plugin, "config", plugin))
    if not config.may_shard_parameters:
        yield
        return
    stock = PreTrainedModel._load_pretrained_model
    with replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(partial(_leave_in_files, stock))):
        yield


def _leave_in_files(
    stock: Callable[..., Any],
    model: PreTrainedModel,
    state_dict: dict | None,
    checkpoint_files: Sequence[str] | None,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """transformers' own loading, with its cast left out; notes the dtype that each parameter was to be cast to."""
    if any(isinstance(entry, core_model_loading.WeightConverter) for entry in load_config.weight_mapping or ()):
        # Weights that are put together from several of the file's are copies in any case.
        return stock(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    # The views are kept until the end, so that no other tensor can come to lie at the address of one.
    views: dict[int, tuple[torch.Tensor, torch.dtype]] = {}
    materialize = core_model_loading._materialize_copy

    def leave_in_file(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = materialize(tensor, device, None)
        views[values.data_ptr()] = values, dtype or values.dtype
        return values

    with replaced(core_model_loading, "_materialize_copy", leave_in_file):
        result = stock(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    for parameter in model.parameters():
        if parameter.data_ptr() in views and parameter.is_floating_point():
            mark_loaded(parameter, views[parameter.data_ptr()][1])
    for name, buffer in model.named_buffers():
        if buffer.data_ptr() in views:
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module)._buffers[leaf] = buffer.to(views[buffer.data_ptr()][1])
    model.__dict__[FILES_ATTRIBUTE] = _describe_files(checkpoint_files or ())
    return result


def leave_in_checkpoint(model: torch.nn.Module, folder: Path) -> bool:
    """Makes each parameter a view of a checkpoint's memory-mapped weights file, as `init` does with pretrained ones.

    Returns:
        False, and the model untouched, where the files do not have exactly the model's tensors under their own names.
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
            wanted = wanted_dtype(tensor)
            tensor.data = view
            mark_loaded(tensor, wanted)
        else:
            tensor.copy_(view)
    model.__dict__[FILES_ATTRIBUTE] = _describe_files(files)
    return True


def _describe_files(files: Iterable[str | Path]) -> str:
    """Sizes and headers of the files, by which ranks see that they read the same model."""
    described = []
    for file in map(Path, files):
        with file.open("rb") as opened:
            header = hashlib.sha256(opened.read(_HEADER_BYTES)).hexdigest()[:12]
        described.append(f"{file.name} ({file.stat().st_size} bytes, begins {header})")
    return ", ".join(described)
