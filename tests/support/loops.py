"""Parts of training loops that are the same under DDP and under the engine, for comparisons of the two."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_zero.config import ConfigLike
from hf_zero.engine.engine import ZeroEngine


def engine_or_ddp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    settings: ConfigLike,
    *,
    find_unused: bool = False,
    **options: bool,
) -> tuple[nn.Module, ZeroEngine | None]:
    """Returns the module that a script calls, and its engine; without settings, the model in DDP and None.

    Args:
        find_unused: DDP's `find_unused_parameters`.
        options: further arguments of the engine.
    """
    if settings is None:
        return DistributedDataParallel(model, find_unused_parameters=find_unused), None
    return model, ZeroEngine(model, optimizer, settings, **options)


def take_step(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Runs a backward and a step; returns the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
