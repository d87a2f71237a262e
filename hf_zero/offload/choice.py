"""The choice of tiers, once when the engine is built, and the tier of each bucket."""

import torch

from ..config import OffloadConfig
from .host_memory import HostCores, choose_host_cores
from .host_tiers import FileWindowTier, HostTier, NvmeTier, WindowTier
from .shards import FileParameters, HostParameters, ParameterTier
from .state_files import StateFiles
from .tiers import Tier
from .walk import WINDOW


def choose_tiers(config: OffloadConfig, device: torch.device, *, steps_on_device: bool) -> tuple[Tier, ParameterTier]:
    """Chooses the tier of state and the tier of shards, for parameters on `device`.

    Args:
        steps_on_device: whether offloaded state is copied to the device for each step.

    Raises:
        ConfigError: `nvme_path` is not a folder of this host, or not writable.
    """
    cores = choose_host_cores(device)
    tier = choose_tier(config, device, cores, steps_on_device=steps_on_device)
    return tier, choose_parameter_tier(config, device, tier, cores)


def choose_tier(config: OffloadConfig, device: torch.device, cores: HostCores, *, steps_on_device: bool) -> Tier:
    """Chooses the tier of state."""
    if steps_on_device and config.optimizer == "nvme":
        return FileWindowTier(device, StateFiles(config.files_folder, WINDOW, cores, device, visits=True))
    if steps_on_device:
        return WindowTier(device, cores)
    if config.optimizer == "nvme":
        return NvmeTier(device, StateFiles(config.files_folder, WINDOW, cores, device), cores)
    if config.optimizer == "cpu" and config.params == "nvme":
        files = StateFiles(config.files_folder, WINDOW, cores, device, holds_state=False)
        return NvmeTier(device, files, cores, separate_masters=True)
    return HostTier(device, cores) if config.optimizer == "cpu" else Tier(device)


def choose_parameter_tier(config: OffloadConfig, device: torch.device, tier: Tier, cores: HostCores) -> ParameterTier:
    """Chooses the tier of shards. A run has one folder of files, which may already belong to `tier`."""
    if config.params == "nvme":
        # Use one folder per run: two folders would need two locks, and a crashed run would leave both behind.
        files = tier.files or StateFiles(config.files_folder, WINDOW, cores, device)
        return FileParameters(device, files, WINDOW)
    return HostParameters(device, cores) if config.params == "cpu" else ParameterTier()


class Placement:
    """Assigns a tier to each bucket, in the order in which gradients arrive, until `ratio` of the elements are offloaded.

    [Note: which part moves]
    The first buckets are offloaded: the fewest with at least `ratio` of the trained elements. Their gradients arrive while
    backward still runs, which hides the copy to the tier and the step there. The last buckets have no such work to overlap with,
    so they are stepped on the training device. The choice is the same on every rank.

    DeepSpeed calls this Twin-Flow: Lian et al., "DeepSpeed-Offload++", 2023.

    Args:
        device: the device of the parameters.
        ratio: above 0, up to 1.
        trained_numel: number of elements of all trained parameters.

    Attributes:
        tier, device_tier: the tiers of offloaded buckets and of the other buckets.
    """

    def __init__(self, tier: Tier, device: torch.device, *, ratio: float, trained_numel: int):
        self.tier = tier
        self.device_tier = Tier(device)
        self._left_numel = ratio * trained_numel

    def next_tier(self, numel: int) -> Tier:
        """Returns the tier of the next bucket of trained parameters, with `numel` elements. Call once for each bucket."""
        # A share such as 0.7 of the elements is not an integer, so the remainder may be a rounding error.
        moves = self._left_numel > 0.5
        self._left_numel -= numel
        return self.tier if moves else self.device_tier
