"""The thread on which steps run beside training."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from ...device import allocate, enter_thread
from ...offload.host_cores import HostCores

_HOST = torch.device("cpu")
_Result = TypeVar("_Result")


class StepThread:
    """One thread, so that steps follow each other, with its own number of CPU threads for torch's operations.

    Args:
        cores: that those run on.
        device: of the gradients that it waits for.
    """

    def __init__(self, cores: HostCores, device: torch.device):
        enter = partial(enter_thread, device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_zero-step", initializer=enter)
        self._scratch: torch.Tensor | None = None
        before = torch.get_num_threads()
        self._thread.submit(cores.enter).result()
        # What a thread sets for itself is what threads that start later have too, until another sets it.
        torch.set_num_threads(before)

    def submit(self, call: Callable[..., _Result], *arguments) -> Future[_Result]:
        return self._thread.submit(call, *arguments)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 for the call that runs: some optimizers write into their gradients."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = allocate(nbytes, torch.uint8, _HOST)
        return self._scratch[:nbytes]

    @property
    def scratch_bytes(self) -> int:
        """What `scratch` has come to hold."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def close(self) -> None:
        """Returns when what was submitted has ended."""
        self._thread.shutdown()
