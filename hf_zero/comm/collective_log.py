"""A bounded log of a rank's last collectives: name, part of training, bytes, start and end."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LENGTH = 256
_SHOWN = 6

LABEL, SITE, STEP, BYTES, STARTED, ENDED = range(6)
"""Indices into an entry. Entries are lists instead of objects for speed, because each collective of a step creates one."""


class CollectiveLog:
    """A ring of the last collectives.

    Attributes:
        entries: `[label, site, step, bytes sent, start, end]`, the oldest first, with times of the monotonic clock. The end is
            None at first, and then the time at which the host finished waiting. An accelerator may still be working then.
        site: the current part of training: forward, backward, evaluate, ...
        step: number of optimizer steps since the engine was built.
        part: this rank's part of its copy of the model, in words; "" for a model that is not split.
    """

    def __init__(self):
        self.entries: deque[list[Any]] = deque(maxlen=_LENGTH)
        self.site = "setting up"
        self.step = 0
        self.part = ""

    @property
    def phase(self) -> str:
        """Returns the current part of training, in words."""
        return f"{self.site}, step {self.step}" + (f", {self.part}" if self.part else "")

    def latest(self, label: object) -> list[Any] | None:
        """Returns the entry of the last collective with this label."""
        # Iterate over a copy, because a deque raises if another thread appends during the iteration.
        return next((entry for entry in reversed(list(self.entries)) if entry[LABEL] is label), None)

    @contextmanager
    def at(self, site: str) -> Iterator[None]:
        """Sets the part of the run that is logged with collectives inside the context, such as a save."""
        before, self.site = self.site, site
        try:
            yield
        finally:
            self.site = before

    def last_lines(self) -> list[str]:
        # Copy in one operation, because other threads may start collectives in the meantime.
        now_s = time.monotonic()
        return [_entry_in_words(entry, now_s) for entry in list(self.entries)[-_SHOWN:]]


def _entry_in_words(entry: list[Any], now_s: float) -> str:
    label, site, step, nbytes, started_s, ended_s = entry
    holds = f" ({label.holds})" if getattr(label, "holds", "") else ""
    how = (
        f"still running after {now_s - started_s:.1f} s"
        if ended_s is None
        else f"ended after {ended_s - started_s:.3f} s"
    )
    return f"{label}{holds}, {nbytes:,} bytes sent, {site}, step {step}: {how}"


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
