"""Tiers, which allocate the master, the reduced gradient and the optimizer state of a shard: device, host memory or files."""

import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from ..allocation import allocate
from ..pinned_memory import PinnedPool, pin, unpin
from .copies import DeviceToHost, HostToDevice, d2h, h2d
from .device_window import DeviceWindow
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

    Attributes:
        folder: the folder of this run.
        window: the buffers for reads and writes.
        shards: the files.
        moved_bytes: (read, written) during the last step and the time before it, back to the previous step.
        holds_state: whether the files contain optimizer state. If not, they contain only masters that are also parameters.
    """

    def __init__(self, path: Path, window: int, cores: HostCores, device: torch.device, *, holds_state: bool = True):
        self.folder = RunFolder(path)
        self.window = Window(window, cores, device)
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


class Tier:
    """Memory for shards. This class is the training device's memory, so a step fetches nothing.

    Attributes:
        name: the name in the plan and in the memory report.
        is_apart: whether the optimizer steps in other memory than the parameters', with separate masters and gradients.
        scratch_name: the name of the memory returned by `scratch`.
        device: the device of the parameters.
        cores: the host's cores for steps in this memory; None if steps use the script's own threads.
        h2d: copies masters from this memory to parameters on the device.
        d2h: copies gradients from the device to this memory.
        files: the files of state; None if all state is in memory.
        window: copies state in host memory to the device for its step there; None if state is stepped in its own memory.
    """

    name = scratch_name = "device"
    is_apart = False
    files: StateFiles | None = None
    cores: HostCores | None = None
    window: DeviceWindow | None = None

    def __init__(self, device: torch.device):
        self.device = device
        self.h2d = HostToDevice()
        self.d2h = DeviceToHost()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a flat tensor of `numel` elements in this tier."""
        return allocate(numel, dtype, self.device)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a flat tensor of `numel` elements for a part of a step."""
        # Use torch's allocator: gradients are allocated as activations are freed, and reuse their pages. A separate mapping would
        # make the system clear the same number of pages in each step.
        return torch.empty(numel, dtype=dtype, device=self.device)

    def take_cores(self) -> None:
        """Lets torch's kernels use all of `cores`, until `release_cores`."""
        if self.cores is not None:
            self.cores.take()

    def release_cores(self) -> None:
        """Restores the script's own number of threads."""
        if self.cores is not None:
            self.cores.release()


class WindowTier(Tier):
    """Host memory for optimizer state and separate masters, which are on the device while their bucket is stepped.

    The masters of fp32 parameters are the parameters, and reduced gradients stay on the device until the step. A link moves 8
    bytes of AdamW's state per parameter in each direction, and a step on the host passes over 28 bytes of host memory, which the
    ranks of a host share.

    Args:
        cores: the cores near the device.
    """

    name = "host memory"

    def __init__(self, device: torch.device, cores: HostCores):
        super().__init__(device)
        self.window = DeviceWindow(device, cores)


_HOST = torch.device("cpu")


class HostTier(Tier):
    """Host memory, pinned for parameters on an accelerator. Copies then need no intermediate buffer.

    The optimizer creates its state on the device of its parameter shards, so the state is on the host too, and never moves.

    Args:
        device: the device of the parameters.
        cores: the cores for steps. The memory is near these cores.
    """

    name = scratch_name = "host memory"
    is_apart = True
    cores: HostCores

    def __init__(self, device: torch.device, cores: HostCores):
        self.device = device
        self.cores = cores
        self.h2d = h2d(device)
        self.d2h = d2h(device, cores)
        self._scratches = PinnedPool(device)
        self._pinned: list[torch.Tensor] = []
        # The callback keeps the mappings alive until the pages are unpinned, because pages must not be freed earlier.
        weakref.finalize(self, _unpin_all, self._pinned, device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Pin after allocation: torch's pinned allocator rounds up to a power of two, which wastes a quarter on average.
        flat = allocate(numel, dtype, _HOST)
        self.cores.touch(flat)
        if pin(flat, self.device):
            self._pinned.append(flat)
        return flat

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self.cores.near():
            if self.device.type == "cpu":
                return torch.empty(numel, dtype=dtype)
            return self._scratches.take(numel * dtype.itemsize).view(dtype)


class NvmeTier(HostTier):
    """One file per shard with optimizer state and separate masters, which are in memory while their bucket is stepped.

    Gradients of parameters on an accelerator are copied to host memory for the step. On the CPU they are already there.

    Files without state belong to the parameters: an fp32 parameter and its master are one copy in the file, which is in memory
    while its bucket is stepped. The optimizer state stays in host memory.

    Args:
        device: the device of the parameters.
        cores: the cores for steps.
        apart: keep masters separate from parameters in host memory as well. Without it, such parameters are their own masters.
    """

    name = "NVMe"

    def __init__(self, device: torch.device, files: StateFiles, cores: HostCores, *, apart: bool = False):
        super().__init__(device, cores)
        self.is_apart = apart or device.type != "cpu"
        self.files = files
        self.name = NvmeTier.name if files.holds_state else HostTier.name

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # This master is only used once, to be written to its file, so do not pin the memory.
        return allocate(numel, dtype, _HOST)


def _unpin_all(tensors: list[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        unpin(tensor, device)
    tensors.clear()
