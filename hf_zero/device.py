"""One interface to host and accelerators: indices, the current device, free and peak memory."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal
from pathlib import Path

import psutil
import torch
from torch.utils.dlpack import to_dlpack

ACCELERATORS = ("cuda", "xpu", "npu", "hpu", "mlu", "musa")
"""Modules of torch for accelerators: NVIDIA and AMD (`cuda`), Intel, Ascend, Gaudi, Cambricon and Moore Threads."""


def accelerators() -> tuple[str, int]:
    """Returns the kind of this machine's accelerators and their number; ("cpu", 0) without any."""
    for kind in ACCELERATORS:
        # A package such as torch_npu adds its module when torch is imported.
        module = getattr(torch, kind, None)
        # A driver too old for this torch still counts devices.
        if module is not None and module.is_available():
            return kind, module.device_count()
    return "cpu", 0


def with_index(device: torch.device) -> torch.device:
    """Adds the index to `device`: "cuda" becomes the current device of its type."""
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes `device` the calling thread's current device inside the context.

    torch's operators use the device of their tensors. Streams and events without an explicit device, launches of Triton kernels
    and calls to the driver use the current device, and create a context there that needs hundreds of MB.
    """
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def enter_thread(device: torch.device) -> None:
    """Makes `device` the calling thread's current device permanently. A new thread starts with the first device."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def alias(view: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the memory of `view` whose storage has exactly its extent, and keeps the memory alive.

    Saving functions work on storages: `torch.save` of a plain view writes the whole buffer, and safetensors treats views of one
    buffer as tied weights and drops all but one.
    """
    # Export a capsule, because a tensor exports itself only on the current device.
    return torch.from_dlpack(to_dlpack(view.detach()))


def pci_address(device: torch.device) -> str | None:
    """Returns an accelerator's bus address, such as "0000:3b:00.0"; None for the host, or if torch has no address."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    names = [f"pci_{name}_id" for name in ("domain", "bus", "device")]
    if not all(hasattr(found, name) for name in names):
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*(getattr(found, name) for name in names))


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of the process: of the allocator on an accelerator, of the resident set on the host."""
    if device.type == "cpu":
        status = Path("/proc/self/status")
        # Some systems have the file without this line.
        highest = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
        if highest is not None:
            return int(highest[1]) * 1024
        return psutil.Process().memory_info().rss
    return torch.get_device_module(device).max_memory_allocated(device)


def allocated_bytes(device: torch.device) -> int:
    """Returns the bytes that this process has allocated on an accelerator; 0 on the host."""
    return 0 if device.type == "cpu" else torch.get_device_module(device).memory_allocated(device)


_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def available_host_bytes(cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """Returns the bytes still available to the processes of this host, by the system or a stricter cgroup.

    Args:
        cgroup: mount point of the control groups.
        membership: file that names the control groups of this process.
    """
    # In a container, the system's figure is the host's, but the job is killed at the control group's limit.
    return min([psutil.virtual_memory().available, *_left_by_groups(cgroup, membership)])


def _left_by_groups(cgroup: Path, membership: Path) -> Iterator[int]:
    """Yields the free bytes of each memory group of this process, versions 2 and 1. Groups nest, and each limit applies."""
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container, the path may belong to the host, and only the root is visible.
        below = root / path.lstrip("/")
        for folder in (below, *below.parents):
            limit, used = _number_in(folder / names[0]), _number_in(folder / names[1])
            if folder.is_relative_to(root) and limit is not None and used is not None:
                # A recently read checkpoint counts as used until the group needs the memory and the system drops the cached
                # pages.
                cached = _number_in(folder / "memory.stat", rf"^{names[2]} (\d+)$") or 0
                yield max(0, limit - used + cached)


def _number_in(path: Path, pattern: str = r"^(\d+)$") -> int | None:
    """Reads a number on its own line; None if there is no file or no limit ("max")."""
    found = re.search(pattern, path.read_text(), re.MULTILINE) if path.is_file() else None
    return int(found[1]) if found else None


def ranks_on_this_host() -> int:
    """Returns the number of ranks sharing this host's memory, from the launcher's variables."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_bytes(device: torch.device) -> int:
    """Returns the bytes still available to this process on its device; on the host, an equal part for each rank."""
    if device.type == "cpu":
        # The ranks of a host call this at about the same time, and each would count on all free memory.
        return available_host_bytes() // ranks_on_this_host()
    free, _ = torch.get_device_module(device).mem_get_info(device)
    # torch's allocator keeps freed memory, which is free for this process.
    reserved = torch.get_device_module(device).memory_reserved(device)
    return free + reserved - torch.get_device_module(device).memory_allocated(device)


def rounded(value: float, digits: int = 3) -> str:
    """Formats a number with this many significant digits and without an exponent: 1880, 190, 1.9, 0.0019."""
    return f"{Decimal(f'{value:.{digits}g}'):f}"


def in_units(nbytes: int) -> str:
    """Formats bytes: MiB with one decimal, GiB from ten GiB on, KiB or bytes below one MiB."""
    for least, unit_bytes, unit in ((10 * 2**30, 2**30, "GiB"), (2**20, 2**20, "MiB"), (2**10, 2**10, "KiB")):
        if nbytes >= least:
            return f"{nbytes / unit_bytes:,.1f} {unit}"
    return f"{nbytes} B" if nbytes else "0"
