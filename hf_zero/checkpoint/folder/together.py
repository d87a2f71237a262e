"""All ranks succeed at a step of a checkpoint, or all fail with the reason of the first that did."""

from collections.abc import Callable
from typing import TypeVar

from ..format.manifest import CheckpointError

Exchange = Callable[[object], list]
"""Every rank's picklable value, in rank order."""

Result = TypeVar("Result")


def together(exchange: Exchange, work: Callable[[], Result], *, doing: str, then: str) -> list[Result]:
    """Runs `work` on this rank; returns every rank's result, in rank order. Collective.

    Args:
        work: returns something picklable.
        doing: what failed, in words ("write to checkpoint-5/zero").
        then: what that means and what to do.

    Raises:
        CheckpointError: on every rank, with the first failing rank's reason.
    """
    fault: Exception | None = None
    result = None
    try:
        result = work()
    except Exception as error:
        fault = error
    reason = (
        None
        if fault is None
        else str(fault)
        if isinstance(fault, CheckpointError)
        else f"{type(fault).__name__}: {fault}"
    )
    reports = exchange((reason, result))
    for rank, (theirs, _) in enumerate(reports):
        if theirs is not None:
            raise CheckpointError(f"hf_zero: rank {rank} could not {doing}: {theirs}. {then}") from fault
    return [result for _, result in reports]
