"""Runs work with the same outcome on every rank: all ranks succeed, or all ranks raise.

Callers pass a function that exchanges a small value between the ranks.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

import torch.distributed as dist

Exchange = Callable[[object], list]
"""Returns every rank's picklable value, in rank order. Collective."""

Errors = tuple[type[Exception], ...]

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Unexpected:
    """Reports an exception outside of the expected ones to the other ranks."""

    text: str


def all_or_none(
    exchange: Exchange,
    work: Callable[[], Result],
    *,
    expected: Errors,
    error: Callable[[int, Any], Exception],
    tell: Callable[[Exception], Any] = str,
) -> Result:
    """Runs `work` on every rank; returns this rank's result if every rank has one. Collective: one exchange, after the work.

    Args:
        expected: exceptions of `work` that all ranks should raise as one error.
        error: makes this error from the lowest failed rank and its report.
        tell: makes the report of an expected exception for the other ranks; picklable.

    Raises:
        The result of `error`, on every rank. If this rank failed as well, its own exception is the cause. An unexpected
        `Exception` is raised unchanged on its own rank, and as a RuntimeError with the rank's number on the others. An exception
        that is not an `Exception`, such as KeyboardInterrupt, is raised at once. The other ranks notice the end of the process.
    """
    result, fault = _attempt(work)
    raise_on_all(exchange, fault, expected=expected, error=error, tell=tell)
    return cast(Result, result)


def all_results_or_none(
    exchange: Exchange,
    work: Callable[[], Result],
    *,
    expected: Errors,
    error: Callable[[int, Any], Exception],
    tell: Callable[[Exception], Any] = str,
) -> list[Result]:
    """Works like `all_or_none`, and returns every rank's result in rank order. Results must be picklable."""
    result, fault = _attempt(work)
    results: list[Result] = []

    def exchange_both(told: object) -> list:
        everyones = exchange((told, result))
        results.extend(theirs for _, theirs in everyones)
        return [told for told, _ in everyones]

    raise_on_all(exchange_both, fault, expected=expected, error=error, tell=tell)
    return results


class Mergeable(Protocol):
    """A picklable value that covers some ranks."""

    def merged(self: "Merged", other: "Merged") -> "Merged":
        """Returns a value that covers the ranks of both. The values may cover the same ranks."""


Merged = TypeVar("Merged", bound=Mergeable)
Merge = Callable[[Any], Any]
"""Returns the values of all ranks, each `Mergeable`, merged into one. Collective."""


@dataclass(frozen=True)
class _Outcomes(Generic[Merged]):
    """Merges the results of ranks, and the reports of failed ranks by rank."""

    result: Merged | None
    told: dict[int, Any] = field(default_factory=dict)

    def merged(self, other: "_Outcomes[Merged]") -> "_Outcomes[Merged]":
        told = self.told | other.told
        if self.result is None or other.result is None or told:
            # All ranks are about to raise.
            return _Outcomes(None, told)
        return _Outcomes(self.result.merged(other.result))


def merged_or_none(
    merge: Merge,
    rank: int,
    work: Callable[[], Merged],
    *,
    expected: Errors,
    error: Callable[[int, Any], Exception],
    tell: Callable[[Exception], Any] = str,
) -> Merged:
    """Works like `all_or_none`, and returns the merged results of all ranks. Collective: one merge, after the work.

    A rank receives merged values only, so their size does not grow with the number of ranks if that of a merged value does not.
    """
    result, fault = _attempt(work)
    found: list[Merged | None] = []

    def merge_both(told: object) -> list:
        outcomes: _Outcomes[Merged] = merge(_Outcomes(result, {} if told is None else {rank: told}))
        found.append(outcomes.result)
        return [outcomes.told.get(each) for each in range(max(outcomes.told, default=-1) + 1)]

    raise_on_all(merge_both, fault, expected=expected, error=error, tell=tell)
    return cast(Merged, found[0])


def raise_on_all(
    exchange: Exchange,
    fault: Exception | None,
    *,
    expected: Errors,
    error: Callable[[int, Any], Exception],
    tell: Callable[[Exception], Any] = str,
) -> None:
    """Raises like `all_or_none` if any rank passes a fault of finished work. Collective.

    Args:
        fault: this rank's failure; None without one.
    """
    is_expected = isinstance(fault, expected)
    told: object = None
    if fault is not None:
        told = (tell(fault),) if is_expected else _Unexpected(f"{type(fault).__name__}: {fault}")
    # Agree before raising: a rank raising first would leave the others waiting in this exchange.
    everyones = exchange(told)
    # Raise this rank's own error with its own traceback, because a bug is debugged on the rank of the bug.
    if fault is not None and not is_expected:
        raise fault
    for rank, theirs in enumerate(everyones):
        if isinstance(theirs, _Unexpected):
            raise RuntimeError(f"hf_zero: rank {rank} failed: {theirs.text}") from fault
        if theirs is not None:
            raise error(rank, theirs[0]) from fault


def first_difference(exchange: Exchange, facts: Mapping[str, str]) -> str | None:
    """Compares the ranks' values under each name; returns the first difference to rank 0 in words, None without any.

    Collective: one exchange, and a second one if ranks differ.
    """
    # Compare digests first: there may be thousands of facts, and only an error needs them.
    digests = exchange(hashlib.sha256(json.dumps(facts).encode()).hexdigest())
    if len(set(digests)) == 1:
        return None
    # Name the rank of the run, because a transport of some of the ranks counts its own ranks from 0.
    everyone = exchange((dist.get_rank() if dist.is_initialized() else 0, facts))
    first, reference = everyone[0]
    for rank, theirs in everyone:
        for subject in [*reference, *(s for s in theirs if s not in reference)]:
            here, there = reference.get(subject, "absent"), theirs.get(subject, "absent")
            if here != there:
                return f"{subject}: {here} on rank {first}, {there} on rank {rank}"
    return "the same names and values, in different orders"


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        # Do not catch KeyboardInterrupt and the like: a process asked to end must not wait for others first.
        return work(), None
    except Exception as error:
        return None, error


def exchange_between_ranks(value: object) -> list:
    """An `Exchange` through the default process group, for callers without an engine. Without a group, only this rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
