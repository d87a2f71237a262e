"""Shards of parameters in host memory or files, and the choice of tiers from the settings."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from ..config import AUTO, OffloadConfig
from ..device import allocate, enter_thread, passing_host_bytes
from ..layout.slots import Interval
from .files import WINDOW, Kind, StoredShard
from .host_memory import HostCores, choose_host_cores
from .tiers import HostTier, NvmeTier, StateFiles, Tier

# ---- A bucket's parameter shard outside of the training device ----

PARAMETER = "parameter"
"""The kind of a parameter shard in a file of its own."""

Region = tuple[StoredShard, str]
"""A file, and the kind in it."""

_READERS = 2
"""Threads: one reads ahead, one serves another rank's edit meanwhile."""


class ParameterShard:
    """The values of one bucket's shard, (numel,) of the param dtype, in host memory all the time.

    Attributes:
        values: live, in host memory; for values in a file, a shape without memory that reads as NaN.
        is_master: the optimizer updates these values themselves, so that a step writes nothing back.
    """

    is_master = False

    def __init__(self, values: torch.Tensor):
        self.values = values

    def rest(self, master: Region | None) -> None:
        """Ends the filling. `master`: the place of an equal copy that the optimizer updates."""

    def start_fetch(self) -> None:
        """Begins to read the values into host memory."""

    def fetched(self) -> torch.Tensor:
        """Waits for the values in host memory. The caller keeps the tensor while copying from it."""
        return self.values

    def forget(self) -> None:
        """Drops a fetch that nobody has taken."""

    def write(self, values: torch.Tensor) -> None:
        """Replaces all values by (numel,) of any float dtype on any device. A file of its own is written behind the caller."""
        self.values.copy_(values)

    def write_part(self, interval: Interval, values: torch.Tensor) -> None:
        """Replaces the elements `interval` by the 1-D `values`."""
        self.part(interval).copy_(values)

    def part(self, interval: Interval) -> torch.Tensor:
        """Returns the elements `interval`, live: read when they are looked at."""
        return self.values[interval.start : interval.stop]


class FileShard(ParameterShard):
    """A shard in a file, and in host memory from its fetch to its use.

    Until `rest` the values are in ordinary memory, where the shard is filled.

    Args:
        store: makes this shard's file.
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

    def rest(self, master: Region | None) -> None:
        numel, dtype = self.values.numel(), self.values.dtype
        if master is not None:
            # The master's region has these values already: the holder writes the master before this call.
            self.is_master = True
            self._stored, self._kind = master
        else:
            self._stored = self._store(Kind(PARAMETER, dtype, numel))
            self.write(self.values)
        # NaN, not zeros: a read that forgets to fetch shows in the loss.
        self.values = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype).expand(numel)

    def start_fetch(self) -> None:
        self._fetch = self._fetch or self._start_read()

    def fetched(self) -> torch.Tensor:
        # Used once: a step may change the file before the next call.
        fetch, self._fetch = self._fetch or self._start_read(), None
        return fetch.result()

    def forget(self) -> None:
        fetch, self._fetch = self._fetch, None
        # A read that runs cannot be cancelled, and is waited for: the caller may write the file next.
        if fetch is not None and not fetch.cancel():
            # A read that fails is told to whoever wants the values.
            fetch.exception()

    def write(self, values: torch.Tensor) -> None:
        # A fetch that is under way has the old values.
        self.forget()
        stored = self._file
        # Two writes to one file in two threads may end in any order.
        self._mover.finish_write(stored)
        buffer = self._mover.buffer(stored.region_bytes(self._kind))
        dtype = stored.dtypes[self._kind]
        buffer[: values.numel() * dtype.itemsize].view(dtype).copy_(values)
        self._mover.start_write(stored, self._kind, buffer)
        if self.is_master:
            # The step reads the file in other threads, which know of no write under way.
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
        # A read beside the write would mix old and new values.
        self._mover.finish_write(stored)
        return self._mover.submit(stored.read_region, self._kind, self._mover.buffer(stored.region_bytes(self._kind)))


class FileMover:
    """Reads and writes shards beside the caller, through temporary buffers.

    Args:
        device: of the parameters.
        most_writes: buffers that may wait to be written at a time.
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
        """Writes a region's buffer. Waits for the oldest write if too many are under way."""
        while len(self._writing) >= self._most_writes:
            # By `result`: a failed write is raised here or in `finish_write`, and nowhere else.
            self._writing.popleft()[1].result()
        # Counted in the step that hands it over, whenever the disk gets to it.
        stored.written_bytes += buffer.nbytes
        self._writing.append((stored, self._threads.submit(stored.write_region, kind, buffer)))

    def finish_write(self, stored: StoredShard) -> None:
        """Waits for the writes to this file."""
        for other, written in self._writing:
            if other is stored:
                written.result()

    def close(self) -> None:
        self._threads.shutdown()


class ParameterTier:
    """Memory for shards of parameters: here the training device's.

    Attributes:
        name: in reports.
        files: makes the files; None for memory.
    """

    name = Tier.name
    files: StateFiles | None = None

    def masters_apart(self, tier: Tier) -> bool:
        """Whether an fp32 shard here needs a separate master if the optimizer's state is in `tier`."""
        return tier.is_apart

    def shard(self, name: str, numel: int, dtype: torch.dtype) -> ParameterShard | None:
        """Makes a shard to be filled; `name` is the bucket's. None if the shard is part of the gathered memory."""
        return None

    def close(self) -> None:
        """Ends threads, and frees memory and files."""


class HostParameters(ParameterTier):
    """Host memory, pinned beside an accelerator: the optimizer steps there if its state is not on the device.

    Args:
        cores: for those steps.
    """

    name = HostTier.name

    def __init__(self, device: torch.device, cores: HostCores):
        self._tier = HostTier(device, cores)

    def masters_apart(self, tier: Tier) -> bool:
        return not isinstance(tier, HostTier)

    def shard(self, name: str, numel: int, dtype: torch.dtype) -> ParameterShard:
        return ParameterShard(self._tier.empty(numel, dtype))


class FileParameters(ParameterTier):
    """Files of parameters, beside those of the optimizer's state if that is in files too.

    Args:
        files: makes files.
        window: shards that may wait to be written.
    """

    name = NvmeTier.name
    files: StateFiles

    def __init__(self, device: torch.device, files: StateFiles, window: int):
        self.files = files
        self._mover = FileMover(device, window)

    def masters_apart(self, tier: Tier) -> bool:
        return True

    def shard(self, name: str, numel: int, dtype: torch.dtype) -> ParameterShard:
        return FileShard(numel, dtype, lambda kind: self.files.store(f"{name} parameters", [kind]), self._mover)

    def close(self) -> None:
        self._mover.close()
        self.files.close()


# ---- The choice of tiers, once when the engine is built, and the tier of each bucket ----


def choose_tiers(config: OffloadConfig, device: torch.device) -> tuple[Tier, ParameterTier]:
    """Chooses the tier of state and the tier of shards, for parameters on `device`.

    Raises:
        ConfigError: `nvme_path` is no folder here, or not writable.
    """
    cores = choose_host_cores(device)
    tier = choose_tier(config, device, cores)
    return tier, choose_parameter_tier(config, device, tier, cores)


def choose_tier(config: OffloadConfig, device: torch.device, cores: HostCores) -> Tier:
    """Chooses the tier of state."""
    if config.optimizer == "nvme":
        # A step that is not taken in its time leaves the parameters alone, and has to write somewhere.
        apart = config.speculate_bytes not in (AUTO, 0)
        return NvmeTier(device, StateFiles(config.files_folder, WINDOW, cores, device), cores, apart=apart)
    if config.optimizer == "cpu" and config.params == "nvme":
        files = StateFiles(config.files_folder, WINDOW, cores, device, holds_state=False)
        return NvmeTier(device, files, cores, apart=True)
    return HostTier(device, cores) if config.optimizer == "cpu" else Tier(device)


def choose_parameter_tier(config: OffloadConfig, device: torch.device, tier: Tier, cores: HostCores) -> ParameterTier:
    """Chooses the tier of shards. A run has one folder of files, which `tier` may have made."""
    if config.params == "nvme":
        # One folder a run: two would each lock, and a dead run would leave two.
        files = tier.files or StateFiles(config.files_folder, WINDOW, cores, device)
        return FileParameters(device, files, WINDOW)
    return HostParameters(device, cores) if config.params == "cpu" else ParameterTier()


class Placement:
    """Gives each bucket its tier, in the order in which gradients arrive, until `ratio` of the elements have moved.

    [Note: which part moves]
    The first buckets move: the fewest that hold at least `ratio` of the trained elements. Their gradients arrive while backward
    still runs, which hides the copy to the tier and the step there. The last ones, with nothing to hide behind, are stepped on
    the training device. The choice is the same on every rank.

    Twin-Flow is DeepSpeed's name for it: Lian et al., "DeepSpeed-Offload++", 2023.

    Args:
        device: of the parameters.
        ratio: above 0, up to 1.
        trained_numel: elements of all trained parameters.

    Attributes:
        tier, device_tier: of the buckets that move, and of the others.
    """

    def __init__(self, tier: Tier, device: torch.device, *, ratio: float, trained_numel: int):
        self.tier = tier
        self.device_tier = Tier(device)
        self._left_numel = ratio * trained_numel

    def next_tier(self, numel: int) -> Tier:
        """Returns the tier of the next bucket of trained parameters, of `numel` elements. Called once for each."""
        # A share such as 0.7 of the elements is no whole number: the rest may be a rounding error.
        moves = self._left_numel > 0.5
        self._left_numel -= numel
        return self.tier if moves else self.device_tier
