"""The host memory that a run may take, and the cores near its device."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from ..device import PAGE_BYTES, pci_address, ranks_on_this_host

# ---- Does it fit in host memory? Asked before any of it is allocated ----


def host_memory_fault(needed_bytes: int, available_bytes: int, ranks: int, setting: str) -> str | None:
    """Says that `ranks` times this setting's `needed_bytes` do not fit in host memory; None if they fit."""
    if needed_bytes * ranks <= available_bytes:
        return None
    return (
        f"hf_zero: `{setting}` needs {_gib(needed_bytes)} GiB of host memory for each of {ranks} ranks here, "
        f"{_gib(needed_bytes * ranks)} GiB together, and {_gib(available_bytes)} GiB are available. Use more memory "
        "or hosts, `nvme` in place of `cpu`, or `none`."
    )


def disk_fault(needed_bytes: int, free_bytes: int, ranks: int, path: str, setting: str) -> str | None:
    """Says that `ranks` times this setting's `needed_bytes` do not fit on the disk of `path`; None if they fit."""
    if needed_bytes * ranks <= free_bytes:
        return None
    short = needed_bytes * ranks - free_bytes
    return (
        f"hf_zero: `{setting}` needs {_gib(needed_bytes * ranks)} GiB below {path!r} for {ranks} ranks here, and "
        f"{_gib(free_bytes)} GiB are free: {_gib(short)} GiB ({short} bytes) too little. Free space, name a larger disk in "
        "`offload.nvme_path`, or use `cpu` in place of `nvme`."
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f}"


# ---- The cores near a rank's accelerator: NUMA nodes, as the system describes them ----

SYSTEM = Path("/sys")
"""Where Linux tells of devices: https://www.kernel.org/doc/html/latest/admin-guide/abi-stable.html."""


def near_cores(
    allowed: frozenset[int],
    *,
    pci_address: str | None,
    local_rank: int,
    ranks: int,
    system: Path = SYSTEM,
) -> frozenset[int] | None:
    """Returns the cores for a rank's host steps; None to let the system choose.

    These are the cores of the accelerator's node. Ranks whose accelerator has no known node are dealt over the nodes evenly,
    neighbours together. The system chooses on a host with one node or without information on nodes, and if a launcher has
    confined the rank to one node already.

    Args:
        allowed: cores that this process may run on.
        pci_address: of the rank's accelerator, "0000:3b:00.0"; None without one.
        local_rank: of the `ranks` on this host.
        system: where /sys is.
    """
    reachable = {node: cores & allowed for node, cores in _nodes(system).items() if cores & allowed}
    if len(reachable) < 2:
        return None
    near = None if pci_address is None else _node_of(pci_address, system)
    if near not in reachable:
        near = sorted(reachable)[local_rank * len(reachable) // ranks]
    return reachable[near]


def _nodes(system: Path) -> dict[int, frozenset[int]]:
    """Node → its cores. Some nodes are memory alone, and have none."""
    found = {}
    for folder in (system / "devices" / "system" / "node").glob("node[0-9]*"):
        listed = folder / "cpulist"
        cores = _parsed(listed.read_text()) if listed.is_file() else frozenset()
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def _node_of(pci_address: str, system: Path) -> int | None:
    """A device's node; -1 where the firmware says nothing, None where the system does not."""
    told = system / "bus" / "pci" / "devices" / pci_address / "numa_node"
    return int(told.read_text()) if told.is_file() else None


def _parsed(listed: str) -> frozenset[int]:
    """`0-3,8` → 0, 1, 2, 3, 8."""
    spans = re.finditer(r"(\d+)(?:-(\d+))?", listed)
    return frozenset(core for span in spans for core in range(int(span[1]), int(span[2] or span[1]) + 1))


# ---- Number and cores of the threads of a host step ----


class HostCores:
    """Sets threads and cores of a step: the script's own in its thread, `threads` of them in hf_zero's.

    [Note: whose threads step]
    A step beside training runs in a thread of hf_zero's own, which `enter`s once, for good. A step that the script's
    thread takes (`optimizer.step()`) borrows that thread: `take` before, `release` behind, and nothing is left of it.

    Either one has helpers, which torch's OpenMP makes when a loop first wants them, with the number and the cores that the
    asking thread has then. Launchers leave a rank beside an accelerator one thread, so that its first helpers are made within
    a step, and stay. Helpers that the script's thread has had before (training on the CPU) stay where they are, since they
    cannot be reached from here; there a launcher has to bind the process.
    """

    def __init__(self, threads: int):
        self.threads = threads

    def enter(self) -> None:
        """Sets the calling thread's number of threads, and its cores, from now on."""
        # torch takes the process's number into each thread at its first question, and would do so after this.
        torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def take(self) -> None:
        """Sets them until `release`. A second call changes nothing."""

    def release(self) -> None:
        """Undoes `take`, in the same thread; without `take`, nothing."""

    def near(self) -> AbstractContextManager[None]:
        """Places host memory that is first written to inside near these cores."""
        return nullcontext()

    def touch(self, flat: torch.Tensor) -> None:
        """Writes to fresh host memory of zeros from these cores."""


class ShareOfCores(HostCores):
    """`threads` for every step, on any cores."""

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
    """`threads` for every step on some cores only, with memory near to them.

    Args:
        numbers: of the cores; the calling process may run on all of them.
    """

    def __init__(self, threads: int, numbers: frozenset[int]):
        super().__init__(threads)
        self.numbers = numbers
        self._numbers_before: set[int] | None = None

    def enter(self) -> None:
        # First: helpers inherit it. 0 is the calling thread, not the process.
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
        """A page belongs to the node of the core that first writes to it."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.numbers)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def touch(self, flat: torch.Tensor) -> None:
        with self.near():
            # By numpy, since torch would have helpers write.
            flat.view(torch.uint8).numpy()[::PAGE_BYTES] = 0


def choose_host_cores(device: torch.device, system: Path = SYSTEM) -> HostCores:
    """Chooses the cores for host steps of a rank that trains on `device`.

    Threads are torch's own number where training is on the CPU, whose cores launchers share out among ranks. Beside an
    accelerator they give each rank one thread unless told otherwise, and host steps need the rank's part of the cores.

    Args:
        system: where /sys is.
    """
    ranks, knows_cores = ranks_on_this_host(), hasattr(os, "sched_getaffinity")
    allowed = frozenset(os.sched_getaffinity(0) if knows_cores else range(os.cpu_count() or 1))
    local_rank, place = int(os.environ.get("LOCAL_RANK", "0")), pci_address(device)
    numbers = None
    if knows_cores:
        numbers = near_cores(allowed, pci_address=place, local_rank=local_rank, ranks=ranks, system=system)
    fair = torch.get_num_threads() if device.type == "cpu" else max(1, len(allowed) // ranks)
    if numbers is not None:
        # More threads than the node has cores would take turns there.
        return NodeCores(min(fair, len(numbers)), numbers)
    return HostCores(fair) if device.type == "cpu" else ShareOfCores(fair)
