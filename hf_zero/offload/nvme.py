"""Files on a local disk as a tier: state is in memory for the moment in which its bucket is stepped."""

import torch

from ..device import allocate
from .host import HostTier
from .host_cores import HostCores
from .tier import StateFiles


class NvmeTier(HostTier):
    """Optimizer state, and masters where they are kept apart, in one file for each shard.

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
        return allocate(numel, dtype, torch.device("cpu"))
