"""The loss scaler in accelerate's seat: there where float16 asks for one, and with ranks that agree on an overflow."""

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn

from ...buckets.mapped_parameters import wanted_dtype
from ...config import AUTO
from ...engine.engine import ZeroEngine
from ...optimizer.state.loss_scale import GradScaler, scale_over_shards


def seat_scaler(accelerator: Accelerator, models: Iterable[nn.Module]) -> None:
    """Gives the accelerator a scaler where its settings, the config or the models' own dtype ask for one.

    The optimizers that it prepares afterwards step by way of that scaler, and `accelerator.backward` scales the loss.
    """
    asked = accelerator.mixed_precision == "fp16"
    if accelerator.scaler is None and (asked or _trains_float16(accelerator, models)):
        handler = accelerator.scaler_handler
        accelerator.scaler = GradScaler(accelerator.device.type, **(handler.to_kwargs() if handler else {}))
        # On a CPU accelerate leaves fp16 out without a word.
        accelerator.native_amp = accelerator.native_amp or asked
    if accelerator.scaler is not None:
        scale_over_shards(accelerator.scaler)


def unscale(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Unscales the gradients of an engine's optimizers, before they are clipped, if that has not been done. Collective."""
    for sharded in engine.optimizers if accelerator.scaler is not None else ():
        if not accelerator.scaler.has_unscaled(sharded.optimizer):
            accelerator.scaler.unscale_(sharded.optimizer)


def _trains_float16(accelerator: Accelerator, models: Iterable[nn.Module]) -> bool:
    param_dtype = accelerator.zero_config.param_dtype
    if param_dtype != AUTO:
        return param_dtype == "float16"
    return any(p.requires_grad and wanted_dtype(p) == torch.float16 for model in models for p in model.parameters())
