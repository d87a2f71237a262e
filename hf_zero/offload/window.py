"""A walk over shards in files: the next ones are read while one is at hand, and those behind are written."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

import torch

from ..device import allocate, enter_thread
from .host_cores import HostCores
from .stored import ReadRegion, StoredShard

WINDOW = 2
"""Shards on their way from or to files while another is stepped: one that is read ahead, one that is written."""

_HOST = torch.device("cpu")


_Passing = TypeVar("_Passing", StoredShard, ReadRegion)
_Result = TypeVar("_Result")


class Window:
    """Moves shards through `size` + 1 buffers: one at hand, the others being read into or written from.

    Buffers exist during a walk only, and are shared by shards of all sizes.

    Args:
        size: how many shards may be on their way beside the one at hand.
        cores: that step on what is at hand.
        device: of the gradients that some calls beside the caller wait for.
    """

    def __init__(self, size: int, cores: HostCores, device: torch.device = _HOST):
        self.size = size
        self._cores = cores
        enter = partial(enter_thread, device)
        self._threads = ThreadPoolExecutor(size + 1, thread_name_prefix="hf_zero-nvme", initializer=enter)

    def nbytes(self, shards: Sequence[StoredShard]) -> int:
        """Bytes that the buffers of a walk over these take at most."""
        return min(self.size + 1, len(shards)) * max((shard.nbytes for shard in shards), default=0)

    def walk(
        self, shards: Sequence[_Passing], *, spared: int = 0
    ) -> Generator[tuple[_Passing, torch.Tensor], None, None]:
        """(shard, buffer with its contents), one after another. What the caller leaves in the buffer is written.

        The last writes have ended when the iterator has.

        Args:
            spared: buffers to do without, up to `size`: memory that the caller takes for itself meanwhile.

        Raises:
            OffloadError: of the first read or write that failed.
        """
        largest = max((shard.nbytes for shard in shards), default=0)
        free = [self.make_buffer(largest) for _ in range(min(self.size + 1 - spared, len(shards)))]
        to_read = deque(shards)
        reading: deque[tuple[_Passing, torch.Tensor, Future]] = deque()
        writing: deque[tuple[torch.Tensor, Future]] = deque()

        def read_ahead() -> None:
            while writing and (writing[0][1].done() or (not free and not reading)):
                buffer, written = writing.popleft()
                written.result()
                free.append(buffer)
            while to_read and free:
                shard, buffer = to_read.popleft(), free.pop()
                reading.append((shard, buffer, self._threads.submit(shard.read, buffer)))

        try:
            while to_read or reading:
                read_ahead()
                shard, buffer, read = reading.popleft()
                read.result()
                yield shard, buffer
                writing.append((buffer, self._threads.submit(shard.write, buffer)))
            for _, written in writing:
                written.result()
        finally:
            # No thread may still use a buffer, or a file that is closed next.
            wait([*(read for *_, read in reading), *(written for _, written in writing)])

    def make_buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, for what is at hand during a step."""
        buffer = allocate(nbytes, torch.uint8, _HOST)
        self._cores.touch(buffer)
        return buffer

    def submit(self, call: Callable[..., _Result], *arguments) -> Future[_Result]:
        """Has `call` run beside the caller, between walks, which use the same threads: `size` + 1 such calls at a time."""
        return self._threads.submit(call, *arguments)

    def close(self) -> None:
        self._threads.shutdown()
