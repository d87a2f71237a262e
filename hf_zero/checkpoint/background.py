"""A save in a thread while training continues. The next save, or the end, raises its failure."""

import threading
from collections.abc import Callable

import torch

from ..device import enter_thread


class Background:
    """Runs one job at a time in a thread. `device`: the device of the saved tensors."""

    def __init__(self, device: torch.device):
        self._device = device
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Starts `job`. The previous job must have been finished with `finish`."""
        if self._thread is not None:
            raise AssertionError(
                "hf_zero: bug: a save was started before the last one was finished. Open an issue with this traceback."
            )

        def run() -> None:
            try:
                # A new thread starts with device 0 as its current device, whatever device the main thread uses.
                enter_thread(self._device)
                job()
            # Catch every error: a thread prints an error or exits silently on SystemExit, and the save would count as done.
            except BaseException as fault:
                self._fault = fault

        self._thread = threading.Thread(target=run, name="hf_zero save")
        self._thread.start()

    def is_done(self, patience_s: float) -> bool:
        """Waits up to `patience_s` seconds for the job; returns whether the job has ended."""
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Waits for the job and raises its error."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        # Raise the error only once: the next save starts without the error of this one.
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
