"""Tiers, which allocate the master, the reduced gradient and the optimizer state of a shard: device, host memory or files."""

import torch

from ..allocation import allocate
from .copies import DeviceToHost, HostToDevice
from .device_window import DeviceWindow
from .host_memory import HostCores
from .state_files import StateFiles


class Tier:
    """Memory for shards. This class is the training device's memory, so a step fetches nothing.

    Attributes:
        name: the name in the plan and in the memory report.
        is_offloaded: whether the optimizer steps in other memory than the parameters', with separate masters and gradients.
        copies_masters: whether masters with the dtype of parameters on the device are copied from the parameters for each step.
        visits: whether state and separate masters are copied to the training device for the step there.
        scratch_name: the name of the memory returned by `scratch`.
        device: the device of the parameters.
        cores: the host's cores for steps in this memory; None if steps use the script's own threads.
        h2d: copies masters from this memory to parameters on the device.
        d2h: copies gradients from the device to this memory.
        files: the files of state; None if all state is in memory.
        window: copies state in host memory to the device for its step there; None if state is stepped in its own memory.
    """

    name = scratch_name = "device"
    is_offloaded = copies_masters = visits = False
    files: StateFiles | None = None
    cores: HostCores | None = None
    window: DeviceWindow | None = None

    def __init__(self, device: torch.device):
        self.device = device
        self.h2d = HostToDevice()
        self.d2h = DeviceToHost()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a flat tensor of `numel` elements in this tier."""
        return allocate(numel, dtype, self.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a flat tensor of `numel` elements for a part of a step."""
        # Use torch's allocator: gradients are allocated as activations are freed, and reuse their pages. A separate mapping would
        # make the system clear the same number of pages in each step.
        return torch.empty(numel, dtype=dtype, device=self.device)

    def take_cores(self) -> None:
        """Lets torch's kernels use all of `cores`, until `release_cores`."""
        if self.cores is not None:
            self.cores.take()

    def release_cores(self) -> None:
        """Restores the script's own number of threads."""
        if self.cores is not None:
            self.cores.release()
