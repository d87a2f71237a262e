"""The memory of state and parameters: the device's, the host's or files; copies between a device and its host; the choice."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock

import torch

from ..config import AUTO, OffloadConfig
from ..device import (
    Arrival,
    Mark,
    PinnedPool,
    allocate,
    enter_thread,
    passing_host_bytes,
    pin,
    queue_end,
    side_queue,
    unpin,
)
from ..layout.intervals import Interval
from .files import WINDOW, Kind, RunFolder, StoredShard, Window
from .host_memory import HostCores, choose_host_cores

# ---- The way of reduced gradients into the memory that they are stepped from ----

_LEAST_WIDENED_NUMEL = 4096
"""Below it, values are widened by way of a copy."""


class DeviceToHost:
    """Into memory that is the gradients' own, or which the host copies to at once."""

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        """Copies the 1-D `source` behind the present work of its device's queue. The caller may drop `source` at once.

        Args:
            target: (source.numel(),) of the same or a wider dtype. Read by nobody before the arrival.
        """
        target.copy_(source)
        return Arrival()

    def start_sum(self, add: Callable[[torch.Tensor], None], source: torch.Tensor, behind: Arrival) -> Arrival:
        """Calls `add` with the values of the 1-D `source`, where the memory is that they are added to.

        Args:
            behind: what `add` adds to is there on this arrival.
        """
        behind.wait()
        add(source)
        return Arrival()

    @property
    def sum_bytes(self) -> int:
        """Counts bytes of host memory that sums have taken, their targets aside."""
        return 0


class _StreamDeviceToHost(DeviceToHost):
    """From an accelerator into pinned host memory, on a stream of its own: backward's kernels do not wait for the bus.

    What is wider there travels as it is here: torch would widen it first, and send twice the bytes.

    [Note: sums beside backward]
    A thread adds the reduced gradients of micro-batches up in host memory, so backward does not wait for the bus and the host.
    Each arriving shard has a buffer of its own, at most one for each bucket. Backward waits where the host is a whole micro-batch
    behind.

    Args:
        cores: that sums are taken on.
    """

    def __init__(self, device: torch.device, cores: HostCores):
        self._module = torch.get_device_module(device)
        self._device = device
        self._cores = cores
        self._queue = side_queue(device)
        self._landings = PinnedPool(device)
        self._thread: ThreadPoolExecutor | None = None

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        landing = target if target.dtype == source.dtype else landing_in(target, source.dtype)
        with self._queue.aside():
            landing.copy_(source, non_blocking=True)
            # The allocator must not hand the memory out again before the copy has read it.
            source.record_stream(self._module.current_stream(self._device))
        landed = self._queue.mark()
        return landed if landing is target else _Widened(landed, target, source.dtype)

    def start_sum(self, add: Callable[[torch.Tensor], None], source: torch.Tensor, behind: Arrival) -> Arrival:
        # The bucket's sum before ends first: otherwise landing buffers pile up, one for each micro-batch.
        if isinstance(behind, _Added):
            behind.wait()
        with self._cores.near():
            landing = self._landings.take(source.nbytes).view(source.dtype)
        landed = self.start_copy(landing, source)
        if self._thread is None:
            self._thread = self._start_thread()
        return _Added(self._thread.submit(_add_landed, add, landing, landed, behind))

    @property
    def sum_bytes(self) -> int:
        return self._landings.nbytes

    def _start_thread(self) -> ThreadPoolExecutor:
        device, cores, before = self._device, self._cores, torch.get_num_threads()

        def enter() -> None:
            enter_thread(device)
            cores.enter()

        thread = ThreadPoolExecutor(1, thread_name_prefix="hf_zero-gradients", initializer=enter)
        # Waits until the thread has begun: run later, `enter` would overwrite the number that is set back below.
        thread.submit(torch.get_num_threads).result()
        # What a thread sets for itself is what threads that start later have too, until another sets it.
        torch.set_num_threads(before)
        return thread


def _add_landed(add: Callable[[torch.Tensor], None], landing: torch.Tensor, landed: Arrival, behind: Arrival) -> None:
    # Not for order, which one queue and one thread keep: what came before may still have to be widened, or have failed.
    behind.wait()
    landed.wait()
    with torch.no_grad():
        add(landing)


class _Added(Arrival):
    """The end of a sum in another thread."""

    def __init__(self, added: Future[None]):
        self._added = added

    def wait(self) -> None:
        self._added.result()


class _Widened(Arrival):
    """The arrival of values in the last bytes of the memory that is to hold them in a wider dtype.

    Who waits widens them, in its own thread; the first to wait does it for all.
    """

    def __init__(self, landed: Arrival, target: torch.Tensor, dtype: torch.dtype):
        self._landed = landed
        # By `data`: what looks at versions of the target shall see no edit.
        self._target: torch.Tensor | None = target.data
        self._dtype = dtype
        self._lock = Lock()

    def wait(self) -> None:
        self._landed.wait()
        with self._lock:
            if self._target is not None:
                widen_in_place(self._target, self._dtype)
                self._target = None


def landing_in(target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The last bytes of the 1-D `target`, as many elements of a `dtype` that is no wider."""
    nbytes = target.numel() * dtype.itemsize
    # At the end: `widen_in_place` goes from the front, and so reads each number before the wider ones reach it.
    return target.view(torch.uint8)[target.nbytes - nbytes :].view(dtype)


def widen_in_place(target: torch.Tensor, dtype: torch.dtype) -> None:
    """Converts the numbers in `landing_in(target, dtype)` to all of `target`."""
    narrow, start, stop = landing_in(target, dtype), 0, target.numel()
    while start < stop:
        # As far as what is written ends before what has not been read begins.
        part = (stop - start) * (target.itemsize - dtype.itemsize) // target.itemsize
        if part < _LEAST_WIDENED_NUMEL:
            # The rest overlaps: without `clone`, the copy would read what it has just written.
            target[start:].copy_(narrow[start:].clone())
            return
        target[start : start + part].copy_(narrow[start : start + part])
        start += part


def d2h(device: torch.device, cores: HostCores) -> DeviceToHost:
    """The way from `device` into host memory, where `cores` are at work."""
    return DeviceToHost() if device.type == "cpu" else _StreamDeviceToHost(device, cores)


# ---- The way of stepped masters back to the parameters ----

PART_BYTES = 16 * 2**20
"""Of a pinned buffer, of which there are two. A power of two, which torch's pinned memory does not round up."""


class HostToDevice:
    """From memory that is the parameters' own, or on its way to nowhere else."""

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies the 1-D `source`, rounded to the dtype of `target`. The host goes on before the end.

        What the device is asked for later finds it there. `source` keeps its values until a later gradient has come from there.
        """
        target.copy_(source, non_blocking=True)

    def aside(self) -> AbstractContextManager[None]:
        """Runs copies and collectives inside one after the other, beside later work of the device."""
        return nullcontext()

    def hold_up_device(self) -> None:
        """The device goes no further in its own queue before all copies of `aside` have ended."""

    def wait(self) -> None:
        """Returns when they have: their sources may be written then."""


class RoundedHostToDevice(HostToDevice):
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
        # Made at the first copy: a run whose steps are on the device pins nothing.
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
            # The device may still read this buffer: filled too early, another part's values would be sent.
            sent.wait()
        rounded = self._buffers[turn][: target.nbytes].view(target.dtype)
        rounded.copy_(source)
        target.copy_(rounded, non_blocking=True)
        # Of the current queue: inside `aside` that is the side queue, in which this copy runs.
        self._sent[turn] = queue_end(self._device)


def h2d(device: torch.device) -> HostToDevice:
    """The way from host memory to `device`."""
    return HostToDevice() if device.type == "cpu" else RoundedHostToDevice(device)


# ---- Tiers: they allocate the master, the reduced gradient and the optimizer state of a shard ----


class StateFiles:
    """Files on a local disk, one for each shard.

    Args:
        path: an existing folder; the files are in a folder of this run below it.
        window: buckets that may be read or written beside the one that is stepped.
        cores: of steps.
        device: of the parameters.

    Attributes:
        folder: of this run.
        window: through which files pass.
        shards: the files.
        moved_bytes: (read, written) from the end of the last step but one to the end of the last step.
        holds_state: the files have optimizer state; else only masters that are parameters as well.
    """

    def __init__(self, path: Path, window: int, cores: HostCores, device: torch.device, *, holds_state: bool = True):
        self.folder = RunFolder(path)
        self.window = Window(window, cores, device)
        self.holds_state = holds_state
        self.shards: list[StoredShard] = []
        self.moved_bytes = (0, 0)
        self._moved_before = (0, 0)

    def store(self, name: str, kinds: Sequence[Kind]) -> StoredShard:
        """Makes a shard's file. Raises `OffloadError` on a full disk."""
        shard = StoredShard(self.folder.path / f"{name.replace(' ', '-')}.state", kinds)
        self.shards.append(shard)
        return shard

    def end_step(self) -> None:
        """Starts `moved_bytes` anew. A second call without a transfer in between changes nothing."""
        now = (sum(shard.read_bytes for shard in self.shards), sum(shard.written_bytes for shard in self.shards))
        if now != self._moved_before:
            self.moved_bytes = (now[0] - self._moved_before[0], now[1] - self._moved_before[1])
        self._moved_before = now

    def close(self) -> None:
        """Removes the files and their contents."""
        # First: its threads may be writing to the files.
        self.window.close()
        for shard in self.shards:
            shard.file.close()
        self.shards.clear()
        self.folder.close()


class Tier:
    """Memory for shards: here the training device's, where a step fetches nothing.

    Attributes:
        name: in the plan and the memory report.
        is_apart: the optimizer steps in other memory than the parameters', on masters and gradients of its own.
        scratch_name: of the memory of `scratch`.
        device: of the parameters.
        cores: of the host, for steps in this memory; None where they are the script's own.
        h2d: copies masters here to parameters on the device.
        d2h: copies gradients from the device here.
        files: for state; None if all state is in memory.
    """

    name = scratch_name = "device"
    is_apart = False
    files: StateFiles | None = None
    cores: HostCores | None = None

    def __init__(self, device: torch.device):
        self.device = device
        self.h2d = HostToDevice()
        self.d2h = DeviceToHost()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a flat tensor of `numel` elements in this tier."""
        return allocate(numel, dtype, self.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a flat tensor of `numel` elements for a part of a step."""
        # By torch's allocator: gradients come as activations go, and reuse their pages. With a mapping of their own, the system
        # would clear as many pages anew in each step.
        return torch.empty(numel, dtype=dtype, device=self.device)


_HOST = torch.device("cpu")


class HostTier(Tier):
    """Host memory, pinned for parameters on an accelerator, so that copies need no buffer in between.

    The optimizer makes its state on the device of its rows, so state is on the host too, and never moves.

    Args:
        device: of the parameters.
        cores: for steps here; this memory is near to them.
    """

    name = scratch_name = "host memory"
    is_apart = True
    cores: HostCores

    def __init__(self, device: torch.device, cores: HostCores):
        self.device = device
        self.cores = cores
        self.h2d = h2d(device)
        self.d2h = d2h(device, cores)
        self._scratches = PinnedPool(device)
        self._pinned: list[torch.Tensor] = []
        # The callback keeps the mappings alive until they have been unpinned: pages may not go back before.
        weakref.finalize(self, _unpin_all, self._pinned, device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Pinned after allocation: the pinned allocator of torch rounds up to a power of two, a quarter too much on average.
        flat = allocate(numel, dtype, _HOST)
        self.cores.touch(flat)
        if pin(flat, self.device):
            self._pinned.append(flat)
        return flat

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self.cores.near():
            if self.device.type == "cpu":
                return torch.empty(numel, dtype=dtype)
            return self._scratches.take(numel * dtype.itemsize).view(dtype)


class NvmeTier(HostTier):
    """Optimizer state, and separate masters, in one file for each shard; in memory for their bucket's step.

    Gradients of parameters on an accelerator are copied to host memory for the step; on the CPU they are there already.

    Files without state are the parameters': an fp32 parameter and its master are one copy there, which is in memory while its
    bucket is stepped, and optimizer state stays in host memory.

    Args:
        device: of the parameters.
        cores: of steps.
        apart: keep masters apart from parameters in host memory, too, which otherwise are their own masters.
    """

    name = "NVMe"

    def __init__(self, device: torch.device, files: StateFiles, cores: HostCores, *, apart: bool = False):
        super().__init__(device, cores)
        self.is_apart = apart or device.type != "cpu"
        self.files = files
        self.name = NvmeTier.name if files.holds_state else HostTier.name

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # A master before it is written to its file: not pinned, since it is used once.
        return allocate(numel, dtype, _HOST)


def _unpin_all(tensors: list[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        unpin(tensor, device)
    tensors.clear()


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
