"""The signals of one process: all ranks stop after the same step, then exit or continue."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from accelerate.logging import get_logger

from ..checkpoint.faults import CheckpointError
from ..config import ConfigError
from ..config.zero import CheckpointConfig
from ..engine.engine import ZeroEngine
from .save_clock import TIME_UP, SaveClock

logger = get_logger(__name__)


# [Note: who stops when] Signals arrive at some ranks, at any moment. A handler only notes the signal's number, because Python
# may call a handler between any two lines, including the lines of a save. Each backward already ends with an agreement between
# the ranks, and one byte of its message is the number. So all ranks know of a signal in the same step, finish the step, save,
# and end. A rank that waits in a collective runs its handler once the other ranks have joined the collective. A signal that
# arrives after the agreement counts for the next step.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes SIGTERM and SIGUSR1 in this process, replacing the former handlers.

    Attributes:
        clock: asks for saves by time; None if the settings ask for none.
        received: the number of the first signal received; 0 before.
        ends: whether this process is saving and ends afterwards.
    """

    def __init__(self) -> None:
        self.clock: SaveClock | None = None
        self.received = 0
        self.ends = False
        self._received_s = 0.0
        self._process = os.getpid()
        self._former: dict[int, Any] = {}

    def asked(self) -> int:
        """Returns `received`, or the clock's request if no signal was received."""
        return self.received or (self.clock.asked() if self.clock is not None else 0)

    def follow_clock(self, settings: CheckpointConfig, step: Callable[[], int], *, decides: bool) -> None:
        """Also saves and ends at the times in the settings.

        Args:
            step: returns the number of steps taken.
            decides: whether this is rank 0.
        """
        if settings.is_timed:
            self.clock = SaveClock(settings, step, decides=decides)

    def install(self) -> None:
        """Replaces the handlers of both signals.

        Raises:
            ConfigError: this is not the main thread; Python sets handlers only there.
        """
        for number in _SIGNALS:
            if signal.getsignal(number) is None:
                logger.warning(
                    f"hf_zero: {number.name} has a handler that was not set by Python. The handler is kept, so the signal does "
                    "not save and stop training."
                )
                continue
            try:
                self._former[number] = signal.signal(number, self._note)
            except ValueError as error:
                raise ConfigError(
                    "hf_zero: training does not run in the main thread, and Python handles signals only there. Remove "
                    "`checkpoint.on_signal` and `enable_jit_checkpoint`, or train in the main thread."
                ) from error

    def release(self) -> None:
        """Restores the former handlers of both signals, except for a signal whose handler the script has set since.

        A process that is ending keeps its handlers: a second signal would end this rank while others wait for it.
        """
        if self.ends:
            return
        for number, former in self._former.items():
            # `==` instead of `is`: Python makes a new bound method at each access.
            if signal.getsignal(number) == self._note:
                signal.signal(number, former)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._in_child(number)
        elif not self.received:
            # Only the first signal counts: the logged time starts with it, and the former handler of its number is called
            # after the save.
            self.received, self._received_s = number, time.monotonic()

    def _in_child(self, number: int) -> None:
        """Handles a signal in a forked child, such as a data loader's worker, which inherits this process's handlers.

        SIGUSR1, which SLURM sends to all processes of a job, is ignored: the current step needs the workers. SIGTERM ends the
        child, because process pools rely on it.
        """
        if number == signal.SIGTERM:
            signal.signal(number, self._former[number])
            os.kill(os.getpid(), number)

    def end(self, engine: ZeroEngine, number: int, step: int, save: Callable[[], Path]) -> NoReturn:
        """Saves, prints the folder, and raises SystemExit with status 128 + `number` (SIGTERM's if time is up). Collective.

        If this rank got the signal, the script's own handler is called after the save, and may end the process. If the save
        fails, the reason is printed in one line, and the status is 1.
        """
        # Set first, because the save below may run the model and its hooks, which would otherwise end the run again.
        self.ends = True
        is_time_up, speaks = number == TIME_UP, engine.world_groups.rank == 0
        # Launchers restart a run ended by SIGTERM.
        number = signal.SIGTERM if is_time_up else number
        name = "checkpoint.budget is used up" if is_time_up else signal.Signals(number).name
        try:
            folder = save()
        except CheckpointError as error:
            if speaks:
                reason = str(error).removeprefix("hf_zero: ")
                _say(f"{name}, and step {step} is not saved, so all ranks exit with status 1. {reason}")
            raise SystemExit(1) from error
        waited_s = time.monotonic() - self._received_s if self.received else 0.0
        # The maximum over all ranks, because the printing rank may not have received the signal.
        waited_s = max(engine.world.exchange(waited_s, "signals"))
        if speaks:
            _say(
                f"{name}: all ranks have saved step {step} in {folder}, and exit with status {128 + number}"
                + ("." if is_time_up else f", {waited_s:.1f} s after the signal.")
            )
        former = self._former.get(self.received)
        if callable(former):
            former(self.received, None)
        raise SystemExit(128 + number)


def _say(what: str) -> None:
    print(f"hf_zero: {what}", file=sys.stderr, flush=True)
