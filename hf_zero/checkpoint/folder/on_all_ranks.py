"""All ranks succeed at a step of a checkpoint, or all raise `CheckpointError` with the reason of the first that failed."""

from collections.abc import Callable

from ...comm.all_or_none import Exchange, Result, all_results_or_none
from ..format.errors import CheckpointError


def on_all_ranks(exchange: Exchange, work: Callable[[], Result], *, doing: str, then: str) -> list[Result]:
    """Runs `work` on this rank; returns every rank's result, in rank order. Collective.

    Args:
        work: returns something picklable.
        doing: what failed, in words ("write to checkpoint-5/zero").
        then: what that means and what to do.

    Raises:
        CheckpointError: on every rank, with the first failing rank's reason.
    """
    return all_results_or_none(
        exchange,
        work,
        expected=(Exception,),
        tell=lambda error: str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}",
        error=lambda rank, reason: CheckpointError(
            f"hf_zero: rank {rank} could not {doing}: {reason.rstrip('.')}. {then}"
        ),
    )
