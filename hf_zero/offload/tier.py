"""The tier of one shard's state: master copy, gradient shard and optimizer state live where their tier allocates them."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ..device import allocate
from .downlink import Downlink
from .host_cores import HostCores
from .run_folder import RunFolder
from .stored import Kind, StoredShard
from .uplink import Uplink
from .window import Window


class StateFiles:
    """Files on a local disk, one for each shard.

    Args:
        path: an existing folder; the files are in a folder of this run below it.
        window: how many buckets may be on their way beside the one that is stepped.
        cores: of steps.
        device: of the parameters.

    Attributes:
        folder: of this run.
        window: through which files pass.
        shards: the files.
        moved_bytes: (read, written) by the last step, with what came before it since the step before.
        holds_state: they have optimizer state; else only masters that are parameters as well.
    """

    def __init__(self, path: Path, window: int, cores: HostCores, device: torch.device, *, holds_state: bool = True):
        self.folder = RunFolder(path)
        self.window = Window(window, cores, device)
        self.holds_state = holds_state
        self.shards: list[StoredShard] = []
        self.moved_bytes = (0, 0)
        self._moved_before = (0, 0)

    def store(self, name: str, kinds: Sequence[Kind]) -> StoredShard:
        """Makes a shard's file. Raises `OffloadError` where there is no room for it."""
        shard = StoredShard(self.folder.path / f"{name.replace(' ', '-')}.state", kinds)
        self.shards.append(shard)
        return shard

    def end_step(self) -> None:
        """Ends what `moved_bytes` counts as one step. A second call in which nothing has moved changes nothing."""
        now = (sum(shard.read_bytes for shard in self.shards), sum(shard.written_bytes for shard in self.shards))
        if now != self._moved_before:
            self.moved_bytes = (now[0] - self._moved_before[0], now[1] - self._moved_before[1])
        self._moved_before = now

    def close(self) -> None:
        """Removes the files; what they hold is lost."""
        self.window.close()
        for shard in self.shards:
            shard.file.close()
        self.shards.clear()
        self.folder.close()


class Tier:
    """Memory that holds shards: here the training device's, where nothing has to be fetched before a step.

    Attributes:
        name: what the plan and the memory report call it.
        is_apart: it is other memory than the parameters': the optimizer steps there, on masters and gradients of its own.
        scratch_name: of the memory in which `scratch` is.
        device: of the parameters.
        cores: of the host, that steps in this memory run on.
        uplink: how masters here become parameters on the device.
        downlink: how gradients come here from it.
        files: that it keeps state in; None where all is in its memory.
    """

    name = scratch_name = "device"
    is_apart = False
    files: StateFiles | None = None

    def __init__(self, device: torch.device):
        self.device = device
        self.cores = HostCores(torch.get_num_threads())
        self.uplink = Uplink()
        self.downlink = Downlink()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements in this tier."""
        return allocate(numel, dtype, self.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements for a part of a step."""
        # From where activations come: gradients come as those go, and on the host then fill pages that are there already.
        # A mapping of their own would have the system clear as many anew in each step.
        return torch.empty(numel, dtype=dtype, device=self.device)
