"""Steps on copies of the state, in a background thread."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import TypeVar, cast

import torch

from ..buckets.bucket import Bucket
from ..buckets.rows import MASTER
from ..device import Arrival, allocate, enter_thread
from ..offload.files import ReadRegion
from ..offload.host_memory import HostCores
from ..offload.tiers import StateFiles, Tier
from ..optimizer.bucket_state import (
    BucketState,
    Placeholders,
    Trial,
    try_step,
)
from .double import Double, Stepped
from .seen import Seen

# ---- The thread for early steps, in parallel with training ----

_HOST = torch.device("cpu")
_Result = TypeVar("_Result")


class StepThread:
    """Computes one step after the other in a thread, with its own number of CPU threads for torch's operations.

    Args:
        cores: cores for torch's operations.
        device: device of the gradients.
    """

    def __init__(self, cores: HostCores, device: torch.device):
        enter = partial(enter_thread, device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_zero-step", initializer=enter)
        self._scratch: torch.Tensor | None = None
        before = torch.get_num_threads()
        self._thread.submit(cores.enter).result()
        # Threads started later use the last number set in any thread, so restore the previous one.
        torch.set_num_threads(before)

    def submit(self, call: Callable[..., _Result], *arguments) -> Future[_Result]:
        return self._thread.submit(call, *arguments)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 for the current call, because some optimizers write to gradients."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = allocate(nbytes, torch.uint8, _HOST)
        return self._scratch[:nbytes]

    @property
    def scratch_bytes(self) -> int:
        return 0 if self._scratch is None else self._scratch.nbytes

    def close(self) -> None:
        self._thread.shutdown()


# ---- Early steps on copies of the state ----


class StepsBeside:
    """The copies of buckets, and the threads for their steps.

    A single thread computes, so steps run one after the other. Reads and writes of files use the threads and buffers of the usual
    walk over files.

    Args:
        tier: its cores run the steps.
        files: files of state; None without files.

    Attributes:
        doubles: the copies of buckets that are stepped early.
    """

    def __init__(self, tier: Tier, files: StateFiles | None, placeholders: Placeholders):
        self._files = files
        self._placeholders = placeholders
        self._thread = StepThread(cast(HostCores, tier.cores), tier.device)
        self._buffers = self._no_buffers()
        self._running: dict[Bucket, Future[Stepped]] = {}
        self.doubles: dict[Bucket, Double] = {}
        self._most_copy_bytes = 0

    def add(self, optimizer: torch.optim.Optimizer, state: BucketState, memory_bytes: int) -> None:
        """Registers a bucket for early steps; its copies need up to `memory_bytes` in memory."""
        self.doubles[state.bucket] = Double(state, optimizer)
        self._most_copy_bytes += memory_bytes

    def of(self, optimizer: torch.optim.Optimizer) -> list[Bucket]:
        """Returns the optimizer's buckets with early steps."""
        return [bucket for bucket, double in self.doubles.items() if double.optimizer is optimizer]

    def start(self, bucket: Bucket, seen: Seen, arrival: Arrival) -> Future[Stepped]:
        """Starts the step described by `seen`, which waits for the gradient to arrive."""
        double = self.doubles[bucket]
        if self._files is None or double.state.shard is None:
            self._running[bucket] = self._thread.submit(self._step_in_memory, double, seen, arrival)
        else:
            before = [self._running[bucket]] if bucket in self._running else []
            self._running[bucket] = self._files.window.submit(self._step_by_file, double, seen, arrival, before)
        return self._running[bucket]

    def end(self) -> None:
        """Waits for all running steps. Errors are raised when the result of a step is read."""
        wait(self._running.values())
        self._running.clear()

    def forget_buffers(self) -> None:
        """Replaces the buffers, which running steps may still use."""
        self._buffers = self._no_buffers()

    def commit(self, stepped: dict[Bucket, Stepped]) -> None:
        """Makes these steps the state of their buckets, and updates parameters from masters in files.

        Raises:
            OffloadError: reading or writing a file failed.
        """
        for bucket, states in stepped.items():
            self.doubles[bucket].commit(states)
        shards = {bucket: self.doubles[bucket].state.shard for bucket in stepped if bucket.is_away}
        followed = {ReadRegion(shard, MASTER): b for b, shard in shards.items() if shard and b.has_second_copy}
        if self._files is None or not followed:
            return
        with closing(self._files.window.walk(list(followed))) as walk:
            for region, buffer in walk:
                bucket = followed[region]
                bucket.fetch(region.values(buffer))
                bucket.write_back()
                bucket.store(self._placeholders.of((), bucket.precision.master))

    def copy_bytes(self) -> int:
        """Bytes of copies of state in memory."""
        return sum(double.nbytes for double in self.doubles.values())

    def file_copy_bytes(self) -> int:
        """Bytes of copies of state in files."""
        shards = (double.state.shard for double in self.doubles.values())
        return sum(shard.nbytes for shard in shards if shard is not None)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the gradients of the running step."""
        return self._thread.scratch_bytes

    @property
    def most_bytes(self) -> int:
        """Maximum of the bytes of all copies and `scratch_bytes`."""
        return self._most_copy_bytes + max((bucket.gradient_bytes for bucket in self.doubles), default=0)

    def close(self) -> None:
        wait(self._running.values())
        self._thread.close()

    def _step_in_memory(self, double: Double, seen: Seen, arrival: Arrival) -> Stepped:
        arrival.wait()
        return self._step(double, seen, None)

    def _step_by_file(self, double: Double, seen: Seen, arrival: Arrival, before: Iterable[Future[Stepped]]) -> Stepped:
        """Computes a step into the other side of the bucket's file. `before`: a dropped step of the same bucket."""
        # The dropped step may still write to the other side of the file.
        wait(before)
        buffers, shard = self._buffers, double.state.shard
        buffer = buffers.get()
        if self._files is None or shard is None:
            raise AssertionError(
                "hf_zero: bug: a bucket without a file was to be stepped in one. Open an issue with this traceback."
            )
        if buffer is None:
            buffer = self._files.window.make_buffer(self._largest)
        try:
            shard.read(buffer)
            # Wait only after the read, which needs no gradient: the disk works while the gradient is copied.
            arrival.wait()
            stepped = self._thread.submit(self._step, double, seen, buffer).result()
            shard.write_aside(buffer)
            return stepped
        finally:
            buffers.put(buffer)

    def _step(self, double: Double, seen: Seen, buffer: torch.Tensor | None) -> Stepped:
        bucket = double.state.bucket
        scratch = self._thread.scratch(bucket.gradient_bytes).view(bucket.precision.master)
        return double.step(seen, scratch, buffer)

    @property
    def _largest(self) -> int:
        shards = (double.state.shard for double in self.doubles.values())
        return max(shard.nbytes for shard in shards if shard is not None)

    def _no_buffers(self) -> SimpleQueue[torch.Tensor | None]:
        """Makes a queue with one entry for each buffer. A buffer is allocated at its first use."""
        buffers: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        for _ in range(0 if self._files is None else self._files.window.size + 1):
            buffers.put(None)
        return buffers


def try_aside(optimizer: torch.optim.Optimizer, state: BucketState) -> tuple[Trial | None, str | None]:
    """Tries a step of the bucket's group. Returns (the results of the trial, the reason against early steps).

    If the reason is None, the results are not None.
    """
    bucket, name = state.bucket, type(optimizer).__name__
    trial = try_step(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master)
    if trial is not None and trial.hindrance is not None:
        return trial, trial.hindrance
    if bucket.layout.intact:
        # Some optimizers even read several parameters: some versions of LAMB compute a norm over all of them.
        return trial, f"{name} looks at whole parameters"
    if trial is None:
        return None, f"{name} cannot be tried beforehand"
    if state.shard is not None and not state.master.is_away:
        # Backward may still gather layers from these parameters.
        return trial, "masters are the parameters themselves, in host memory"
    return trial, None


def memory_bytes(state: BucketState, trial: Trial) -> int:
    """Bytes of a bucket's copies in memory."""
    of_state = state.state.most_aside_bytes(state.bucket, [dtype for _, dtype in trial.kinds])
    return state.master.most_aside_bytes + of_state
