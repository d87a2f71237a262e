"""Copies of gradients to host memory for the optimizer's step, and of stepped masters back to the parameters."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch

from ..device import enter_thread
from ..pinned_memory import PinnedPool
from ..queues import ARRIVED, Arrival, Mark, queue_end, side_queue
from .host_memory import HostCores

# ---- Copies of reduced gradients into the memory of the optimizer's step ----

_LEAST_WIDENED_NUMEL = 4096
"""Fewer elements are widened through a temporary copy."""


class DeviceToHost:
    """Copies gradients synchronously, for gradients in host memory, or for a step in the gradients' own memory."""

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        """Copies the 1-D `source` after the current work of its device's queue. The caller may drop `source` at once.

        Args:
            target: (source.numel(),) of the same or a wider dtype. Must not be read before the arrival.
        """
        target.copy_(source)
        return ARRIVED

    def start_sum(self, add: Callable[[torch.Tensor], None], source: torch.Tensor, previous: Arrival) -> Arrival:
        """Starts a copy of the 1-D `source` to the device of the sum, and passes the copy to `add` when it has arrived.

        Args:
            previous: the arrival of the target's previous values.
        """
        previous.wait()
        add(source)
        return ARRIVED

    @property
    def sum_bytes(self) -> int:
        """Returns the bytes of host memory used by sums, without their targets."""
        return 0


class _StreamDeviceToHost(DeviceToHost):
    """Copies from an accelerator into pinned host memory on a side stream, so backward's kernels do not wait for the bus.

    If the target has a wider dtype, the narrow values are sent and widened on the host. torch would widen first, and send twice
    the bytes.

    [Note: sums during backward]
    A thread adds up the reduced gradients of micro-batches in host memory, so backward waits neither for the bus nor for the
    host. Each arriving shard has its own buffer, at most one per bucket. Backward waits only if the host is a whole micro-batch
    late.

    Args:
        cores: the cores for the sums.
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
        with self._queue.in_parallel():
            landing.copy_(source, non_blocking=True)
            # Otherwise the allocator could reuse the memory before the end of the copy.
            source.record_stream(self._module.current_stream(self._device))
        landed = self._queue.mark()
        return landed if landing is target else _Widened(landed, target, source.dtype)

    def start_sum(self, add: Callable[[torch.Tensor], None], source: torch.Tensor, previous: Arrival) -> Arrival:
        # Wait for the bucket's previous sum; otherwise one landing buffer per micro-batch would pile up.
        if isinstance(previous, _Added):
            previous.wait()
        with self._cores.near():
            landing = self._landings.take(source.nbytes).view(source.dtype)
        landed = self.start_copy(landing, source)
        if self._thread is None:
            self._thread = self._start_thread()
        return _Added(self._thread.submit(_add_landed, add, landing, landed, previous))

    @property
    def sum_bytes(self) -> int:
        return self._landings.nbytes

    def _start_thread(self) -> ThreadPoolExecutor:
        device, cores, before = self._device, self._cores, torch.get_num_threads()

        def enter() -> None:
            enter_thread(device)
            cores.enter()

        thread = ThreadPoolExecutor(1, thread_name_prefix="hf_zero-gradients", initializer=enter)
        # Wait until the thread has started: a late `enter` would overwrite the number restored below.
        thread.submit(torch.get_num_threads).result()
        # A number set in one thread also applies to threads started later, so restore the previous number.
        torch.set_num_threads(before)
        return thread


def _add_landed(add: Callable[[torch.Tensor], None], landing: torch.Tensor, landed: Arrival, previous: Arrival) -> None:
    # One queue and one thread keep the order, but the previous values may still have to be widened, or may have failed.
    previous.wait()
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
    """The arrival of narrow values in the last bytes of a target with a wider dtype.

    `wait` widens the values in the calling thread; if several threads wait, the first one does.
    """

    def __init__(self, landed: Arrival, target: torch.Tensor, dtype: torch.dtype):
        self._landed = landed
        # Use `data`: widening must not change the target's version, which would look like an edit.
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
    """Returns the last bytes of the 1-D `target` as elements of `dtype`, which must not be wider than the target's."""
    nbytes = target.numel() * dtype.itemsize
    # Use the end, because `widen_in_place` works from the front and must read each number before overwriting its bytes.
    return target.view(torch.uint8)[target.nbytes - nbytes :].view(dtype)


def widen_in_place(target: torch.Tensor, dtype: torch.dtype) -> None:
    """Converts the numbers in `landing_in(target, dtype)` to all of `target`."""
    narrow, start, stop = landing_in(target, dtype), 0, target.numel()
    while start < stop:
        # Write only up to the first number not yet read.
        part = (stop - start) * (target.itemsize - dtype.itemsize) // target.itemsize
        if part < _LEAST_WIDENED_NUMEL:
            # Source and target overlap: without `clone`, the copy would read values written by itself.
            target[start:].copy_(narrow[start:].clone())
            return
        target[start : start + part].copy_(narrow[start : start + part])
        start += part


def d2h(device: torch.device, cores: HostCores) -> DeviceToHost:
    """Returns the copier from `device` to host memory; `cores` add up gradients there."""
    return DeviceToHost() if device.type == "cpu" else _StreamDeviceToHost(device, cores)


# ---- Copies of stepped masters back to the parameters ----

PART_BYTES = 16 * 2**20
"""Size of each of the two pinned buffers. torch rounds pinned memory up to a power of two, so use one."""


class HostToDevice:
    """Copies masters to parameters, directly."""

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies the 1-D `source`, rounded to the dtype of `target`, without blocking the host.

        Later work of the device sees the new values. `source` must not change before the copy has ended.
        """
        target.copy_(source, non_blocking=True)

    def in_parallel(self) -> AbstractContextManager[None]:
        """Runs the copies and collectives inside one after the other, in parallel with later work of the device."""
        return nullcontext()

    def hold_up_device(self) -> None:
        """Makes the device's own queue wait for all copies of `in_parallel`."""

    def wait(self) -> None:
        """Waits for the copies. Their sources may be written afterwards."""


class RoundedHostToDevice(HostToDevice):
    """Copies from host memory to an accelerator in the dtype of the target: 2 bytes per element for 16-bit parameters.

    torch would send the 4 bytes of the source and round on the device. Two pinned buffers take turns: one is filled while the
    other is sent.

    Args:
        device: the device of the parameters.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._queue = side_queue(device)
        self._buffers: list[torch.Tensor] = []
        self._sent: list[Mark | None] = [None, None]
        self._turn = 0

    def in_parallel(self) -> AbstractContextManager[None]:
        return self._queue.in_parallel()

    def hold_up_device(self) -> None:
        self._queue.mark().hold_up_device()

    def wait(self) -> None:
        self._queue.mark().wait()

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.dtype == target.dtype or source.device.type != "cpu":
            super().start_copy(target, source)
            return
        # Allocated at the first copy, so a run with all steps on the device pins nothing.
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
            # The device may still read this buffer. Refilling the buffer now would send values of another part.
            sent.wait()
        rounded = self._buffers[turn][: target.nbytes].view(target.dtype)
        rounded.copy_(source)
        target.copy_(rounded, non_blocking=True)
        # Mark the current queue. Inside `in_parallel` this is the side queue, which runs this copy.
        self._sent[turn] = queue_end(self._device)


def h2d(device: torch.device) -> HostToDevice:
    """Returns the copier from host memory to `device`."""
    return HostToDevice() if device.type == "cpu" else RoundedHostToDevice(device)
