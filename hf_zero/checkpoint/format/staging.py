"""Tensors of an accelerator on their way into files, through two pinned buffers that take turns."""

from collections.abc import Iterable
from typing import Protocol

import torch

from ...device import Mark, pinned, queue_end, side_queue

BUFFERS = 2
"""One is written to the file while the other is filled."""


class Values(Protocol):
    """A 1-D tensor, or what becomes one, part by part, when it is looked at."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def numel(self) -> int: ...
    def __getitem__(self, part: slice) -> "Values": ...
    def detach(self) -> torch.Tensor:
        """The tensor."""


class HostCopy:
    """Values in host memory. Here they are there already, and no copy is made."""

    def __init__(self, values: Values):
        self._values = values

    def values(self) -> Values:
        """They stay until `release`."""
        return self._values

    def release(self) -> None:
        """Nobody reads them any more."""


class Staging:
    """Copies values from accelerators to host memory, a few at a time. Those in host memory are taken as they are.

    Copies run on a stream of their own, behind what the device had been asked for when this was made and beside what it is
    asked for later. The host waits for one at a time, by its event. Until then nobody may write to the values.

    Args:
        values: all that are to be copied.
    """

    def __init__(self, values: Iterable[Values]):
        most_bytes: dict[torch.device, int] = {}
        for each in values:
            if each.device.type != "cpu":
                most_bytes[each.device] = max(each.nbytes, most_bytes.get(each.device, 0))
        self._ways = {device: _Way(device, nbytes) for device, nbytes in most_bytes.items()}

    def start(self, values: Values) -> HostCopy:
        """Begins to copy values to host memory. No more than `BUFFERS` may be there at a time."""
        way = self._ways.get(values.device)
        return HostCopy(values) if way is None else way.start(values)

    def close(self) -> None:
        """Gives the buffers back, all of which have been released."""
        for way in self._ways.values():
            way.close()


class _Way:
    """From one accelerator.

    Args:
        nbytes: of each buffer.
    """

    def __init__(self, device: torch.device, nbytes: int):
        self._device = device
        self._nbytes = nbytes
        self._queue = side_queue(device)
        self._since = queue_end(device)
        self._free: list[torch.Tensor] = []
        self._buffers = 0

    def start(self, values: Values) -> HostCopy:
        buffer = self._take()
        with self._queue.aside(behind=self._since):
            source = values.detach()
            target = buffer[: source.nbytes].view(source.dtype)
            target.copy_(source, non_blocking=True)
        return _StagedCopy(target, source, self._queue.mark(), buffer, self._free)

    def close(self) -> None:
        self._free.clear()
        self._buffers = 0

    def _take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        if self._buffers == BUFFERS:
            raise AssertionError(f"hf_zero: more than {BUFFERS} copies of a save are under way; please report this")
        self._buffers += 1
        return pinned(self._nbytes, self._device)


class _StagedCopy(HostCopy):
    """In a pinned buffer.

    Args:
        source: is kept until the copy has been made: its memory may not be given to another tensor before.
        copied: when it has.
        free: takes the buffer back.
    """

    def __init__(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        copied: Mark,
        buffer: torch.Tensor,
        free: list[torch.Tensor],
    ):
        super().__init__(target)
        self._source: torch.Tensor | None = source
        self._copied = copied
        self._buffer = buffer
        self._free = free

    def values(self) -> Values:
        if self._source is not None:
            self._copied.wait()
            self._source = None
        return super().values()

    def release(self) -> None:
        # One that nobody has asked for is under way all the same.
        self.values()
        self._free.append(self._buffer)
