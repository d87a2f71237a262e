"""Copies from an accelerator to files, through two pinned buffers in turn."""

from collections.abc import Iterable
from typing import Protocol

import torch

from ..pinned_memory import pinned
from ..queues import Mark, queue_end, side_queue

BUFFERS = 2
"""One buffer is written to the file while the other is filled."""


class Values(Protocol):
    """A 1-D tensor, or an object which computes one slice by slice."""

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
        """Returns the tensor."""


class HostCopy:
    """Values in host memory, used without a copy."""

    def __init__(self, values: Values):
        self._values = values

    def values(self) -> Values:
        """Returns the values, which stay valid until `release`."""
        return self._values

    def release(self) -> None:
        """Ends the use of the values."""


class Staging:
    """Copies values from accelerators to host memory, a few at a time. Values in host memory are used without a copy.

    The caller must not write to the values before `HostCopy.values` has returned.

    Args:
        values: all values that will be copied, which set the size of the buffers.
    """

    def __init__(self, values: Iterable[Values]):
        most_bytes: dict[torch.device, int] = {}
        for each in values:
            if each.device.type != "cpu":
                most_bytes[each.device] = max(each.nbytes, most_bytes.get(each.device, 0))
        self._ways = {device: _Way(device, nbytes) for device, nbytes in most_bytes.items()}

    def start(self, values: Values) -> HostCopy:
        """Starts to copy values to host memory. At most `BUFFERS` copies may be unreleased at a time."""
        way = self._ways.get(values.device)
        return HostCopy(values) if way is None else way.start(values)

    def close(self) -> None:
        """Frees the buffers. All copies must have been released."""
        for way in self._ways.values():
            way.close()


class _Way:
    """Copies from one accelerator through pinned buffers. `nbytes`: the size of each buffer."""

    def __init__(self, device: torch.device, nbytes: int):
        self._device = device
        self._nbytes = nbytes
        self._queue = side_queue(device)
        self._since = queue_end(device)
        self._free: list[torch.Tensor] = []
        self._buffers = 0

    def start(self, values: Values) -> HostCopy:
        buffer = self._take()
        # On a side stream, after the work queued on the device when the save began: the copy sees the values of the save, and
        # training continues in parallel.
        with self._queue.in_parallel(after=self._since):
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
            raise AssertionError(
                f"hf_zero: bug: more than {BUFFERS} copies of a save are in progress. Open an issue with this traceback."
            )
        self._buffers += 1
        return pinned(self._nbytes, self._device)


class _StagedCopy(HostCopy):
    """A copy in a pinned buffer.

    Args:
        copied: marks the end of the copy.
        free: the list that gets the buffer back on release.
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
        # Keep the source until the copy has ended: otherwise the allocator reuses the memory, and another tensor's values are
        # saved.
        self._source: torch.Tensor | None = source
        self._copied = copied
        self._buffer = buffer
        self._free = free

    def values(self) -> Values:
        if self._source is not None:
            # Wait for this copy's event only. Waiting for the stream would include the other buffer's copy.
            self._copied.wait()
            self._source = None
        return super().values()

    def release(self) -> None:
        # An unread copy may still be writing to the buffer. Wait, so that the next user gets the buffer afterwards.
        self.values()
        self._free.append(self._buffer)
