"""Micro-batches for a model of transformers, as from a data loader, without values."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..forecast.fit import PlanError

_ONE_LABEL_A_ROW = ("SequenceClassification", "ImageClassification", "AudioClassification")
_A_LABEL_A_TOKEN = ("CausalLM", "LMHead", "MaskedLM", "TokenClassification", "ConditionalGeneration", "PreTraining")
_MASK = "attention_mask"


def longest(model: nn.Module) -> int | None:
    """Returns the longest input allowed by the model's config; None if unknown."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_source_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and 0 < value < 2**20:
            return value
    return None


def batch_of(model: nn.Module, rows: int, length: int) -> dict[str, Any]:
    """Returns the keyword arguments of a training forward. Call inside a trace.

    Raises:
        PlanError: the model needs an unknown input.
    """
    inner = inner_model(model)
    main = getattr(inner, "main_input_name", "input_ids")
    config = getattr(inner, "config", None)
    inputs: dict[str, Any] = {}
    if main == "input_ids":
        inputs[main] = torch.zeros((rows, length), dtype=torch.long)
    elif main == "pixel_values":
        size, channels = getattr(config, "image_size", 224), getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        inputs[main] = torch.zeros((rows, channels, height, width), dtype=_dtype_of(model))
    elif main == "input_features":
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
        inputs[main] = torch.zeros((rows, bins, frames), dtype=_dtype_of(model))
    else:
        raise PlanError(
            f"hf_zero: {type(inner).__name__} reads {main!r}, and the planner does not know such batches. Pass make_plan a "
            "model and its `batch`."
        )
    inputs |= _labels(inner, rows, length)
    if "use_cache" in inspect.signature(inner.forward).parameters:
        inputs["use_cache"] = False
    return inputs


def part_of(batch: Mapping[str, Any], sp_size: int) -> dict[str, Any]:
    """Returns a rank's part of a batch whose sequences are computed by `sp_size` ranks: the first tokens."""

    def cut(value: Any) -> Any:
        return value[:, : -(-value.shape[1] // sp_size)] if torch.is_tensor(value) and value.ndim > 1 else value

    return {name: cut(value) for name, value in batch.items()}


def exchanged_bytes(model: nn.Module, tokens: int, sp_size: int, itemsize: int) -> int:
    """Counts the bytes sent by a rank in a forward to the other ranks of its sequences: queries, keys, values and results.

    Backward sends the same number of bytes. If there are fewer key heads than ranks, several ranks get the same head.

    Args:
        tokens: tokens of all samples on this rank.
        itemsize: bytes of an element.
    """
    config: Any = getattr(inner_model(model), "config", None)
    if not all(hasattr(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")):
        return 0
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    pairs = math.lcm(getattr(config, "num_key_value_heads", None) or heads, sp_size)
    elements = config.num_hidden_layers * tokens * width * 2 * (heads + pairs)
    return elements * itemsize * (sp_size - 1) // sp_size


def inner_model(model: nn.Module) -> nn.Module:
    """Returns the model of transformers inside PEFT's wrapper."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def _labels(model: nn.Module, rows: int, length: int) -> dict[str, Any]:
    name, parameters = type(model).__name__, inspect.signature(model.forward).parameters
    if "start_positions" in parameters:
        return {each: torch.zeros(rows, dtype=torch.long) for each in ("start_positions", "end_positions")}
    if "labels" not in parameters:
        return {}
    if any(part in name for part in _ONE_LABEL_A_ROW):
        return {"labels": torch.zeros(rows, dtype=torch.long)}
    if any(part in name for part in _A_LABEL_A_TOKEN):
        return {"labels": torch.zeros((rows, length), dtype=torch.long)}
    return {}


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
