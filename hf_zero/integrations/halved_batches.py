"""Trainer's micro-batches in parts, after an out-of-memory error."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ..engine.engine import ZeroEngine
from ..extras import extra
from ..hooks.replaced import replaced


def pass_of(
    trainer: Trainer, stock: Any, model: nn.Module, num_items_in_batch: Any
) -> Callable[[Any, float], torch.Tensor]:
    """Returns a function that runs a training step on some samples of a micro-batch.

    Args:
        trainer: the Trainer.
        stock: the Trainer's own `training_step`.
        model: the prepared model.
        num_items_in_batch: divides the loss of the whole step. If the loss is a sum over items, parts of it are sums too.
    """
    is_sum = _is_sum(trainer, model, num_items_in_batch)

    def run(inputs: Any, weight: float) -> torch.Tensor:
        # Parts of a sum are added unweighted. A part of weight 0 runs only because other ranks wait for its collectives, and
        # must add nothing.
        with _weighted_loss(trainer, float(weight > 0) if is_sum else weight):
            return stock(model, inputs, num_items_in_batch)

    return run


def ignores_num_items(head: nn.Module) -> bool:
    """Whether a model's loss remains a mean for any `num_items_in_batch`, judged by the source of its forward."""
    try:
        source = inspect.getsource(type(head).forward)
    except (OSError, TypeError):
        # Without source code (a compiled or generated class), assume not.
        return False
    return "loss_function" not in source and "num_items_in_batch" not in source and "CrossEntropyLoss" in source


def _is_sum(trainer: Any, model: nn.Module, num_items_in_batch: Any) -> bool:
    """Whether the loss is divided by the items of the whole step: Trainer's rule, with exceptions for some heads."""
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

    with replaced(trainer, "compute_loss", weighted):
        yield


@contextmanager
def whole_logits(engine: ZeroEngine | None, sp_size: int, *, wanted: bool) -> Iterator[None]:
    """Gathers the logits of sequences split over ranks only if wanted, because whole logits may not fit on one rank."""
    parallel = None if engine is None or sp_size == 1 else extra("sequence", "sequence_parallel_of")(engine.model)
    if parallel is None:
        yield
        return
    parallel.wants_logits, before = wanted, parallel.wants_logits
    try:
        yield
    finally:
        parallel.wants_logits = before
