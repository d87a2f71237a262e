"""Each step of a save succeeds on all ranks, or raises the first failure on all."""

from collections.abc import Callable
from functools import partial

from ..comm.all_or_none import Exchange, Merge, Merged, Result, all_results_or_none, merged_or_none
from .faults import CheckpointError


def on_all_ranks(exchange: Exchange, work: Callable[[], Result], *, doing: str, then: str) -> list[Result]:
    """Runs `work` on this rank; returns every rank's result, in rank order. Collective.

    Args:
        work: returns something picklable.
        doing: the action, in words, that the error says could not be done ("write to checkpoint-5/zero").
        then: the consequence and the remedy, in words.

    Raises:
        CheckpointError: on every rank, with the first failing rank's reason.
    """
    return all_results_or_none(exchange, work, expected=_ANY, tell=_reason, error=partial(_failed, doing, then))


def merged_on_all_ranks(merge: Merge, rank: int, work: Callable[[], Merged], *, doing: str, then: str) -> Merged:
    """Works like `on_all_ranks`, and returns the merged results of all ranks. Collective."""
    return merged_or_none(merge, rank, work, expected=_ANY, tell=_reason, error=partial(_failed, doing, then))


def done_on_all_ranks(merge: Merge, rank: int, work: Callable[[], Result], *, doing: str, then: str) -> Result:
    """Works like `on_all_ranks`, and returns this rank's own result. Messages do not grow with the ranks. Collective."""
    results = []

    def run() -> _Done:
        results.append(work())
        return _Done()

    merged_on_all_ranks(merge, rank, run, doing=doing, then=then)
    return results[0]


class _Done:
    """Reports a success."""

    def merged(self, _other: "_Done") -> "_Done":
        return self


_ANY = (Exception,)
"""Expect every error. With an unexpected one, this rank would raise a different class from the other ranks."""


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _failed(doing: str, then: str, rank: int, reason: str) -> CheckpointError:
    return CheckpointError(f"hf_zero: rank {rank} could not {doing}: {reason.rstrip('.')}. {then}")
