"""Trainer's micro-batches in parts, where memory runs out."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ...diagnose.rescue import Pass


def pass_of(trainer: Trainer, stock: Any, model: nn.Module, num_items_in_batch: Any) -> Pass:
    """What takes some rows of a micro-batch.

    Args:
        stock: the Trainer's own `training_step`.
        num_items_in_batch: what the whole step's loss is divided by: a sum over rows, whose parts are sums too.
    """
    is_sum = _is_sum(trainer, model, num_items_in_batch)

    def run(inputs: Any, weight: float) -> torch.Tensor:
        with _weighted_loss(trainer, float(weight > 0) if is_sum else weight):
            return stock(model, inputs, num_items_in_batch)

    return run


def ignores_num_items(head: nn.Module) -> bool:
    """Whether a model's loss is a mean whatever `num_items_in_batch` it is given, as far as its source tells."""
    try:
        source = inspect.getsource(type(head).forward)
    except (OSError, TypeError):
        # No source to judge by (a compiled or generated class).
        return False
    return "loss_function" not in source and "num_items_in_batch" not in source and "CrossEntropyLoss" in source


def _is_sum(trainer: Any, model: nn.Module, num_items_in_batch: Any) -> bool:
    """Whether the loss has been divided by the items of the whole step: as Trainer decides it, but for some heads."""
    said = getattr(trainer, "loss_is_scaled_for_ga", None)
    if said is not None:
        return bool(said)
    if trainer.compute_loss_func is not None:
        return True
    accepts = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return bool(accepts and not ignores_num_items(trainer.accelerator.unwrap_model(model, keep_torch_compile=False)))


@contextmanager
def _weighted_loss(trainer: Any, weight: float) -> Iterator[None]:
    if weight == 1.0:
        yield
        return
    compute_loss = trainer.compute_loss

    def weighted(*args: Any, **kwargs: Any) -> Any:
        found = compute_loss(*args, **kwargs)
        return (found[0] * weight, *found[1:]) if isinstance(found, tuple) else found * weight

    trainer.compute_loss = weighted
    try:
        yield
    finally:
        del trainer.compute_loss
