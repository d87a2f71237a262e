"""A save that goes on behind training, and whose failure surfaces at the next one or at the end."""

import threading
from collections.abc import Callable

import torch

from ...device import enter_thread


class Background:
    """At most one job at a time, in a thread of its own.

    Args:
        device: of what it saves.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Starts `job`; the one before must have been finished."""
        if self._thread is not None:
            raise AssertionError("hf_zero: a save was started before the last one was finished; please report this")

        def run() -> None:
            try:
                enter_thread(self._device)
                job()
            except BaseException as fault:
                self._fault = fault

        self._thread = threading.Thread(target=run, name="hf_zero save")
        self._thread.start()

    def is_done(self, patience_s: float) -> bool:
        """Whether the job has ended, within `patience_s`."""
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Waits for the job and raises what it raised."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
