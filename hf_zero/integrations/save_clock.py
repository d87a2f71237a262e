"""`SaveClock`: when a run saves by time, and when its time is up."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from ..config.zero import CheckpointConfig
from ..device import rounded

SAVE_DUE, TIME_UP = 1, 2
"""Sent in the byte by which ranks agree on signals, whose numbers (10 and 15) are larger."""

_SLOWER = 1.5
"""Time reserved for the last save, in units of the longest save so far. If the last save is late, its work is lost."""
_NOTABLE = 0.1
"""If saves need a larger share of the time, the run prints their cost."""


class SaveClock:
    """Decides when a save is due (`checkpoint.every_minutes`), and when the run has to end (`checkpoint.budget`).

    Rank 0 decides, and the other ranks learn it from the agreement at the end of each backward. A kill costs the work since the
    newest complete checkpoint, so the time that a save takes is part of the N minutes.

    Args:
        step: returns the number of steps taken.
        decides: whether this is rank 0.
        now_s: returns the time in seconds.
        ran_s: seconds for which the run has already been running.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        step: Callable[[], int],
        *,
        decides: bool,
        now_s: Callable[[], float] = time.monotonic,
        ran_s: float | None = None,
    ):
        self._settings, self._step, self._decides, self._now_s = settings, step, decides, now_s
        self._every_s, self._budget_s = 60 * settings.every_minutes, settings.budget_s
        self._began_s = now_s() - (_ran_s() if ran_s is None else ran_s)
        # Times of the last saved step, of the last step, and of the start of the last save.
        self._saved_s = self._polled_s = self._saving_s = now_s()
        self._is_saving = self._has_warned = self._was_held_up = False
        # Longest save, step, and time between a step and the save after it.
        self._cost_s = self._step_s = self._delay_s = 0.0
        # Time of the last question, plus the saves since then; None after the loop has asked for its next batch.
        self._asked_s: float | None = None
        self._polled = -1

    def asked(self) -> int:
        """Returns `SAVE_DUE`, `TIME_UP` or 0. Called at the end of each backward."""
        if not self._decides:
            return 0
        now_s, step = self._now_s(), self._step()
        self._asked_s = now_s
        if step != self._polled:
            if self._polled >= 0 and not self._was_held_up:
                self._step_s = max(self._step_s, now_s - self._polled_s)
            self._polled, self._polled_s, self._was_held_up = step, now_s, self._is_saving
        # The remaining time must suffice for this step, one more step and a save. A loop may evaluate before the save.
        needed_s = 2 * self._step_s + self._delay_s + _SLOWER * self._cost_s
        if self._budget_s is not None and now_s - self._began_s + needed_s >= self._budget_s:
            return TIME_UP
        return SAVE_DUE if self._is_due(now_s) else 0

    def is_due_within(self, seconds: float) -> bool:
        """Whether a save becomes due within this time, if no step is made."""
        return self._decides and self._is_due(self._now_s() + seconds)

    def _is_due(self, at_s: float) -> bool:
        if self._is_saving:
            return False
        if self._every_s:
            # Until the first save is measured, assume half of the time for it.
            interval_s = max(self._every_s - self._cost_s, self._cost_s) if self._cost_s else self._every_s / 2
            # A loop evaluates before it saves. Without the limit, long evaluations would cause a save in each step.
            interval_s = max(interval_s - self._delay_s, min(interval_s, self._every_s / 4))
            return at_s - self._saved_s >= interval_s
        # The first save measures the cost of a save.
        return self._budget_s is not None and not self._cost_s and at_s - self._began_s >= self._budget_s / 2

    def end_pass(self) -> None:
        """Notes that a plain loop asks for its next batch: only now it can save the step before, and its evaluation took time."""
        if self._asked_s is not None:
            self._delay_s = max(self._delay_s, self._now_s() - self._asked_s)
            self._asked_s = None

    def hold_up(self) -> None:
        """Excludes the time to the next step from the measured steps, because of a save or an evaluation in between."""
        self._was_held_up = True

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measures the duration of a save inside the block."""
        self.begin_save()
        try:
            yield
        finally:
            self.end_save()

    def begin_save(self) -> None:
        """Notes the start of a save of the last step, whatever the reason for the save."""
        # An evaluation may lie between the step and its save.
        self._saved_s, self._saving_s, self._is_saving = self._polled_s, self._now_s(), True

    def end_save(self) -> None:
        """Notes that the checkpoint is complete, or has failed. Called on any thread."""
        took_s = self._now_s() - self._saving_s
        self._cost_s = max(self._cost_s, took_s)
        if self._asked_s is not None:
            self._asked_s += took_s
        self._is_saving = False
        self.hold_up()
        share = self._cost_s / self._every_s if self._every_s else 0.0
        if self._decides and share >= _NOTABLE and not self._has_warned:
            self._has_warned = True
            more = ", and a crash can cost more than that" if share > 0.5 else ""
            print(
                f"hf_zero: a save takes {self._cost_s:.1f} s, {share:.0%} of `checkpoint.every_minutes: "
                f"{self._settings.every_minutes:g}`{more}. Set {rounded(self._cost_s / _NOTABLE / 60, 2)} to spend 10% of the "
                "time on saves.",
                file=sys.stderr,
                flush=True,
            )


def _ran_s() -> float:
    """Returns the seconds since the run began: since torchrun's start, which outlives restarts, or since this process's."""
    process = psutil.Process()
    launcher = process.parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return max(0.0, time.time() - (launcher or process).create_time())
