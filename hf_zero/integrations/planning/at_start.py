"""Activations and peak memory of a run that is about to start, forecast on rank 0 from the first rows of its data.

[Note: the first rows]
A prepared data loader's data set is asked for as many rows as a micro-batch has, and its `collate_fn` makes a batch of them. The
sampler is not asked, and what random numbers that takes are given back, so the run sees the same batches with or without this.
"""

import inspect
import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import IterableDataset

from ...config import ConfigError, ZeroConfig
from ...offload.budget import ranks_on_this_host
from ...plan.errors import PlanError
from ...plan.forecast import AtStart
from ..accelerator.batch import micro_batches_of
from .forecasts import Job
from .trace import trace

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def forecast_at_start(
    accelerator: Accelerator, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: ZeroConfig
) -> AtStart | None:
    """What a rank will need at its peak; None where it would not be said: on other ranks, and where warnings are not shown.

    Args:
        model: before it has an engine.
    """
    if not accelerator.is_main_process or _is_quiet():
        return None
    try:
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise PlanError("hf_zero: the model is split over ranks")
        batch = _named(_first_batch(accelerator), model)
        shape = _shape_of(batch)
        with _random_numbers_given_back():
            traced = trace(
                model,
                batch,
                shape=shape,
                tokens=0,
                autocast=_AUTOCAST.get(accelerator.mixed_precision),
                param_dtype=config.param_dtype,
            )
        job = Job(
            model=model,
            optimizers=optimizers,
            device=accelerator.device,
            world_size=accelerator.num_processes,
            ranks_a_node=ranks_on_this_host(),
            activations=traced,
            accumulates=micro_batches_of(accelerator) > 1,
        )
        return AtStart(batch=shape, ours=job.forecast("", {}, config), ddp=job.forecast_ddp())
    except (ConfigError, ValueError) as error:
        # PlanError is among them. What the engine refuses it will say itself.
        return AtStart(batch=str(error).removeprefix("hf_zero: "))


def _is_quiet() -> bool:
    if not logging.getLogger("hf_zero").isEnabledFor(logging.WARNING):
        return True
    if "transformers" not in sys.modules:
        return False
    from transformers.utils.logging import get_verbosity

    return get_verbosity() > logging.WARNING


def _first_batch(accelerator: Accelerator) -> Any:
    """What the data loader makes of the first rows of the data; see [Note: the first rows]."""
    loader = next(iter(accelerator._dataloaders), None)
    if loader is None:
        raise PlanError("hf_zero: no data loader was prepared before or with the model")
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    rows = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_indexed or collate is None or not isinstance(rows, int):
        raise PlanError("hf_zero: the data set has no rows to be asked for by number")
    if getattr(loader.batch_sampler, "split_batches", False):
        rows = max(1, rows // accelerator.num_processes)
    try:
        with _random_numbers_given_back():
            batch = collate([dataset[number] for number in range(min(rows, len(dataset)))])
    except Exception as error:
        # Any code of the script's.
        raise PlanError(
            f"hf_zero: the first rows of the data cannot be collated ({type(error).__name__}: {str(error)[:100]})"
        ) from error
    return batch


def _named(batch: Any, model: nn.Module) -> Mapping[str, Any]:
    """A batch as keyword arguments of the model's forward.

    The tensors of a tuple are taken for the model's input, an attention mask where there are three, and labels, in this order.
    """
    if isinstance(batch, Mapping):
        return batch
    tensors = [batch] if torch.is_tensor(batch) else batch
    kinds = inspect.signature(model.forward).parameters
    names = [name for name, kind in kinds.items() if kind.kind is kind.POSITIONAL_OR_KEYWORD]
    if not (isinstance(tensors, list | tuple) and tensors and all(map(torch.is_tensor, tensors)) and names):
        raise PlanError("hf_zero: batches are neither the keyword arguments of a forward nor tensors")
    main = getattr(model, "main_input_name", None)
    found = {main if main in names else names[0]: tensors[0]}
    if len(tensors) > 1 and "labels" in names:
        found["labels"] = tensors[-1]
    if len(tensors) == 3 and "attention_mask" in names:
        found["attention_mask"] = tensors[1]
    return found


def _shape_of(batch: Mapping[str, Any]) -> str:
    largest = max((value for value in batch.values() if torch.is_tensor(value)), key=torch.Tensor.numel, default=None)
    return "" if largest is None else " x ".join(map(str, largest.shape))


@contextmanager
def _random_numbers_given_back() -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    pythons, numpys = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(pythons)
        if numpys is not None:
            numpy.random.set_state(numpys)
