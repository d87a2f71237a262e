"""One interface to what devices do differently: allocation that gives memory back, and what memory is in use."""

import mmap
import re
from pathlib import Path

import psutil
import torch

PAGE_BYTES = mmap.PAGESIZE


def _host_arena(nbytes: int) -> torch.Tensor:
    # Anonymous mappings go back to the system when freed; glibc keeps freed blocks below 32 MiB in the process.
    region = mmap.mmap(-1, max(nbytes, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor of `numel` elements, base aligned to 256 bytes, zero on the host and undefined elsewhere.

    On the host it is a mapping of its own, so dropping the last reference returns the memory to the system.
    """
    if device.type == "cpu":
        return _host_arena(numel * dtype.itemsize).view(dtype)[:numel]
    return torch.empty(numel, dtype=dtype, device=device)


def alias(view: torch.Tensor) -> torch.Tensor:
    """The same memory behind a storage of its own, which begins and ends with `view` and keeps its memory alive.

    Savers look at storages: `torch.save` of a plain view writes the whole buffer it was cut from, and safetensors takes
    views of one buffer for tied weights and drops all but one.
    """
    return torch.from_dlpack(view.detach())


def peak_bytes(device: torch.device) -> int:
    """The most memory the process has held: on an accelerator by the allocator, on the host the resident high-water mark."""
    if device.type == "cpu":
        status = Path("/proc/self/status")
        if status.is_file():
            return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text()).group(1)) * 1024
        return psutil.Process().memory_info().rss
    return torch.get_device_module(device).max_memory_allocated(device)


class HostValue:
    """A scalar on its way to the host, read without stopping the device's queue in between.

    On the host it is there at once. Elsewhere `start` queues the copy and `value` waits for that copy alone.
    """

    def __init__(self, scalar: torch.Tensor):
        if scalar.device.type == "cpu":
            self._copy, self._event = scalar, None
            return
        self._copy = torch.empty(scalar.shape, dtype=scalar.dtype, pin_memory=True)
        self._copy.copy_(scalar, non_blocking=True)
        self._event = torch.get_device_module(scalar.device).Event()
        self._event.record()

    def value(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.item()
