"""Ranks that run one job after another: most of what a small job costs is its ranks' start and their first step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ranks import LiveRanks, live_ranks

TIME_LIMIT_S = 150.0
JOBS = 25
"""After which the ranks are started anew."""


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
