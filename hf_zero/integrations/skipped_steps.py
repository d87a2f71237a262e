"""Reports steps that `nonfinite: skip` skips to accelerate and Trainer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from accelerate.optimizer import AcceleratedOptimizer

from ..engine.engine import ZeroEngine
from ..hooks.mixins import mix_in
from ..step.sharded_optimizer import engine_stepped_by

if TYPE_CHECKING:
    # Mixed into accelerate's optimizers at run time; the type checker treats their attributes as inherited.
    from accelerate.optimizer import AcceleratedOptimizer as _OptimizerBase
else:
    _OptimizerBase = object


def tell_of_skipped_steps(engine: ZeroEngine, prepared: Iterable[AcceleratedOptimizer]) -> None:
    """Makes `accelerator.optimizer_step_was_skipped` true after a skipped step, as after a float16 overflow.

    Prepared schedulers and Trainer read this attribute and keep the learning rate unchanged.

    Args:
        engine: the engine.
        prepared: the accelerator's optimizers; only the engine's own ones are changed.
    """
    mine = {id(sharded.optimizer) for sharded in engine.optimizers}
    for accelerated in prepared:
        # With a loss scaler, accelerate already detects skipped steps.
        if id(accelerated.optimizer) in mine and accelerated.scaler is None:
            mix_in(accelerated, _SkipsBadSteps)


class _SkipsBadSteps(_OptimizerBase):
    """Mixed into accelerate's wrapper of an optimizer stepped by an engine."""

    @property
    def step_was_skipped(self) -> bool:
        engine = engine_stepped_by(self.optimizer)
        return super().step_was_skipped if engine is None else engine.bad_steps.was_skipped
