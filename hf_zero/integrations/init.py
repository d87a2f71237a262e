"""Loads a pretrained model without a copy on each rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, core_model_loading

from ..buckets.precision import mark_loaded
from ..comm.watch import ErrorHook
from ..config import ZeroConfig
from ..engine.assemble import FILES_ATTRIBUTE
from ..hooks import replaced
from .saved_weights import describe_files


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
    model.__dict__[FILES_ATTRIBUTE] = describe_files(checkpoint_files or ())
    return result
