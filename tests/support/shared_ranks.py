"""Tests whose body runs on every rank, in fresh ranks or in ranks which have run earlier jobs; and messages between ranks.

The start of the ranks and their first step are most of the cost of a small job.
"""

from __future__ import annotations

import functools
import gc
import inspect
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ranks import LiveRanks, live_ranks, run_ranks
from torch.distributed.distributed_c10d import _get_default_store

TIME_LIMIT_S = 150.0
JOBS = 25
"""Number of jobs before the ranks are restarted."""
_LONGEST_WAIT_S = 100.0
RUN_LIMIT_S = 170.0
"""Below the time limit of most tests, so that the ranks can print their stacks."""


class Runner:
    """The object of each rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._place = rank, world_size

    def run(self, target: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        found = target(*self._place, **arguments)
        gc.collect()
        return found


class SharedRanks:
    """Ranks for jobs which seed their random numbers, and only use their own models. A failed job ends the ranks."""

    def __init__(self, world_size: int, *, call_limit_s: float = TIME_LIMIT_S) -> None:
        self._world_size = world_size
        self._call_limit_s = call_limit_s
        self._stack = ExitStack()
        self._live: LiveRanks | None = None
        self._left = 0

    def run(self, target: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Works like `run_ranks` with as many ranks."""
        if self._left == 0:
            self.end()
            each = {"start_limit_s": TIME_LIMIT_S, "call_limit_s": self._call_limit_s}
            live = live_ranks(Runner, world_size=self._world_size, time_limit_s=JOBS * self._call_limit_s, **each)
            self._live, self._left = self._stack.enter_context(live), JOBS
        self._left -= 1
        try:
            return self._live.call("run", target, arguments)
        except BaseException:
            # After a failure or the test's time limit, the remaining ranks may wait for one another.
            self._live.has_failed = True
            self._left = 0
            raise

    def end(self) -> None:
        """Ends the ranks; raises if one of them fails at its end."""
        self._left = 0
        self._stack.close()


shared_ranks = SharedRanks(2)
# Twenty steps at each stage take most of a minute.
four_ranks = SharedRanks(4, call_limit_s=2 * TIME_LIMIT_S)


def run_on_ranks(
    target: Callable[..., Any], world_size: int = 2, *, time_limit_s: float = RUN_LIMIT_S, **arguments: Any
) -> list[Any]:
    """Runs `target(rank, world_size, …)` in fresh ranks; returns all results."""
    return run_ranks(target, world_size=world_size, time_limit_s=time_limit_s, keyword_arguments=arguments)


def on_ranks(world_size: int | None = None, *, time_limit_s: float = RUN_LIMIT_S) -> Callable[..., Any]:
    """Makes a test from a body `(rank, world_size, …)`, which runs on each of some fresh ranks.

    Args:
        world_size: None if the test has a parameter of this name.
    """

    def start(body: Callable[..., None], arguments: dict[str, Any]) -> None:
        count = world_size or arguments.pop("world_size")
        run_on_ranks(_run_body, world_size=count, time_limit_s=time_limit_s, test=body, **arguments)

    return functools.partial(_as_test, start=start, given=("rank",) if world_size is None else ("rank", "world_size"))


def on_shared_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """Makes a test from a body `(rank, world_size, …)`, which runs on two ranks after earlier jobs."""
    start = lambda test, arguments: shared_ranks.run(_run_body, test=test, **arguments)  # noqa: E731
    return _as_test(body, start=start, given=("rank", "world_size"))


def _as_test(
    body: Callable[..., None], start: Callable[[Callable[..., None], dict[str, Any]], None], given: tuple[str, ...]
) -> Callable[..., None]:
    @functools.wraps(body)
    def test(**arguments: Any) -> None:
        start(test, arguments)

    # pytest reads the signature to find fixtures. The ranks' arguments are not fixtures.
    signature = inspect.signature(body)
    parameters = [each for name, each in signature.parameters.items() if name not in given]
    test.__signature__ = signature.replace(parameters=parameters)
    return test


def _run_body(rank: int, world_size: int, *, test: Callable[..., None], **arguments: Any) -> None:
    test.__wrapped__(rank, world_size, **arguments)


def tell(what: str) -> None:
    """Sends a message to waiting ranks."""
    _get_default_store().set(f"told {what}", "yes")


def wait_until_told(*what: str) -> None:
    """Waits until each of these messages has been sent by any rank."""
    store, deadline_s = _get_default_store(), time.monotonic() + _LONGEST_WAIT_S
    # Poll: a waiting call would block other threads' calls to the store.
    while not store.check([f"told {each}" for each in what]):
        assert time.monotonic() < deadline_s, f"nobody told {what}"
        time.sleep(0.02)
