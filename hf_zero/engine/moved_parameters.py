"""Errors for parameters and modules outside of the engine's memory, with the script's likely call and its remedy."""

import torch
from torch import nn

from ..buckets.bucket import ParameterSlot


def moved_parameter(slot: ParameterSlot, held: torch.Tensor | None) -> RuntimeError:
    """Returns the error for a parameter with a different data tensor or Parameter object."""
    was, now = slot.bucket.flat.dtype, None if held is None else held.dtype
    if held is None:
        what = "was removed from its module"
        instead = "Change the model before accelerator.prepare, or prepare model and optimizer again."
    elif held.shape != slot.view.shape:
        what = (
            f"has shape {tuple(held.shape)}, but had {tuple(slot.view.shape)} when prepared, as after "
            "resize_token_embeddings"
        )
        instead = (
            "Resize before accelerator.prepare, or call hf_zero.engine_of(model).resize_embeddings(num_tokens) on every rank "
            "instead of model.resize_token_embeddings(num_tokens)."
        )
    elif now != was:
        what = f"is {now}, but was {was} when prepared, as after .to(), .half() or .bfloat16()"
        instead = (
            "Cast before accelerator.prepare, or train in 16 bits by mixed_precision (bf16=True) or `param_dtype` of the "
            f"hf_zero config. To continue in {was} with the current values, call hf_zero.engine_of(model).readopt() on every "
            "rank."
        )
    else:
        what = "is a different Parameter or in different memory, as after load_state_dict(assign=True)"
        instead = (
            "Do that before accelerator.prepare, or call hf_zero.engine_of(model).readopt() on every rank to adopt the new "
            "values."
        )
    return RuntimeError(
        f"hf_zero: {slot.name!r} {what}. It is no longer in the engine's memory, so a step would not update it. {instead}"
    )


def replaced_module(path: str, was: nn.Module, now: nn.Module | None) -> RuntimeError:
    """Returns the error for a module outside of the model."""
    become = "gone" if now is None else f"another {type(now).__name__}"
    return RuntimeError(
        f"hf_zero: {path!r} was a {type(was).__name__} when the model was prepared and is {become} now, as after "
        "merge_and_unload or resize_token_embeddings: the trained parameters are no longer in the model, so a step would not "
        "update it. To continue training, call hf_zero.engine_of(model).close() on every rank before the change, and prepare "
        "the changed model with a new optimizer (to resize, hf_zero.engine_of(model).resize_embeddings(num_tokens) does all of "
        "that). Evaluation under torch.no_grad() and saving work without these calls."
    )
