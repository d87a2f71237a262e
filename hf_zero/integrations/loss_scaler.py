"""The loss scaler of float16 training. It replaces accelerate's, and the ranks agree on an overflow."""

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn

from ..buckets.unread_weights import wanted_dtype
from ..config import AUTO
from ..engine.engine import ZeroEngine
from ..engine.loss_scale import GradScaler, scale_over_shards


def seat_scaler(accelerator: Accelerator, models: Iterable[nn.Module]) -> None:
    """Adds a loss scaler to the accelerator if its settings, the config or the models' dtype need one.

    Optimizers prepared later step with this scaler, and `accelerator.backward` scales the loss.
    """
    asked = accelerator.mixed_precision == "fp16"
    if accelerator.scaler is None and (asked or _trains_float16(accelerator, models)):
        handler = accelerator.scaler_handler
        accelerator.scaler = GradScaler(accelerator.device.type, **(handler.to_kwargs() if handler else {}))
        # On a CPU accelerate silently ignores fp16.
        accelerator.native_amp = accelerator.native_amp or asked
    if accelerator.scaler is not None:
        # Also for a scaler made by accelerate: otherwise each rank looks for overflows in its own shards only, and the ranks
        # skip different steps.
        scale_over_shards(accelerator.scaler)


def unscale(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Unscales the gradients of an engine's optimizers before a clip, unless already done. Collective."""
    for sharded in engine.optimizers if accelerator.scaler is not None else ():
        if not accelerator.scaler.has_unscaled(sharded.optimizer):
            accelerator.scaler.unscale_(sharded.optimizer)


def _trains_float16(accelerator: Accelerator, models: Iterable[nn.Module]) -> bool:
    param_dtype = accelerator.zero_config.param_dtype
    if param_dtype != AUTO:
        return param_dtype == "float16"
    # Asks `wanted_dtype`, because a parameter still in its checkpoint file has the file's dtype.
    return any(p.requires_grad and wanted_dtype(p) == torch.float16 for model in models for p in model.parameters())
