"""A walk over shards in files: reads the next shards and writes the previous ones while one is in use."""

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch

from ..allocation import allocate
from ..device import enter_thread
from ..pinned_memory import PinnedPool
from ..queues import ARRIVED, Arrival, queue_end
from .files import StoredShard
from .host_memory import HostCores

_HOST = torch.device("cpu")

WINDOW = 2
"""Shards in transfer while another is stepped: one is read, one is written."""


class Window:
    """Moves shards through `size` + 1 buffers: one is in use, and the others are being read or written.

    Shards of all sizes share the buffers. They only exist during a walk, except for pinned ones.

    Args:
        size: number of shards that may be read or written while another is in use.
        cores: the cores for the steps.
        device: the device of the gradients that some calls in the threads wait for.
        visits: whether the caller uses each shard on `device`. The buffers are then pinned, and the caller gets a copy there.
    """

    def __init__(self, size: int, cores: HostCores, device: torch.device = _HOST, *, visits: bool = False):
        self.size = size
        self._cores = cores
        self._device = device
        self._pinned = PinnedPool(device) if visits else None
        enter = partial(enter_thread, device)
        self._threads = ThreadPoolExecutor(size + 1, thread_name_prefix="hf_zero-nvme", initializer=enter)

    def nbytes(self, shards: Sequence[StoredShard]) -> int:
        """Returns the maximum bytes of buffers in a walk over these shards."""
        return min(self.size + 1, len(shards)) * max((shard.nbytes for shard in shards), default=0)

    def walk(
        self, shards: Sequence[StoredShard], *, spared: int = 0
    ) -> Generator[tuple[StoredShard, torch.Tensor], None, None]:
        """Yields (shard, buffer with its contents), and writes the buffer when the caller continues.

        All writes have ended when the iterator is exhausted.

        Args:
            spared: number of buffers to do without, up to `size`, so that the caller can use the memory.

        Raises:
            OffloadError: the first failed read or write.
        """
        largest = max((shard.nbytes for shard in shards), default=0)
        free = [self._make_buffer(largest) for _ in range(min(self.size + 1 - spared, len(shards)))]
        to_read = deque(shards)
        reading: deque[tuple[StoredShard, torch.Tensor, Future]] = deque()
        writing: deque[tuple[torch.Tensor, Future]] = deque()

        def read_ahead() -> None:
            # Wait for a write only if no buffer is free and no read is running.
            while writing and (writing[0][1].done() or (not free and not reading)):
                buffer, written = writing.popleft()
                # Reuse a buffer only after its write; otherwise the write would contain values of another shard.
                written.result()
                free.append(buffer)
            while to_read and free:
                shard, buffer = to_read.popleft(), free.pop()
                reading.append((shard, buffer, self._threads.submit(shard.read, buffer)))

        try:
            while to_read or reading:
                read_ahead()
                shard, buffer, read = reading.popleft()
                # Raise a read error at its own shard, not at the end of the walk.
                read.result()
                borrowed = self._borrow(shard, buffer)
                yield shard, borrowed
                # If the caller's step fails, `close` ends the walk at the `yield`, so half a step is not written.
                arrival = self._start_return(borrowed, buffer)
                writing.append((buffer, self._threads.submit(_write_landed, shard, buffer, arrival)))
                # The memory of a copy on the device is free for the next one.
                del borrowed
            for _, written in writing:
                written.result()
        finally:
            # No thread may still use a buffer, or a file to be closed next.
            wait([*(read for *_, read in reading), *(written for _, written in writing)])
            if self._pinned is not None:
                # After a failed step, the device may still read a buffer, which belongs to the pool again now.
                queue_end(self._device).wait()

    def _borrow(self, shard: StoredShard, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the shard's bytes for its use: in the buffer, or a copy in the device's own queue."""
        return buffer if self._pinned is None else buffer[: shard.nbytes].to(self._device, non_blocking=True)

    def _start_return(self, borrowed: torch.Tensor, buffer: torch.Tensor) -> Arrival:
        """Starts to copy the result of `_borrow` back to the buffer."""
        if self._pinned is None:
            return ARRIVED
        buffer[: borrowed.nbytes].copy_(borrowed, non_blocking=True)
        return queue_end(self._device)

    def _make_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocates host memory, uint8, for the shard in use."""
        if self._pinned is not None:
            with self._cores.near():
                return self._pinned.take(nbytes)
        buffer = allocate(nbytes, torch.uint8, _HOST)
        self._cores.touch(buffer)
        return buffer

    def close(self) -> None:
        self._threads.shutdown()


def _write_landed(shard: StoredShard, buffer: torch.Tensor, arrival: Arrival) -> None:
    """Writes a buffer after its copy from the device."""
    arrival.wait()
    shard.write(buffer)
