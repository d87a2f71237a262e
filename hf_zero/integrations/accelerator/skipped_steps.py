"""Tells accelerate, and Trainer with it, of steps that `nonfinite: skip` leaves out."""

import weakref
from collections.abc import Iterable

import torch
from accelerate.optimizer import AcceleratedOptimizer

from ...engine.engine import ZeroEngine


def tell_of_skipped_steps(engine: ZeroEngine, prepared: Iterable[AcceleratedOptimizer]) -> None:
    """Makes `accelerator.optimizer_step_was_skipped` true behind such a step, as behind an overflow in float16.

    Learning rates then stay as they are: prepared schedulers and Trainer ask for it.

    Args:
        prepared: the accelerator's optimizers; those of the engine are told.
    """
    mine = {id(sharded.optimizer) for sharded in engine.optimizers}
    for accelerated in prepared:
        # With a loss scaler accelerate finds out by itself.
        if id(accelerated.optimizer) in mine and accelerated.scaler is None:
            accelerated.optimizer.register_step_post_hook(_Tell(engine, accelerated))


class _Tell:
    """A hook behind an optimizer's step that keeps neither alive; a copy of the optimizer gets one that does nothing."""

    def __init__(self, engine: ZeroEngine | None = None, accelerated: AcceleratedOptimizer | None = None):
        self._engine = weakref.ref(engine) if engine is not None else lambda: None
        self._accelerated = weakref.ref(accelerated) if accelerated is not None else lambda: None

    def __call__(self, _optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        engine, accelerated = self._engine(), self._accelerated()
        if engine is not None and accelerated is not None:
            accelerated._is_overflow = engine.bad_steps.was_skipped

    def __deepcopy__(self, memo: dict) -> "_Tell":
        return _Tell()

    def __reduce__(self):
        return _Tell, ()
