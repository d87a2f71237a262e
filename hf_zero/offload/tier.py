"""The tier of one shard's state: master copy, gradient shard and optimizer state live where their tier allocates them."""

from abc import ABC, abstractmethod

import torch

from ..device import Reservation, allocate, reserve


class Tier(ABC):
    """A kind of memory that holds shards. `name` is what the plan and the memory report call it."""

    name: str

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements in this tier."""

    @abstractmethod
    def reserve(self, numel: int, dtype: torch.dtype) -> Reservation:
        """A flat tensor of `numel` elements that gives its memory back between uses."""


class DeviceTier(Tier):
    """The training device itself: nothing has to be fetched before a step."""

    name = "device"

    def __init__(self, device: torch.device):
        self._device = device

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(numel, dtype, self._device)

    def reserve(self, numel: int, dtype: torch.dtype) -> Reservation:
        return reserve(numel, dtype, self._device, kept=slice(0, 0))
