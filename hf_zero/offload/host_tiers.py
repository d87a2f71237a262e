"""Tiers outside of the training device: host memory, with or without a window on the device, and files."""

import weakref

import torch

from ..allocation import allocate
from ..pinned_memory import PinnedPool, pin, unpin
from .copies import d2h, h2d
from .device_window import DeviceWindow
from .host_memory import HostCores
from .state_files import StateFiles
from .tiers import Tier


class WindowTier(Tier):
    """Host memory for optimizer state and separate masters, which are on the device while their bucket is stepped.

    The masters of fp32 parameters are the parameters, and reduced gradients stay on the device until the step. A link moves 8
    bytes of AdamW's state per parameter in each direction, and a step on the host passes over 28 bytes of host memory, which the
    ranks of a host share.

    Args:
        cores: the cores near the device.
    """

    name = "host memory"
    visits = True

    def __init__(self, device: torch.device, cores: HostCores):
        super().__init__(device)
        self.window = DeviceWindow(device, cores)


class FileWindowTier(Tier):
    """One file per shard with optimizer state and separate masters, which are on the device while their bucket is stepped.

    Masters of fp32 parameters and gradients are those of `WindowTier`. The files, and not the link, determine the time of a step,
    so state is copied in the device's own queue.
    """

    name = "NVMe"
    visits = True

    def __init__(self, device: torch.device, files: StateFiles):
        super().__init__(device)
        self.files = files


_HOST = torch.device("cpu")


class HostTier(Tier):
    """Host memory, pinned for parameters on an accelerator. Copies then need no intermediate buffer.

    The optimizer creates its state on the device of its parameter shards, so the state is on the host too, and never moves.

    Args:
        device: the device of the parameters.
        cores: the cores for steps. The memory is near these cores.
    """

    name = scratch_name = "host memory"
    is_offloaded = True
    cores: HostCores

    def __init__(self, device: torch.device, cores: HostCores):
        self.device = device
        self.cores = cores
        self.h2d = h2d(device)
        self.d2h = d2h(device, cores)
        self._scratches = PinnedPool(device)
        self._pinned: list[torch.Tensor] = []
        # The callback keeps the mappings alive until the pages are unpinned, because pages must not be freed earlier.
        weakref.finalize(self, _unpin_all, self._pinned, device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Pin after allocation: torch's pinned allocator rounds up to a power of two, which wastes a quarter on average.
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
    """One file per shard with optimizer state and masters of 16-bit parameters, in memory while their bucket is stepped.

    Gradients of parameters on an accelerator are copied to host memory for the step. On the CPU they are already there.

    Files without state belong to the parameters: an fp32 parameter and its master are one copy in the file, which is in memory
    while its bucket is stepped. The optimizer state stays in host memory.

    Args:
        device: the device of the parameters.
        cores: the cores for steps.
        separate_masters: also for parameters in host memory. Without it, such parameters are their own masters.
    """

    name = FileWindowTier.name

    def __init__(self, device: torch.device, files: StateFiles, cores: HostCores, *, separate_masters: bool = False):
        super().__init__(device, cores)
        self.is_offloaded = separate_masters or device.type != "cpu"
        self.copies_masters = files.holds_state
        self.files = files
        self.name = NvmeTier.name if files.holds_state else HostTier.name

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # This master is only used once, to be written to its file, so do not pin the memory.
        return allocate(numel, dtype, _HOST)


def _unpin_all(tensors: list[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        unpin(tensor, device)
    tensors.clear()
