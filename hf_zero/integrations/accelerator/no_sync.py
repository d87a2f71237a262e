"""`model.no_sync()` on a prepared model, for loops that were written for DistributedDataParallel."""

import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

from torch import nn

from ...engine.engine import ZeroEngine

_NAME = "no_sync"


class NoSync:
    """What stands on the model as `no_sync`: micro-batches inside only accumulate.

    A copy or pickle of the model gets one that does nothing.
    """

    def __init__(self, engine: ZeroEngine | None = None):
        self._engine = weakref.ref(engine) if engine is not None else lambda: None

    def __call__(self) -> AbstractContextManager[None]:
        """As `ZeroEngine.no_sync`.

        Raises:
            NotImplementedError: accelerate's LocalSGD asks.
        """
        engine = self._engine()
        if engine is None:
            return nullcontext()
        _refuse_local_sgd(sys._getframe(1))
        return engine.no_sync()

    def __deepcopy__(self, memo: dict) -> "NoSync":
        return NoSync()

    def __reduce__(self):
        return NoSync, ()


def add_no_sync(engine: ZeroEngine, *holders: nn.Module) -> None:
    """Gives each of the modules the method, unless its class has one of its own."""
    for holder in holders:
        if isinstance(vars(holder).get(_NAME), NoSync) or not hasattr(holder, _NAME):
            vars(holder)[_NAME] = NoSync(engine)


def _refuse_local_sgd(caller: FrameType) -> None:
    if caller.f_globals.get("__name__") != "accelerate.local_sgd":
        return
    asked = getattr(caller.f_locals.get("self"), "local_sgd_steps", "N")
    raise NotImplementedError(
        f"hf_zero: LocalSGD(local_sgd_steps={asked}) lets each rank step a whole model by itself and then averages them, "
        f"and here the ranks share one optimizer's state. Set `comm.sync_every: {asked}` in hf_zero's config, which does the "
        "like with groups of ranks, and leave LocalSGD out or pass it enabled=False."
    )
