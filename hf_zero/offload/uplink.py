"""The way of stepped masters back to the parameters."""

from contextlib import AbstractContextManager, nullcontext

import torch

from ..device import Mark, queue_end, side_queue

PART_BYTES = 16 * 2**20
"""Of a pinned buffer, of which there are two. A power of two, which torch's pinned memory does not round up."""


class Uplink:
    """From memory that is the parameters' own, or on its way to nowhere else."""

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies the 1-D `source`, to the nearest in the dtype of `target`. The host may go on before it is there.

        What the device is asked for later finds it there. `source` keeps its values until a later gradient has come from there.
        """
        target.copy_(source, non_blocking=True)

    def aside(self) -> AbstractContextManager[None]:
        """Copies and collectives that are begun inside follow each other, beside what the device is asked for later."""
        return nullcontext()

    def hold_up_device(self) -> None:
        """The device goes no further in its own queue before all copies of `aside` have ended."""

    def wait(self) -> None:
        """Returns when they have: their sources may be written then."""


class RoundedUplink(Uplink):
    """From host memory to an accelerator, in the digits of the target: 2 bytes an element for 16-bit parameters.

    torch would send the source's 4 and round there. Two pinned buffers take turns, so that one is filled while the other is on
    its way.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._queue = side_queue(device)
        self._buffers: list[torch.Tensor] = []
        self._sent: list[Mark | None] = [None, None]
        self._turn = 0

    def aside(self) -> AbstractContextManager[None]:
        return self._queue.aside()

    def hold_up_device(self) -> None:
        self._queue.mark().hold_up_device()

    def wait(self) -> None:
        self._queue.mark().wait()

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.dtype == target.dtype or source.device.type != "cpu":
            super().start_copy(target, source)
            return
        if not self._buffers:
            self._buffers = [torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True) for _ in self._sent]
        numel = PART_BYTES // target.itemsize
        for start in range(0, target.numel(), numel):
            part = target[start : start + numel]
            self._send(part, source[start : start + numel])

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        sent = self._sent[turn]
        if sent is not None:
            sent.wait()
        rounded = self._buffers[turn][: target.nbytes].view(target.dtype)
        rounded.copy_(source)
        target.copy_(rounded, non_blocking=True)
        self._sent[turn] = queue_end(self._device)


def uplink(device: torch.device) -> Uplink:
    """The way from host memory to `device`."""
    return Uplink() if device.type == "cpu" else RoundedUplink(device)
