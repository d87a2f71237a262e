"""The tier of one shard's state: master copy, gradient shard and optimizer state live where their tier allocates them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from ..device import allocate
from .downlink import Downlink
from .host_cores import HostCores
from .run_folder import RunFolder
from .stored import Kind, StoredShard
from .uplink import Uplink
from .window import Window


class StateFiles(Protocol):
    """Files that a tier keeps state in.

    Attributes:
        folder: of this run.
        window: through which files pass.
        shards: the files.
        moved_bytes: (read, written) by the last step, with what came before it since the step before.
        holds_state: they have optimizer state; else only masters that are parameters as well.
    """

    folder: RunFolder
    window: Window
    shards: list[StoredShard]
    moved_bytes: tuple[int, int]
    holds_state: bool

    def store(self, name: str, kinds: Sequence[Kind]) -> StoredShard:
        """Makes a shard's file. Raises `OffloadError` where there is no room for it."""
        ...

    def end_step(self) -> None:
        """Ends what `moved_bytes` counts as one step. A second call in which nothing has moved changes nothing."""
        ...

    def close(self) -> None:
        """Removes the files; what they hold is lost."""
        ...


class Tier(ABC):
    """A kind of memory that holds shards. `name` is what the plan and the memory report call it.

    Attributes:
        is_apart: it is other memory than the parameters': the optimizer steps there, on masters and gradients of its own.
        scratch_name: of the memory in which `scratch` is.
        device: of the parameters.
        cores: of the host, that steps in this memory run on.
        uplink: how masters here become parameters on the device.
        downlink: how gradients come here from it.
    """

    name: str
    is_apart: bool
    scratch_name: str
    device: torch.device
    cores: HostCores
    uplink: Uplink
    downlink: Downlink

    @property
    def files(self) -> StateFiles | None:
        """Files that it keeps state in; None where all is in its memory."""
        return None

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements in this tier."""

    @abstractmethod
    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements for a part of a step."""


class DeviceTier(Tier):
    """The training device itself: nothing has to be fetched before a step."""

    name = scratch_name = "device"
    is_apart = False

    def __init__(self, device: torch.device):
        self.device = device
        self.cores = HostCores(torch.get_num_threads())
        self.uplink = Uplink()
        self.downlink = Downlink()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(numel, dtype, self.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # From where activations come: gradients come as those go, and on the host then fill pages that are there already.
        # A mapping of their own would have the system clear as many anew in each step.
        return torch.empty(numel, dtype=dtype, device=self.device)
