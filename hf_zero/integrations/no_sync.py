"""`model.no_sync()` on a prepared model, for loops written for DistributedDataParallel."""

import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

from torch import nn

from ..engine.engine import ZeroEngine

_NAME = "no_sync"


class NoSync:
    """Replaces the model's `no_sync`: micro-batches inside only accumulate.

    Copies and pickles of the model get a `no_sync` without effect.
    """

    def __init__(self, engine: ZeroEngine | None = None):
        # A weak reference, because a model of stages 0 to 2 does not keep its engine. Without an engine, no_sync has no
        # effect.
        self._engine = weakref.ref(engine) if engine is not None else lambda: None

    def __call__(self) -> AbstractContextManager[None]:
        """Opens `ZeroEngine.no_sync`. Raises `NotImplementedError` for accelerate's LocalSGD."""
        engine = self._engine()
        if engine is None:
            return nullcontext()
        # LocalSGD is recognized by the caller's frame, because it calls no_sync in its own module like any script.
        _refuse_local_sgd(sys._getframe(1))
        return engine.no_sync()

    def __deepcopy__(self, memo: dict) -> "NoSync":
        return NoSync()

    def __reduce__(self):
        return NoSync, ()


def add_no_sync(engine: ZeroEngine, *holders: nn.Module) -> None:
    """Adds `no_sync` to each of the modules, unless its class already defines `no_sync`."""
    for holder in holders:
        # An existing NoSync may belong to a former, closed engine.
        if isinstance(vars(holder).get(_NAME), NoSync) or not hasattr(holder, _NAME):
            # Assigned in `vars` because a compiled wrapper's setattr sets the attribute on the inner module.
            vars(holder)[_NAME] = NoSync(engine)


def _refuse_local_sgd(caller: FrameType) -> None:
    if caller.f_globals.get("__name__") != "accelerate.local_sgd":
        return
    asked = getattr(caller.f_locals.get("self"), "local_sgd_steps", "N")
    raise NotImplementedError(
        f"hf_zero: LocalSGD(local_sgd_steps={asked}) steps a whole model on each rank, but here the optimizer's state is "
        f"sharded over the ranks. Set `comm.sync_every: {asked}` in hf_zero's config, and remove LocalSGD or pass it "
        "enabled=False."
    )
