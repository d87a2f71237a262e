"""Optimizer state for a script that closes its engine and prepares the optimizers again."""

from dataclasses import dataclass

from torch import nn

from ..layout.intervals import Interval
from ..optimizer.row_state import RowStates
from ..step.sharded_optimizer import ShardedOptimizer
from .engine import ZeroEngine

# Optimizers that train one model in turn: while one optimizer waits, each rank keeps its part of the state.

_KEPT = "_hf_zero_kept_state"


@dataclass(frozen=True)
class _Kept:
    """The state of an optimizer's rows when its engine was closed.

    Attributes:
        intervals: the elements of each parameter on this rank.
        states: the states; {} if they were in files, which were removed with the engine.
        is_lost: whether there were states in files.
    """

    intervals: dict[nn.Parameter, Interval]
    states: RowStates
    is_lost: bool


def keep_state(engine: ZeroEngine) -> None:
    """Keeps the state of an engine before `engine.close()` drops the state, for `take_up_state`."""
    for sharded in engine.optimizers:
        in_files = sharded.is_in_files
        # Keep an entry on every rank, even without a row, because `take_up_state` is collective.
        sharded.optimizer.__dict__[_KEPT] = _Kept(
            intervals=sharded.intervals(),
            states={} if in_files else sharded.row_state.by_parameter(),
            is_lost=in_files and bool(sharded.optimizer.state),
        )


def take_up_state(engine: ZeroEngine) -> None:
    """Restores the state of `keep_state` to optimizers without state. Collective if some state was kept.

    Raises:
        ValueError: on every rank, if the state of an optimizer is lost or does not fit. The engine is closed before.
    """
    for sharded in engine.optimizers:
        kept: _Kept | None = sharded.optimizer.__dict__.pop(_KEPT, None)
        # `kept` is None on all ranks or on none. Otherwise a rank would skip the exchange, and the others would hang.
        if kept is None or any(engine.world.exchange(bool(sharded.optimizer.state))):
            continue
        fault = "was in files that no longer exist" if kept.is_lost else None
        if kept.states and kept.intervals != sharded.intervals():
            fault = "is sharded differently than it would be now"
        faults = [each for each in engine.world.exchange(fault) if each is not None]
        if faults:
            engine.close()
            raise ValueError(_cannot_go_on(sharded, faults[0]))
        sharded.row_state.put(kept.states)


def _cannot_go_on(sharded: ShardedOptimizer, why: str) -> str:
    return (
        f"hf_zero: {type(sharded.optimizer).__name__} trained this model earlier, then another optimizer did, and the state of "
        f"the first one {why}. Train with a new optimizer (a new Trainer has one), which may resume from a checkpoint."
    )
