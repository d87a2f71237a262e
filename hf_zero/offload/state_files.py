"""Files on a local disk with the state of shards, and their buffers in memory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from .files import Kind, StoredShard
from .host_memory import HostCores
from .run_folder import RunFolder
from .walk import Window


class StateFiles:
    """Files on a local disk, one for each shard.

    Args:
        path: an existing folder. The files are in a new subfolder for this run.
        window: buckets that may be read or written while another one is stepped.
        cores: the cores for steps.
        device: the device of the parameters.
        visits: whether state is copied to `device` for its step.

    Attributes:
        folder: the folder of this run.
        window: the buffers for reads and writes.
        shards: the files.
        moved_bytes: (read, written) during the last step and the time before it, back to the previous step.
        holds_state: whether the files contain optimizer state. If not, they contain only masters that are also parameters.
    """

    def __init__(
        self,
        path: Path,
        window: int,
        cores: HostCores,
        device: torch.device,
        *,
        holds_state: bool = True,
        visits: bool = False,
    ):
        self.folder = RunFolder(path)
        self.window = Window(window, cores, device, visits=visits)
        self.holds_state = holds_state
        self.shards: list[StoredShard] = []
        self.moved_bytes = (0, 0)
        self._moved_before = (0, 0)

    def store(self, name: str, kinds: Sequence[Kind]) -> StoredShard:
        """Creates a shard's file. Raises `OffloadError` on a full disk."""
        shard = StoredShard(self.folder.path / f"{name.replace(' ', '-')}.state", kinds)
        self.shards.append(shard)
        return shard

    def end_step(self) -> None:
        """Starts a new count of `moved_bytes`. A second call without a transfer in between changes nothing."""
        now = (sum(shard.read_bytes for shard in self.shards), sum(shard.written_bytes for shard in self.shards))
        if now != self._moved_before:
            self.moved_bytes = (now[0] - self._moved_before[0], now[1] - self._moved_before[1])
        self._moved_before = now

    def close(self) -> None:
        """Removes the files and their contents."""
        # Close the window first, because its threads may still write to the files.
        self.window.close()
        for shard in self.shards:
            shard.file.close()
        self.shards.clear()
        self.folder.close()
