"""A walk over shards in files: reads the next shards and writes the previous ones while one is in use."""

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch

from ..allocation import allocate
from ..device import enter_thread
from .files import StoredShard
from .host_memory import HostCores

_HOST = torch.device("cpu")

WINDOW = 2
"""Shards in transfer while another is stepped: one is read, one is written."""


class Window:
    """Moves shards through `size` + 1 buffers: one is in use, and the others are being read or written.

    Buffers only exist during a walk, and shards of all sizes share them.

    Args:
        size: number of shards that may be read or written while another is in use.
        cores: the cores for the steps.
        device: the device of the gradients that some calls in the threads wait for.
    """

    def __init__(self, size: int, cores: HostCores, device: torch.device = _HOST):
        self.size = size
        self._cores = cores
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
        free = [self.make_buffer(largest) for _ in range(min(self.size + 1 - spared, len(shards)))]
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
                yield shard, buffer
                # If the caller's step fails, `close` ends the walk at the `yield`, so half a step is not written.
                writing.append((buffer, self._threads.submit(shard.write, buffer)))
            for _, written in writing:
                written.result()
        finally:
            # No thread may still use a buffer, or a file to be closed next.
            wait([*(read for *_, read in reading), *(written for _, written in writing)])

    def make_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocates host memory, uint8, for the shard in use."""
        buffer = allocate(nbytes, torch.uint8, _HOST)
        self._cores.touch(buffer)
        return buffer

    def close(self) -> None:
        self._threads.shutdown()
