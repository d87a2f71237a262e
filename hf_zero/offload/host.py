"""Host memory and files as tiers: masters, gradient shards and optimizer state beside the CPU that steps on them."""

import weakref

import torch

from ..device import PinnedPool, allocate, pin, unpin
from .downlink import downlink
from .host_cores import HostCores
from .tier import StateFiles, Tier
from .uplink import uplink

_HOST = torch.device("cpu")


class HostTier(Tier):
    """Host memory, pinned where the parameters are on an accelerator, so that copies need no buffer in between.

    The optimizer's own state is made where its rows are, so it is on the host too, and never moves. Where the training
    device is the CPU, the same memory holds both; the path is the same.

    Args:
        device: of the parameters.
        cores: of steps here, near to which this memory is to be.
    """

    name = scratch_name = "host memory"
    is_apart = True

    def __init__(self, device: torch.device, cores: HostCores):
        self.device = device
        self.cores = cores
        self.uplink = uplink(device)
        self.downlink = downlink(device, cores)
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
    """Optimizer state, and masters where they are kept apart, in one file for each shard; in memory for their bucket's step.

    What passes through memory passes through host memory: gradients of parameters on an accelerator come down there. Where
    the training device is the CPU, gradients and fp32 parameters are there already, and only state is moved.

    Where the files hold no state, it is in host memory, and the files are the parameters': an fp32 parameter and its master
    are one copy there, which passes through memory when its bucket is stepped.

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
        # A master on its way to its file: for a moment, and therefore not pinned.
        return allocate(numel, dtype, _HOST)


def _unpin_all(tensors: list[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        unpin(tensor, device)
    tensors.clear()
