"""The tier that a config asks for, chosen once when the engine is built."""

import torch

from ..config import OffloadConfig
from .host import HostTier
from .tier import DeviceTier, Tier


def choose_tier(config: OffloadConfig, device: torch.device) -> Tier:
    """Where the state of the shards of parameters on `device` lives."""
    return HostTier(device) if config.optimizer == "cpu" else DeviceTier(device)
