"""Files on a local disk as a tier: state is in memory for the moment in which its bucket is stepped."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ..device import allocate
from .host import HostTier
from .run_folder import RunFolder
from .stored import StoredShard
from .window import Window


class NvmeTier(HostTier):
    """Optimizer state, and masters where they are kept apart, in one file for each shard.

    What passes through memory passes through host memory: gradients of parameters on an accelerator come down there. Where
    the training device is the CPU, gradients and fp32 parameters are there already, and only state is moved.

    Args:
        device: of the parameters.
        path: an existing folder on a local disk; the files are in a folder of this run below it.
        window: how many buckets may be on their way beside the one that is stepped.
    """

    name = "NVMe"

    def __init__(self, device: torch.device, path: Path, window: int):
        super().__init__(device)
        self.is_apart = device.type != "cpu"
        self.folder = RunFolder(path)
        self.window = Window(window)
        self.shards: list[StoredShard] = []

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # A master on its way to its file: for a moment, and therefore not pinned.
        return allocate(numel, dtype, torch.device("cpu"))

    def store(self, name: str, numel: int, kinds: Sequence[tuple[str, torch.dtype]]) -> StoredShard:
        """Makes a shard's file.

        Raises:
            OffloadError: there is no room for it.
        """
        shard = StoredShard(self.folder.path / f"{name.replace(' ', '-')}.state", numel, kinds)
        self.shards.append(shard)
        return shard

    def written_bytes(self) -> int:
        return sum(shard.written_bytes for shard in self.shards)

    def read_bytes(self) -> int:
        return sum(shard.read_bytes for shard in self.shards)

    def close(self) -> None:
        """Removes the files; what they hold is lost."""
        self.window.close()
        for shard in self.shards:
            shard.file.close()
        self.shards.clear()
        self.folder.close()
