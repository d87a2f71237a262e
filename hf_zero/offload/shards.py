"""A bucket's parameter shard outside of the training device."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from ..allocation import allocate
from ..device import enter_thread
from ..layout.intervals import Interval
from ..pinned_memory import passing_host_bytes
from .files import Kind, StoredShard
from .host_memory import HostCores
from .host_tiers import HostTier, NvmeTier
from .state_files import StateFiles
from .tiers import Tier

PARAMETER = "parameter"
"""The kind of a parameter shard in its own file."""

Region = tuple[StoredShard, str]
"""A file, and the kind in it."""

_READERS = 2
"""Two threads: one reads ahead while the other serves an edit of another rank."""


class ParameterShard:
    """The values of one bucket's shard, (numel,) of the parameter dtype. This class keeps the values in host memory.

    Attributes:
        values: the live values in host memory. For values in a file, a shape without memory that reads as NaN.
        is_master: whether the optimizer updates these values directly, so that a step copies nothing back.
    """

    is_master = False

    def __init__(self, values: torch.Tensor):
        self.values = values

    def move_to_tier(self, master: Region | None) -> None:
        """Ends the filling. `master`: the region of an equal copy, which the optimizer updates."""

    def start_fetch(self) -> None:
        """Starts to read the values into host memory."""

    def fetched(self) -> torch.Tensor:
        """Waits for the values in host memory. The caller must keep the tensor while copying from the tensor."""
        return self.values

    def forget(self) -> None:
        """Drops an unused fetch."""

    def write(self, values: torch.Tensor) -> None:
        """Replaces all values by (numel,) of any float dtype on any device. A shard's own file is written in the background."""
        self.values.copy_(values)

    def write_part(self, interval: Interval, values: torch.Tensor) -> None:
        """Replaces the elements `interval` by the 1-D `values`."""
        self.part(interval).copy_(values)

    def part(self, interval: Interval) -> torch.Tensor:
        """Returns a live view of the elements `interval`, which is read on access."""
        return self.values[interval.start : interval.stop]


class FileShard(ParameterShard):
    """A shard in a file, which is in host memory from its fetch to its use.

    Until `move_to_tier`, the values are in ordinary memory, and the shard is filled there.

    Args:
        store: creates this shard's file.
        mover: reads and writes in its threads.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        store: Callable[[Kind], StoredShard],
        mover: "FileMover",
    ):
        super().__init__(allocate(numel, dtype, torch.device("cpu")))
        self._store = store
        self._mover = mover
        self._stored: StoredShard | None = None
        self._kind = PARAMETER
        self._fetch: Future[torch.Tensor] | None = None

    def move_to_tier(self, master: Region | None) -> None:
        numel, dtype = self.values.numel(), self.values.dtype
        if master is not None:
            # The master's region already has these values, because the optimizer's storage writes the master first.
            self.is_master = True
            self._stored, self._kind = master
        else:
            self._stored = self._store(Kind(PARAMETER, dtype, numel))
            self.write(self.values)
        # NaN instead of zeros: a missing fetch must show in the loss.
        self.values = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype).expand(numel)

    def start_fetch(self) -> None:
        self._fetch = self._fetch or self._start_read()

    def fetched(self) -> torch.Tensor:
        # Use a fetch once, because a step may change the file before the next call.
        fetch, self._fetch = self._fetch or self._start_read(), None
        return fetch.result()

    def forget(self) -> None:
        fetch, self._fetch = self._fetch, None
        # A running read cannot be canceled, so wait for the read: the caller may write the file next.
        if fetch is not None and not fetch.cancel():
            # Ignore a failed read here. Whoever needs the values reads again and gets the error.
            fetch.exception()

    def write(self, values: torch.Tensor) -> None:
        # A running fetch would return the old values.
        self.forget()
        stored = self._file
        # Two writes to one file in two threads may end in any order.
        self._mover.finish_write(stored)
        buffer = self._mover.buffer(stored.region_bytes(self._kind))
        dtype = stored.dtypes[self._kind]
        buffer[: values.numel() * dtype.itemsize].view(dtype).copy_(values)
        self._mover.start_write(stored, self._kind, buffer)
        if self.is_master:
            # The step reads the file in other threads, which do not know about a running write.
            self._mover.finish_write(stored)

    def write_part(self, interval: Interval, values: torch.Tensor) -> None:
        if self._stored is None:
            self.values[interval.start : interval.stop].copy_(values)
            return
        self.forget()
        self._mover.finish_write(self._stored)
        self._stored.write_part(self._kind, interval, values)

    def part(self, interval: Interval) -> torch.Tensor:
        self._mover.finish_write(self._file)
        return self._file.mapped_part(self._kind, interval)

    @property
    def _file(self) -> StoredShard:
        if self._stored is None:
            raise AssertionError(
                "hf_zero: bug: a shard was read from its file before it had one. Open an issue with this traceback."
            )
        return self._stored

    def _start_read(self) -> Future[torch.Tensor]:
        stored = self._file
        # A read during the write would mix old and new values.
        self._mover.finish_write(stored)
        return self._mover.submit(stored.read_region, self._kind, self._mover.buffer(stored.region_bytes(self._kind)))


class FileMover:
    """Reads and writes shards in background threads, through temporary buffers.

    Args:
        device: the device of the parameters.
        most_writes: maximum number of buffers waiting to be written.
    """

    def __init__(self, device: torch.device, most_writes: int):
        self._device = device
        self._most_writes = most_writes
        enter = partial(enter_thread, device)
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="hf_zero-parameters", initializer=enter)
        self._writing: deque[tuple[StoredShard, Future]] = deque()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return passing_host_bytes(nbytes, self._device)

    def submit(self, call: Callable[..., torch.Tensor], *arguments) -> Future[torch.Tensor]:
        return self._threads.submit(call, *arguments)

    def start_write(self, stored: StoredShard, kind: str, buffer: torch.Tensor) -> None:
        """Starts to write a region's buffer. Waits for the oldest write if too many are running."""
        while len(self._writing) >= self._most_writes:
            # Call `result`, because a failed write is raised only here and in `finish_write`.
            self._writing.popleft()[1].result()
        # Count the bytes in the step of the request, even if the disk writes later.
        stored.written_bytes += buffer.nbytes
        self._writing.append((stored, self._threads.submit(stored.write_region, kind, buffer)))

    def finish_write(self, stored: StoredShard) -> None:
        """Waits for all writes to this file."""
        for other, written in self._writing:
            if other is stored:
                written.result()

    def close(self) -> None:
        self._threads.shutdown()


class ParameterTier:
    """Memory for shards of parameters. This class is the training device's memory.

    Attributes:
        name: the name in reports.
        files: creates the files; None for memory.
    """

    name = Tier.name
    files: StateFiles | None = None

    def separates_masters(self, tier: Tier) -> bool:
        """Whether an fp32 shard needs a separate master if the optimizer state is in `tier`."""
        return tier.is_offloaded

    def shard(self, name: str, numel: int, dtype: torch.dtype) -> ParameterShard | None:
        """Returns a shard to be filled, or None if the shard is part of the gathered memory. `name` is the bucket's name."""
        return None

    def close(self) -> None:
        """Ends threads, and frees memory and files."""


class HostParameters(ParameterTier):
    """Host memory, pinned if there is an accelerator. The optimizer steps there unless its state is on the device.

    Args:
        cores: the cores for steps.
    """

    name = HostTier.name

    def __init__(self, device: torch.device, cores: HostCores):
        self._tier = HostTier(device, cores)

    def separates_masters(self, tier: Tier) -> bool:
        return not isinstance(tier, HostTier)

    def shard(self, name: str, numel: int, dtype: torch.dtype) -> ParameterShard:
        return ParameterShard(self._tier.empty(numel, dtype))


class FileParameters(ParameterTier):
    """Files of parameters, in the same folder as files of optimizer state.

    Args:
        files: creates the files.
        window: number of shards that may wait to be written.
    """

    name = NvmeTier.name
    files: StateFiles

    def __init__(self, device: torch.device, files: StateFiles, window: int):
        self.files = files
        self._mover = FileMover(device, window)

    def separates_masters(self, tier: Tier) -> bool:
        return True

    def shard(self, name: str, numel: int, dtype: torch.dtype) -> ParameterShard:
        return FileShard(numel, dtype, lambda kind: self.files.store(f"{name} parameters", [kind]), self._mover)

    def close(self) -> None:
        self._mover.close()
        self.files.close()
