"""Sends and receives between ranks of one gloo group, awaited together for a bounded time."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..groups.failures import CommunicationError, PeerFailure

_LEAST_S = 1e-3
_NEARLY_S = 0.1
"""By which a backend's clock may be ahead of this one."""

_ABANDONED: list[dist.Work] = []
"""Sends and receives that were under way when the last reference to their handle went, as with an engine that is dropped
behind its last step. gloo takes a receive back whose work object goes, and the pair of ranks hangs in what it does next; so
they are kept here until the next transport is made."""


class Transfers:
    """The sends and receives of one collective.

    Args:
        works: each with the rank at its other end.
        timeout_s: for all of them together, from the moment when they are waited for.
    """

    def __init__(self, works: Sequence[tuple[int, dist.Work]], timeout_s: float):
        self._works = works
        self._timeout_s = timeout_s
        self._is_awaited = False

    def __del__(self) -> None:
        if not self._is_awaited:
            _ABANDONED.extend(work for _, work in self._works)

    def wait(self) -> None:
        """Raises `PeerFailure` for the first one that does not end in time, or whose peer has ended."""
        self._is_awaited = True
        deadline_s = time.monotonic() + self._timeout_s
        for rank, work in self._works:
            left_s = max(_LEAST_S, deadline_s - time.monotonic())
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                if time.monotonic() >= deadline_s - _NEARLY_S:
                    raise PeerFailure(rank, f"did not come within {self._timeout_s:.0f} s") from error
                raise PeerFailure(rank, "closed its connection") from error


def finish_abandoned(timeout_s: float) -> None:
    """Waits for what engines that are gone had under way.

    Raises:
        CommunicationError: it does not arrive.
    """
    while _ABANDONED:
        try:
            _ABANDONED.pop().wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise CommunicationError(
                f"hf_zero: what an engine that is gone had under way did not arrive: {_first_line(error)}\nA peer ended, or "
                "took another number of steps with it."
            ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
