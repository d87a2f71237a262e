"""The last collectives of a rank, in a bounded log: which, where in training, bytes, start and end."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LENGTH = 256
_SHOWN = 6

LABEL, SITE, STEP, BYTES, STARTED, ENDED = range(6)
"""What stands where in an entry. A list, and not an object: each collective of a step makes one."""


class CollectiveLog:
    """A ring of the last collectives.

    Attributes:
        entries: `[label, site, step, bytes sent, start, end]`, the oldest first; times on the monotonic clock. The end, None at
            first, is when the host had waited for it: an accelerator may still be at work then.
        site: where training is: forward, backward, evaluate, ...
        step: optimizer steps taken since the engine was built.
        part: which part of which copy of the model this rank has, in words; "" of a model that is not split.
    """

    def __init__(self):
        self.entries: deque[list[Any]] = deque(maxlen=_LENGTH)
        self.site = "setting up"
        self.step = 0
        self.part = ""

    @property
    def place(self) -> str:
        """Where training is, in words."""
        return f"{self.site}, step {self.step}" + (f", {self.part}" if self.part else "")

    def latest(self, label: object) -> list[Any] | None:
        """The entry of the collective with this label that was started last."""
        return next((entry for entry in reversed(list(self.entries)) if entry[LABEL] is label), None)

    @contextmanager
    def at(self, site: str) -> Iterator[None]:
        """For the duration of something that is no part of a training step."""
        before, self.site = self.site, site
        try:
            yield
        finally:
            self.site = before

    def site_of(self, label: object) -> str:
        """Where training was when the collective with this label was started last; "" of one that is not in the log."""
        entry = self.latest(label)
        return "" if entry is None else entry[SITE]

    def last_lines(self) -> list[str]:
        """The last few entries in words."""
        # A copy, in one operation: other threads may start collectives meanwhile.
        now_s = time.monotonic()
        return [_in_words(entry, now_s) for entry in list(self.entries)[-_SHOWN:]]


def _in_words(entry: list[Any], now_s: float) -> str:
    label, site, step, nbytes, started_s, ended_s = entry
    holds = f" ({label.holds})" if getattr(label, "holds", "") else ""
    how = f"not ended for {now_s - started_s:.1f} s" if ended_s is None else f"ended after {ended_s - started_s:.3f} s"
    return f"{label}{holds}, {nbytes:,} bytes sent, {site}, step {step}: {how}"
