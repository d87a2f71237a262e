"""The tiers that a config asks for, chosen once when the engine is built, and which of them each bucket's state is in."""

import torch

from ..config import AUTO, OffloadConfig
from .activations import Activations, ActivationsInHostMemory
from .host import HostTier, NvmeTier
from .host_cores import HostCores, choose_host_cores
from .parameter_shards import FileParameters, HostParameters, ParameterTier
from .tier import StateFiles, Tier
from .window import WINDOW


def choose_activations(config: OffloadConfig, device: torch.device) -> Activations:
    """What is done with what a training forward on `device` saves for its backward."""
    return ActivationsInHostMemory(device) if config.activations == "cpu" else Activations()


def choose_tiers(config: OffloadConfig, device: torch.device) -> tuple[Tier, ParameterTier]:
    """Where the state of the shards of parameters on `device` lives, and where the shards do.

    Raises:
        ConfigError: `nvme_path` is no folder here, or not writable.
    """
    cores = choose_host_cores(device)
    tier = choose_tier(config, device, cores)
    return tier, choose_parameter_tier(config, device, tier, cores)


def choose_tier(config: OffloadConfig, device: torch.device, cores: HostCores) -> Tier:
    """Where the state lives."""
    if config.optimizer == "nvme":
        # A step that is not taken in its time leaves the parameters alone, and has to write somewhere.
        apart = config.speculate_bytes not in (AUTO, 0)
        return NvmeTier(device, StateFiles(config.files_folder, WINDOW, cores, device), cores, apart=apart)
    if config.optimizer == "cpu" and config.params == "nvme":
        files = StateFiles(config.files_folder, WINDOW, cores, device, holds_state=False)
        return NvmeTier(device, files, cores, apart=True)
    return HostTier(device, cores) if config.optimizer == "cpu" else Tier(device)


def choose_parameter_tier(config: OffloadConfig, device: torch.device, tier: Tier, cores: HostCores) -> ParameterTier:
    """Where the shards live. One run has one folder of files, which `tier`, that of their state, may have made."""
    if config.params == "nvme":
        files = tier.files or StateFiles(config.files_folder, WINDOW, cores, device)
        return FileParameters(device, files, WINDOW)
    return HostParameters(device, cores) if config.params == "cpu" else ParameterTier()


class Placement:
    """Gives each bucket its tier, in the order in which gradients arrive, until `ratio` of the elements have moved.

    [Note: which part moves]
    The first buckets move: the fewest that hold at least `ratio` of the trained elements. Gradients of these arrive while
    backward still runs, so that the way to the tier and the step there have something to hide behind. The last ones, which
    would have nothing, are stepped on the training device. Every rank comes to the same answer.

    Twin-Flow is DeepSpeed's name for it: Lian et al., "DeepSpeed-Offload++", 2023.

    Args:
        device: of the parameters.
        ratio: above 0, up to 1.
        trained_numel: elements of all trained parameters.

    Attributes:
        tier, device_tier: of what moves, and of what stays.
    """

    def __init__(self, tier: Tier, device: torch.device, *, ratio: float, trained_numel: int):
        self.tier = tier
        self.device_tier = Tier(device)
        self._left_numel = ratio * trained_numel

    def next_tier(self, numel: int) -> Tier:
        """The tier of the next bucket of trained parameters, which hold `numel` elements. Called once for each."""
        # A share such as 0.7 of the elements is no whole number, and what is left of it may be a rounding error.
        moves = self._left_numel > 0.5
        self._left_numel -= numel
        return self.tier if moves else self.device_tier
