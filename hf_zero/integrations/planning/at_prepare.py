"""`stage: auto` when accelerate prepares a model: what is known of the job then."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ...config import ZeroConfig
from ..accelerator.batch import micro_batches_of
from ..frames import find_in_callers
from .auto import MicroBatch, assume, choose_config

_UNSET_LENGTH = 10**6
"""Tokenizers say 1e30 where they know no longest text."""


def config_for(config: ZeroConfig, accelerator: Accelerator, args: Sequence[Any]) -> ZeroConfig:
    """The config that a model among `args` is trained with; `config` where there is none, or its stage is known. Collective."""
    model = next((arg for arg in args if isinstance(arg, nn.Module)), None)
    if not config.is_open or model is None:
        return config
    parameters = set(model.parameters())
    prepared = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
    optimizers = [
        each
        for each in (*(arg for arg in args if isinstance(arg, torch.optim.Optimizer)), *prepared)
        if any(p in parameters for group in each.param_groups for p in group["params"])
    ]
    return choose_config(
        config,
        model,
        optimizers,
        device=accelerator.device,
        mixed_precision=accelerator.mixed_precision,
        batch=_micro_batch(accelerator, model, args),
    ).config


def _micro_batch(accelerator: Accelerator, model: nn.Module, args: Sequence[Any]) -> MicroBatch:
    rows: Any = None
    length: Any = None
    loaders = [*(arg for arg in args if isinstance(arg, DataLoader)), *accelerator._dataloaders]
    if loaders:
        sampler = getattr(loaders[0], "batch_sampler", None)
        rows = getattr(sampler, "batch_size", None) or getattr(loaders[0], "batch_size", None)
        if getattr(sampler, "split_batches", False) or (loaders[0] in args and accelerator.split_batches):
            rows = rows and max(1, rows // accelerator.num_processes)
    trainer = _trainer()
    if trainer is not None:
        rows = rows or trainer.args.train_batch_size
        tokenizer = getattr(trainer, "processing_class", None)
        length = getattr(trainer.args, "max_length", None) or getattr(tokenizer, "model_max_length", None)
    is_length = isinstance(length, int) and 0 < length < _UNSET_LENGTH
    return assume(
        model, rows if isinstance(rows, int) else None, length if is_length else None, micro_batches_of(accelerator)
    )


def _trainer() -> Any:
    if "transformers.trainer" not in sys.modules:
        return None
    from transformers import Trainer

    return find_in_callers(lambda candidate: isinstance(candidate, Trainer))
