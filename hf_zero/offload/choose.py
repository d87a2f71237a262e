"""The tier that a config asks for, chosen once when the engine is built."""

from pathlib import Path

import torch

from ..config import OffloadConfig
from .host import HostTier
from .nvme import NvmeTier
from .tier import DeviceTier, Tier


def choose_tier(config: OffloadConfig, device: torch.device) -> Tier:
    """Where the state of the shards of parameters on `device` lives.

    Raises:
        ConfigError: `nvme_path` is no folder here, or not writable.
    """
    if config.optimizer == "nvme":
        return NvmeTier(device, Path(config.nvme_path), config.window)
    return HostTier(device) if config.optimizer == "cpu" else DeviceTier(device)
