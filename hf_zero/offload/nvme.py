"""Files on a local disk as a tier: state is in memory for the moment in which its bucket is stepped."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ..device import allocate
from .host import HostTier
from .host_cores import HostCores
from .run_folder import RunFolder
from .stored import Kind, StoredShard
from .tier import StateFiles
from .window import Window


class NvmeTier(HostTier):
    """Optimizer state, and masters where they are kept apart, in one file for each shard.

    What passes through memory passes through host memory: gradients of parameters on an accelerator come down there. Where
    the training device is the CPU, gradients and fp32 parameters are there already, and only state is moved.

    Args:
        device: of the parameters.
        path: an existing folder on a local disk; the files are in a folder of this run below it.
        window: how many buckets may be on their way beside the one that is stepped.
        cores: of steps.
        apart: keep masters apart from parameters in host memory, too, which otherwise are their own masters.

    Attributes: see `StateFiles`.
    """

    name = "NVMe"
    holds_state = True

    def __init__(self, device: torch.device, path: Path, window: int, cores: HostCores, *, apart: bool = False):
        super().__init__(device, cores)
        self.is_apart = apart or device.type != "cpu"
        self.folder = RunFolder(path)
        self.window = Window(window, cores, device)
        self.shards: list[StoredShard] = []
        self.moved_bytes = (0, 0)
        self._moved_before = (0, 0)

    @property
    def files(self) -> StateFiles:
        return self

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # A master on its way to its file: for a moment, and therefore not pinned.
        return allocate(numel, dtype, torch.device("cpu"))

    def store(self, name: str, kinds: Sequence[Kind]) -> StoredShard:
        shard = StoredShard(self.folder.path / f"{name.replace(' ', '-')}.state", kinds)
        self.shards.append(shard)
        return shard

    def end_step(self) -> None:
        now = (sum(shard.read_bytes for shard in self.shards), sum(shard.written_bytes for shard in self.shards))
        if now != self._moved_before:
            self.moved_bytes = (now[0] - self._moved_before[0], now[1] - self._moved_before[1])
        self._moved_before = now

    def close(self) -> None:
        self.window.close()
        for shard in self.shards:
            shard.file.close()
        self.shards.clear()
        self.folder.close()


class HostBesideFiles(NvmeTier):
    """Host memory for optimizer state, where parameters are in files: an fp32 parameter and its master are one copy there.

    Such a copy passes through memory when its bucket is stepped, as an `NvmeTier`'s does; the state beside it stays.
    """

    name = HostTier.name
    holds_state = False

    def __init__(self, device: torch.device, path: Path, window: int, cores: HostCores):
        super().__init__(device, path, window, cores, apart=True)
