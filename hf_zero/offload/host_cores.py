"""The cores that host steps run on: how many threads of a step, and where."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from ..device import PAGE_BYTES, pci_address
from .budget import ranks_on_this_host
from .numa import SYSTEM, near_cores


class HostCores:
    """The script's own where the script's thread steps, and `threads` of them where a thread of hf_zero's does.

    [Note: whose threads step]
    A step beside training runs in a thread of hf_zero's own, which `enter`s once, for good. A step that the script's
    thread takes (`optimizer.step()`) borrows that thread: `take` before, `give_back` behind, and nothing is left of it.

    Either one has helpers, which torch's OpenMP makes when a loop first wants them, with the number and the cores that the
    asking thread has then. Launchers leave a rank beside an accelerator one thread, so that its first helpers are made within
    a step, and stay. Helpers that the script's thread has had before (training on the CPU) stay where they are, since they
    cannot be reached from here; there a launcher has to bind the process.
    """

    def __init__(self, threads: int):
        self.threads = threads

    def enter(self) -> None:
        """Has the calling thread's operations run so from now on."""
        # torch takes the process's number into each thread at its first question, and would do so after this.
        torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def take(self) -> None:
        """Has the calling thread's operations run so until `give_back`. A second call changes nothing."""

    def give_back(self) -> None:
        """Undoes `take`; without one, nothing. To be called in the same thread."""

    def near(self) -> AbstractContextManager[None]:
        """Host memory that is first written to inside lies where these cores reach it fastest."""
        return nullcontext()

    def touch(self, flat: torch.Tensor) -> None:
        """Called with fresh host memory of zeros, which these cores will step on."""


class ShareOfCores(HostCores):
    """`threads` for every step, on whichever cores the system gives them."""

    def __init__(self, threads: int):
        super().__init__(threads)
        self._threads_before: int | None = None

    def take(self) -> None:
        if self._threads_before is None:
            self._threads_before = torch.get_num_threads()
            self.enter()

    def give_back(self) -> None:
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None


class NodeCores(ShareOfCores):
    """The same on some cores only, with memory near to them.

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

    def give_back(self) -> None:
        super().give_back()
        if self._numbers_before is not None:
            os.sched_setaffinity(0, self._numbers_before)
            self._numbers_before = None

    @contextmanager
    def near(self) -> Iterator[None]:
        """A page lies on the node of the core that first writes to it."""
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
    """The cores of the host steps of a rank that trains on `device`.

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
        return NodeCores(min(fair, len(numbers)), numbers)
    return HostCores(fair) if device.type == "cpu" else ShareOfCores(fair)
