"""The tier of one shard's state: master copy, gradient shard and optimizer state live where their tier allocates them."""

from abc import ABC, abstractmethod

import torch

from ..device import allocate


class Tier(ABC):
    """A kind of memory that holds shards. `name` is what the plan and the memory report call it."""

    name: str

    @property
    @abstractmethod
    def recycles(self) -> bool:
        """Whether freeing memory and taking it again costs next to nothing, as with a caching allocator."""

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements in this tier."""


class DeviceTier(Tier):
    """The training device itself: nothing has to be fetched before a step."""

    name = "device"

    def __init__(self, device: torch.device):
        self._device = device

    @property
    def recycles(self) -> bool:
        # On the host every page is faulted in and zeroed again: 40 ms of system time a step for 60 MB, measured.
        return self._device.type != "cpu"

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(numel, dtype, self._device)
