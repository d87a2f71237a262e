"""Runs work that succeeds on every rank or raises on every rank, so that no rank goes on alone.

Callers pass a function that exchanges a small value between the ranks.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

Exchange = Callable[[object], list]
"""Every rank's picklable value, in rank order. Collective."""

Errors = tuple[type[Exception], ...]

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Unexpected:
    """Tells the other ranks of an exception that is not among the expected ones."""

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
        expected: exceptions of `work` that all ranks are to raise as one.
        error: makes that one from the lowest rank that failed and what it told.
        tell: what the other ranks learn of an expected exception; picklable.

    Raises:
        what `error` returns, on every rank; where this rank failed too, its own exception is the cause. An `Exception` that is
        not expected is raised as it is on its own rank, and as a RuntimeError that names the rank on the others. What is no
        `Exception`, such as KeyboardInterrupt, is raised at once: the others learn it from the end of the process.
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
    """Works like `all_or_none`, and returns every rank's result in rank order. Results are picklable."""
    result, fault = _attempt(work)
    results: list[Result] = []

    def exchange_both(told: object) -> list:
        everyones = exchange((told, result))
        results.extend(theirs for _, theirs in everyones)
        return [told for told, _ in everyones]

    raise_on_all(exchange_both, fault, expected=expected, error=error, tell=tell)
    return results


def raise_on_all(
    exchange: Exchange,
    fault: Exception | None,
    *,
    expected: Errors,
    error: Callable[[int, Any], Exception],
    tell: Callable[[Exception], Any] = str,
) -> None:
    """The exchange of `all_or_none`, for work that is done: raises as that does if any rank passes a fault. Collective.

    Args:
        fault: what has failed on this rank; None is nothing.
    """
    is_expected = isinstance(fault, expected)
    told: object = None
    if fault is not None:
        told = (tell(fault),) if is_expected else _Unexpected(f"{type(fault).__name__}: {fault}")
    # Agreement before raise: a rank that raised first would leave the others waiting in this exchange.
    everyones = exchange(told)
    # Its own error, with its own traceback: a bug is looked for on the rank that has it.
    if fault is not None and not is_expected:
        raise fault
    for rank, theirs in enumerate(everyones):
        if isinstance(theirs, _Unexpected):
            raise RuntimeError(f"hf_zero: rank {rank} failed: {theirs.text}") from fault
        if theirs is not None:
            raise error(rank, theirs[0]) from fault


def first_difference(exchange: Exchange, facts: Mapping[str, str]) -> str | None:
    """Compares what the ranks hold under each name; returns the first difference to rank 0 in words, None without any.

    Collective: one exchange, and a second one where ranks differ.
    """
    # The digest first: there may be thousands of facts, and only an error needs them.
    digests = exchange(hashlib.sha256(json.dumps(facts).encode()).hexdigest())
    if len(set(digests)) == 1:
        return None
    # With the rank of the run: a transport of some of the ranks counts its own from 0.
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
        # Not of KeyboardInterrupt and the like: a process that is told to end must not wait for others first.
        return work(), None
    except Exception as error:
        return None, error


def exchange_between_ranks(value: object) -> list:
    """An `Exchange` by the default process group, for callers without an engine; this rank alone where there is no group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
