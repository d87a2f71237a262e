"""Memory that a rank may still take."""

import os
import resource
from pathlib import Path

import torch

from ...device import free_bytes
from ...offload.budget import available_host_bytes, ranks_on_this_host
from ...plan.room import RESERVE

_STATUS = Path("/proc/self/status")
_LIMITED = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))


def free_for_training(device: torch.device) -> int:
    """Bytes that this rank could still allocate on its training device; on the host, its part of what is left there.

    On the host that is the least of what the system has, of what a control group leaves, and of the process's own limits.
    """
    if device.type != "cpu":
        return free_bytes(device)
    return min(available_host_bytes() // ranks_on_this_host(), _within_limits())


def free_on_host() -> int:
    """This rank's part of the host's memory, for what is offloaded from an accelerator."""
    return min(available_host_bytes() // ranks_on_this_host(), _within_limits())


def reserve_on(device: torch.device) -> float:
    """The part of a training device that a set-up which fits leaves free, by what this process's allocator gives back."""
    if device.type != "cpu":
        return RESERVE["accelerator"]
    return RESERVE["host" if "MALLOC_MMAP_THRESHOLD_" in os.environ else "host's heap"]


def _within_limits() -> int:
    """What the process's own limits leave."""
    left = 2**63 - 1
    used = _used() if _STATUS.is_file() else {}
    for limit, name in _LIMITED:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and name in used:
            left = min(left, max(0, soft - used[name]))
    return left


def _used() -> dict[str, int]:
    lines = (line.partition(":") for line in _STATUS.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if name.startswith("Vm")}
