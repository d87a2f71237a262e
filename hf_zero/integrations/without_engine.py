"""Refuses training without an engine, at the first forward or step."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..hooks.weak import engine_attached_to
from .callers import find_in_callers


def refuse_step_without_engine(optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
    """Refuses steps of an optimizer prepared without a model, until an engine is built for the optimizer."""
    raise RuntimeError(
        f"hf_zero: {type(optimizer).__name__} steps without the engine: it was prepared, but the model that it trains was not. "
        "Call accelerator.prepare(model, optimizer), also in separate calls, before training."
    )


def refuse_training_alone(model: nn.Module, called: nn.Module, _args: tuple) -> None:
    """Refuses the training forward of a model without a training engine: each rank would train its own copy.

    Args:
        model: the prepared model.
        called: the module called by the script, for example a compiled wrapper.
    """
    if not (called.training and torch.is_grad_enabled()):
        return
    # Also ask the parameters' engines: a submodule of a trained model may be prepared for evaluation.
    holders: list[nn.Module | nn.Parameter] = [model, *model.parameters()]
    engine, *others = map(engine_attached_to, holders)
    if any(each is not None and not each.evaluates for each in (engine, *others)):
        return
    if find_in_callers(lambda candidate: isinstance(candidate, DistributedDataParallel)) is not None:
        # A plain Trainer or Accelerator now trains the model.
        return
    # An evaluating engine has frozen the parameters for this forward.
    if engine is not None or any(p.requires_grad for p in model.parameters()):
        raise RuntimeError(
            f"hf_zero: {type(model).__name__} was prepared without its optimizer, so its gradients would stay on each rank. "
            "Call accelerator.prepare(model, optimizer) (also in separate calls) before training; for inference use "
            "torch.no_grad() or model.eval()."
        )
