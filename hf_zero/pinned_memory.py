"""Host memory whose pages are locked for direct copies to and from an accelerator."""

import ctypes
import mmap
import weakref
from typing import Any

import torch

from .allocation import PAGE_BYTES, advise, allocate, page_below
from .device import current


def _runtime(device: torch.device) -> Any | None:
    """Returns CUDA's runtime, or the equivalent of another accelerator; None without one."""
    module = torch.get_device_module(device)
    return module.cudart() if hasattr(module, "cudart") else None


def pin(tensor: torch.Tensor, device: torch.device) -> bool:
    """Locks a host tensor's pages for direct copies to and from `device`. Call `unpin` before the pages are freed.

    Returns:
        False if `device` needs no pinning.

    Raises:
        RuntimeError: the system refuses to lock that much memory.
    """
    runtime = _runtime(device)
    if runtime is None:
        return False
    with current(device):
        code = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code != 0:
        raise RuntimeError(
            f"hf_zero: {tensor.nbytes} bytes of host memory cannot be pinned (CUDA error {code}). Raise the limit of locked "
            "memory (ulimit -l), or offload less."
        )
    # After a fork, for example of a data loader's workers, the next write to a page would copy the page. The device would
    # continue to use the old page, and the process would use the copy.
    _advise(tensor, "MADV_DONTFORK")
    return True


def unpin(tensor: torch.Tensor, device: torch.device) -> None:
    """Undoes a successful `pin`."""
    runtime = _runtime(device)
    if runtime is not None:
        with current(device):
            runtime.cudaHostUnregister(tensor.data_ptr())
        _advise(tensor, "MADV_DOFORK")


def _advise(tensor: torch.Tensor, advice: str) -> None:
    """Advises the system about the pages of a tensor; does nothing except on Linux."""
    if hasattr(mmap, advice):
        start = page_below(tensor.data_ptr())
        nbytes = page_below(tensor.data_ptr() + tensor.nbytes + PAGE_BYTES - 1) - start
        advise(start, nbytes, getattr(mmap, advice))


def pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocates host memory (uint8) of exactly this size, pinned (with an accelerator) while any view exists.

    torch's pinned allocator rounds up to a power of two and keeps freed memory. This function frees at once, and does not track
    copies: drop the tensor only after copies from and to it have finished.
    """
    memory = allocate(nbytes, torch.uint8, torch.device("cpu"))
    if not nbytes or device.type == "cpu" or not pin(memory, device):
        return memory
    views = (ctypes.c_uint8 * nbytes).from_address(memory.data_ptr())
    # The callback keeps the mapping alive until the pages are unpinned, because pages must not be freed earlier. `atexit` is
    # False because nothing must be freed when the process ends, and copies may still be running.
    weakref.finalize(views, unpin, memory, device).atexit = False
    return torch.frombuffer(views, dtype=torch.uint8)


class PinnedPool:
    """Host memory (uint8) of exact sizes, pinned if there is an accelerator, and reused when its last view is gone.

    Use it only for copies in one queue, which run in order, because a copy may still run when its memory is reused.

    Attributes:
        nbytes: bytes of all memory of the pool.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes` (above 0) of memory. Without an accelerator, each call allocates new memory."""
        if self._device.type == "cpu":
            return pinned(nbytes, self._device)
        free = self._free.setdefault(nbytes, [])
        if not free:
            free.append(pinned(nbytes, self._device))
            self.nbytes += nbytes
        memory = free.pop()
        views = (ctypes.c_uint8 * nbytes).from_address(memory.data_ptr())
        # Reuse after the last view is gone, not after the caller's reference, because a view may still be copying.
        weakref.finalize(views, free.append, memory).atexit = False
        return torch.frombuffer(views, dtype=torch.uint8)


def passing_host_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocates host memory (uint8), aligned for direct I/O, for copies to or from `device`.

    With an accelerator it is pinned by torch's allocator, which keeps a block until copies from it have finished.
    """
    if device.type == "cpu":
        return allocate(nbytes, torch.uint8, device)
    exact = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if exact.data_ptr() % PAGE_BYTES == 0:
        return exact
    # Small blocks may share a page. Adding a page to all blocks would double blocks of 2^n bytes.
    spacious = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    return spacious[-spacious.data_ptr() % PAGE_BYTES :][:nbytes]
