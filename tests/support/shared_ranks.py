"""Tests whose body every rank runs, in ranks of its own or in ranks that had other jobs before, and how these ranks wait.

Most of what a small job costs is its ranks' start and their first step.
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
"""After which the ranks are started anew."""
_LONGEST_WAIT_S = 100.0
RUN_LIMIT_S = 170.0
"""Within the time that most tests have, so that the ranks say where they were."""


class Runner:
    """What each rank holds."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._place = rank, world_size

    def run(self, target: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        found = target(*self._place, **arguments)
        gc.collect()
        return found


class SharedRanks:
    """For jobs that seed what they draw, and look at their own models alone. A job that fails takes its ranks with it."""

    def __init__(self, world_size: int, *, call_limit_s: float = TIME_LIMIT_S) -> None:
        self._world_size = world_size
        self._call_limit_s = call_limit_s
        self._stack = ExitStack()
        self._live: LiveRanks | None = None
        self._left = 0

    def run(self, target: Callable[..., Any], **arguments: Any) -> list[Any]:
        """As `run_ranks` with as many ranks."""
        if self._left == 0:
            self.end()
            each = {"start_limit_s": TIME_LIMIT_S, "call_limit_s": self._call_limit_s}
            live = live_ranks(Runner, world_size=self._world_size, time_limit_s=JOBS * self._call_limit_s, **each)
            self._live, self._left = self._stack.enter_context(live), JOBS
        self._left -= 1
        try:
            return self._live.call("run", target, arguments)
        except BaseException:
            # Whether a rank failed or the test's time was up: those left may wait for one another.
            self._live.has_failed = True
            self._left = 0
            raise

    def end(self) -> None:
        """Ranks that fail at their end fail here."""
        self._left = 0
        self._stack.close()


shared_ranks = SharedRanks(2)
# Twenty steps at each stage take most of a minute by themselves.
four_ranks = SharedRanks(4, call_limit_s=2 * TIME_LIMIT_S)


def run_on_ranks(
    target: Callable[..., Any], world_size: int = 2, *, time_limit_s: float = RUN_LIMIT_S, **arguments: Any
) -> list[Any]:
    """Runs `target(rank, world_size, …)` in fresh ranks, and returns what each has returned."""
    return run_ranks(target, world_size=world_size, time_limit_s=time_limit_s, keyword_arguments=arguments)


def on_ranks(world_size: int | None = None, *, time_limit_s: float = RUN_LIMIT_S) -> Callable[..., Any]:
    """Makes a test of a body `(rank, world_size, …)` that each of some fresh ranks runs.

    Args:
        world_size: None where the test has a parameter of that name.
    """

    def start(body: Callable[..., None], arguments: dict[str, Any]) -> None:
        count = world_size or arguments.pop("world_size")
        run_on_ranks(_run_body, world_size=count, time_limit_s=time_limit_s, test=body, **arguments)

    return functools.partial(_as_test, start=start, given=("rank",) if world_size is None else ("rank", "world_size"))


def on_shared_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a body `(rank, world_size, …)` that two ranks run which had other jobs before."""
    start = lambda test, arguments: shared_ranks.run(_run_body, test=test, **arguments)  # noqa: E731
    return _as_test(body, start=start, given=("rank", "world_size"))


def _as_test(
    body: Callable[..., None], start: Callable[[Callable[..., None], dict[str, Any]], None], given: tuple[str, ...]
) -> Callable[..., None]:
    @functools.wraps(body)
    def test(**arguments: Any) -> None:
        start(test, arguments)

    # What pytest looks for fixtures by: what ranks are given is none.
    signature = inspect.signature(body)
    parameters = [each for name, each in signature.parameters.items() if name not in given]
    test.__signature__ = signature.replace(parameters=parameters)
    return test


def _run_body(rank: int, world_size: int, *, test: Callable[..., None], **arguments: Any) -> None:
    test.__wrapped__(rank, world_size, **arguments)


def tell(what: str) -> None:
    """Says so to the ranks that wait for it."""
    _get_default_store().set(f"told {what}", "yes")


def wait_until_told(*what: str) -> None:
    """Returns once each of these has been told, by whichever rank."""
    store, deadline_s = _get_default_store(), time.monotonic() + _LONGEST_WAIT_S
    # Looked for in turns: a call that waits would hold up other threads' calls of the store.
    while not store.check([f"told {each}" for each in what]):
        assert time.monotonic() < deadline_s, f"nobody told {what}"
        time.sleep(0.02)
