"""Training without the engine in an Accelerator that has one: stopped at the first forward or step."""

import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...engine_reference import engine_attached_to
from ..frames import find_in_callers


def refuse_step_without_engine(optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
    """A hook before the steps of an optimizer that was prepared when no model was, until an engine has it."""
    raise RuntimeError(
        f"hf_zero: {type(optimizer).__name__} steps without the engine: it was prepared, and the model that it trains was not. "
        "Call accelerator.prepare(model, optimizer), also in separate calls, before training."
    )


class RefuseTrainingAlone:
    """A forward hook that stops a model from training on each rank by itself, while it has no engine."""

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)

    def __call__(self, module: nn.Module, _args: tuple) -> None:
        model = self._model()
        if model is None or not (module.training and torch.is_grad_enabled()) or engine_attached_to(model) is not None:
            return
        if find_in_callers(lambda candidate: isinstance(candidate, DistributedDataParallel)) is not None:
            # A plain Trainer or Accelerator has it now.
            return
        if any(p.requires_grad for p in model.parameters()):
            raise RuntimeError(
                f"hf_zero: {type(model).__name__} was prepared without its optimizer, so its gradients would stay on each rank. "
                "Call accelerator.prepare(model, optimizer) (also in separate calls) before training; for inference use "
                "torch.no_grad() or model.eval()."
            )

    def __deepcopy__(self, memo: dict) -> "RefuseTrainingAlone":
        return RefuseTrainingAlone(nn.Module())

    def __reduce__(self):
        return RefuseTrainingAlone, (nn.Module(),)
