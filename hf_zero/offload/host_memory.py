"""Host memory available to a run, and the cores near its device."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from ..allocation import PAGE_BYTES
from ..device import pci_address, ranks_on_this_host

# ---- A check of the host memory before anything is allocated ----


def host_memory_fault(needed_bytes: int, available_bytes: int, ranks: int, setting: str) -> str | None:
    """Returns an error text if `ranks` times this setting's `needed_bytes` do not fit in host memory; None otherwise."""
    if needed_bytes * ranks <= available_bytes:
        return None
    return (
        f"hf_zero: `{setting}` needs {_gib(needed_bytes)} GiB of host memory for each of {ranks} ranks here, "
        f"{_gib(needed_bytes * ranks)} GiB in total, but {_gib(available_bytes)} GiB are available. Use more memory or hosts, "
        "`nvme` instead of `cpu`, or `none`."
    )


def disk_fault(needed_bytes: int, free_bytes: int, ranks: int, path: str, setting: str) -> str | None:
    """Returns an error text if `ranks` times this setting's `needed_bytes` do not fit on the disk of `path`; None otherwise."""
    if needed_bytes * ranks <= free_bytes:
        return None
    short = needed_bytes * ranks - free_bytes
    return (
        f"hf_zero: `{setting}` needs {_gib(needed_bytes * ranks)} GiB below {path!r} for {ranks} ranks here, but "
        f"{_gib(free_bytes)} GiB are free: {_gib(short)} GiB ({short} bytes) too little. Free space, name a larger disk in "
        "`offload.nvme_path`, or use `cpu` instead of `nvme`."
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f}"


# ---- The cores near a rank's accelerator, from the system's description of NUMA nodes ----

SYSTEM = Path("/sys")
"""Linux's description of devices: https://www.kernel.org/doc/html/latest/admin-guide/abi-stable.html."""


def near_cores(
    allowed: frozenset[int],
    *,
    pci_address: str | None,
    local_rank: int,
    ranks: int,
    system: Path = SYSTEM,
) -> frozenset[int] | None:
    """Returns the cores for a rank's host steps; None lets the system choose.

    These are the cores of the accelerator's node. Ranks whose accelerator has no known node are distributed evenly over the
    nodes, neighboring ranks together. The system chooses if the host has one node or no information about nodes, and if a
    launcher has already confined the rank to one node.

    Args:
        allowed: cores that this process may run on.
        pci_address: address of the rank's accelerator, such as "0000:3b:00.0"; None without one.
        local_rank: index of the rank among the `ranks` on this host.
        system: the path of /sys.
    """
    reachable = {node: cores & allowed for node, cores in _nodes(system).items() if cores & allowed}
    if len(reachable) < 2:
        return None
    near = None if pci_address is None else _node_of(pci_address, system)
    if near not in reachable:
        near = sorted(reachable)[local_rank * len(reachable) // ranks]
    return reachable[near]


def _nodes(system: Path) -> dict[int, frozenset[int]]:
    """Maps each node to its cores. Nodes without cores, which only have memory, are left out."""
    found = {}
    for folder in (system / "devices" / "system" / "node").glob("node[0-9]*"):
        listed = folder / "cpulist"
        cores = _parsed(listed.read_text()) if listed.is_file() else frozenset()
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def _node_of(pci_address: str, system: Path) -> int | None:
    """Returns a device's node: -1 if the firmware does not know the node, None if the system does not."""
    node = system / "bus" / "pci" / "devices" / pci_address / "numa_node"
    return int(node.read_text()) if node.is_file() else None


def _parsed(listed: str) -> frozenset[int]:
    """Parses a list of cores: `0-3,8` → 0, 1, 2, 3, 8."""
    spans = re.finditer(r"(\d+)(?:-(\d+))?", listed)
    return frozenset(core for span in spans for core in range(int(span[1]), int(span[2] or span[1]) + 1))


# ---- Number and cores of the threads of a host step ----


class HostCores:
    """Sets the threads and cores of a step: the script's own in the script's thread, `threads` of them in hf_zero's threads.

    [Note: whose threads step]
    A step in parallel with training runs in a thread of hf_zero, which calls `enter` once. A step in the script's thread
    (`optimizer.step()`) borrows the thread: it calls `take` before and `release` after the step, which undoes everything.

    Each of these threads has OpenMP helper threads. torch creates them at the first parallel loop, with the number of threads and
    the cores that the calling thread has at that moment. On a host with accelerators, launchers give a rank one thread, so its
    first helpers are created within a step, and stay. Helpers that the script's thread created earlier (training on the CPU)
    keep their cores, because they cannot be reached from here. In that case a launcher has to bind the process.
    """

    def __init__(self, threads: int):
        self.threads = threads

    def enter(self) -> None:
        """Sets the calling thread's number of threads and its cores permanently."""
        # On the first query in a thread, torch applies the process's number to the thread, which would undo an earlier setting.
        torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def take(self) -> None:
        """Sets threads and cores until `release`. A second call changes nothing."""

    def release(self) -> None:
        """Undoes `take`, in the same thread. Does nothing without `take`."""

    def near(self) -> AbstractContextManager[None]:
        """Allocates host memory near these cores, if the memory is first written inside the context."""
        return nullcontext()

    def touch(self, flat: torch.Tensor) -> None:
        """Writes to newly allocated host memory of zeros from these cores."""


class ShareOfCores(HostCores):
    """Uses `threads` threads for every step, on any cores."""

    def __init__(self, threads: int):
        super().__init__(threads)
        self._threads_before: int | None = None

    def take(self) -> None:
        if self._threads_before is None:
            self._threads_before = torch.get_num_threads()
            self.enter()

    def release(self) -> None:
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None


class NodeCores(ShareOfCores):
    """Uses `threads` threads for every step on some cores only, with memory near these cores.

    Args:
        numbers: the cores. The calling process may run on all of them.
    """

    def __init__(self, threads: int, numbers: frozenset[int]):
        super().__init__(threads)
        self.numbers = numbers
        self._numbers_before: set[int] | None = None

    def enter(self) -> None:
        # Set the cores first, because helper threads inherit them. 0 means the calling thread, not the process.
        os.sched_setaffinity(0, self.numbers)
        super().enter()

    def take(self) -> None:
        if self._numbers_before is None:
            self._numbers_before = os.sched_getaffinity(0)
        super().take()

    def release(self) -> None:
        super().release()
        if self._numbers_before is not None:
            os.sched_setaffinity(0, self._numbers_before)
            self._numbers_before = None

    @contextmanager
    def near(self) -> Iterator[None]:
        """See `HostCores.near`. A page belongs to the node of the core with the first write."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.numbers)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def touch(self, flat: torch.Tensor) -> None:
        with self.near():
            # Use numpy, because torch would write in helper threads.
            flat.view(torch.uint8).numpy()[::PAGE_BYTES] = 0


def choose_host_cores(device: torch.device, system: Path = SYSTEM) -> HostCores:
    """Chooses the cores for host steps of a rank training on `device`.

    When training on the CPU, use torch's own number of threads, because launchers distribute the cores among ranks. With an
    accelerator, launchers give each rank one thread by default, but host steps need the rank's share of the cores.

    Args:
        system: the path of /sys.
    """
    ranks, knows_cores = ranks_on_this_host(), hasattr(os, "sched_getaffinity")
    allowed = frozenset(os.sched_getaffinity(0) if knows_cores else range(os.cpu_count() or 1))
    local_rank, address = int(os.environ.get("LOCAL_RANK", "0")), pci_address(device)
    numbers = None
    if knows_cores:
        numbers = near_cores(allowed, pci_address=address, local_rank=local_rank, ranks=ranks, system=system)
    fair = torch.get_num_threads() if device.type == "cpu" else max(1, len(allowed) // ranks)
    if numbers is not None:
        # More threads than cores in the node would only take turns.
        return NodeCores(min(fair, len(numbers)), numbers)
    return HostCores(fair) if device.type == "cpu" else ShareOfCores(fair)
