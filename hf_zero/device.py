"""Devices: streams, events, host memory and its pages, free and peak memory."""

import ctypes
import mmap
import os
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.dlpack import to_dlpack

# ---- Read-ahead of memory-mapped files ----
#
# When a mapped page is first touched, Linux reads its surroundings up to the disk's read-ahead size (8 MiB on cloud disks). In a
# file shared by ranks, most of these bytes belong to other ranks. So such files are mapped without read-ahead (MADV_RANDOM), and
# each rank requests its own part as a whole before reading.

_ASKED_BYTES = 128 << 10
"""Bytes for one call. For more than the disk's read-ahead size (by default 128 KiB), Linux reads the beginning only."""

_libc = ctypes.CDLL(None, use_errno=True)


def ask_for(values: torch.Tensor) -> None:
    """Asks the system to start reading the pages of these values, for values in a mapped file."""
    if values.device.type != "cpu" or not values.is_contiguous() or not values.nbytes:
        return
    # madvise requires an address at the start of a page.
    begin = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = values.data_ptr() + values.nbytes
    for start in range(begin, end, _ASKED_BYTES):
        # The system may ignore this advice. Pages are then read one at a time.
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(min(_ASKED_BYTES, end - start)), mmap.MADV_WILLNEED)


# ---- One interface to host and accelerators: allocation, which returns memory to the system, and memory in use ----

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


PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 2 << 20


def _page_below(nbytes: int) -> int:
    return nbytes // PAGE_BYTES * PAGE_BYTES


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a flat tensor of `numel` elements, base aligned to 256 bytes, zero on the host and undefined elsewhere.

    On the host, each tensor has its own mapping, so dropping the last reference returns the memory to the system.
    """
    if device.type == "cpu":
        return HostReservation(numel, dtype, kept=slice(0, 0)).flat
    return torch.empty(numel, dtype=dtype, device=device)


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


def _runtime(device: torch.device) -> Any | None:
    """Returns CUDA's runtime, or the equivalent of another accelerator; None without one."""
    module = torch.get_device_module(device)
    return module.cudart() if hasattr(module, "cudart") else None


def pin(tensor: torch.Tensor, device: torch.device) -> bool:
    """Locks a host tensor's pages for direct copies to and from `device`. Call `unpin` before the pages are freed.

    Returns:
        False if `device` needs no pinning.

    Raises:
        RuntimeError: the system refuses to lock that much memory.
    """
    runtime = _runtime(device)
    if runtime is None:
        return False
    with current(device):
        code = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code != 0:
        raise RuntimeError(
            f"hf_zero: {tensor.nbytes} bytes of host memory cannot be pinned (CUDA error {code}). Raise the limit of locked "
            "memory (ulimit -l), or offload less."
        )
    # After a fork, for example of a data loader's workers, the next write to a page would copy the page. The device would
    # continue to use the old page, and the process would use the copy.
    _advise(tensor, "MADV_DONTFORK")
    return True


def unpin(tensor: torch.Tensor, device: torch.device) -> None:
    """Undoes a successful `pin`."""
    runtime = _runtime(device)
    if runtime is not None:
        with current(device):
            runtime.cudaHostUnregister(tensor.data_ptr())
        _advise(tensor, "MADV_DOFORK")


def _advise(tensor: torch.Tensor, advice: str) -> None:
    """Advises the system about the pages of a tensor; does nothing except on Linux."""
    if hasattr(mmap, advice):
        start = _page_below(tensor.data_ptr())
        nbytes = _page_below(tensor.data_ptr() + tensor.nbytes + PAGE_BYTES - 1) - start
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), getattr(mmap, advice))


def pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocates host memory (uint8) of exactly this size, pinned (with an accelerator) while any view exists.

    torch's pinned allocator rounds up to a power of two and keeps freed memory. This function frees at once, and does not track
    copies: drop the tensor only after copies from and to it have finished.
    """
    memory = allocate(nbytes, torch.uint8, torch.device("cpu"))
    if not nbytes or device.type == "cpu" or not pin(memory, device):
        return memory
    views = (ctypes.c_uint8 * nbytes).from_address(memory.data_ptr())
    # The callback keeps the mapping alive until the pages are unpinned, because pages must not be freed earlier. `atexit` is
    # False because nothing must be freed when the process ends, and copies may still be running.
    weakref.finalize(views, unpin, memory, device).atexit = False
    return torch.frombuffer(views, dtype=torch.uint8)


class PinnedPool:
    """Host memory (uint8) of exact sizes, pinned if there is an accelerator, and reused when its last view is gone.

    Use it only for copies in one queue, which run in order, because a copy may still run when its memory is reused.

    Attributes:
        nbytes: bytes of all memory of the pool.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes` (above 0) of memory. Without an accelerator, each call allocates new memory."""
        if self._device.type == "cpu":
            return pinned(nbytes, self._device)
        free = self._free.setdefault(nbytes, [])
        if not free:
            free.append(pinned(nbytes, self._device))
            self.nbytes += nbytes
        memory = free.pop()
        views = (ctypes.c_uint8 * nbytes).from_address(memory.data_ptr())
        # Reuse after the last view is gone, not after the caller's reference, because a view may still be copying.
        weakref.finalize(views, free.append, memory).atexit = False
        return torch.frombuffer(views, dtype=torch.uint8)


def passing_host_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocates host memory (uint8), aligned for direct I/O, for copies to or from `device`.

    With an accelerator it is pinned by torch's allocator, which keeps a block until copies from it have finished.
    """
    if device.type == "cpu":
        return allocate(nbytes, torch.uint8, device)
    exact = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if exact.data_ptr() % PAGE_BYTES == 0:
        return exact
    # Small blocks may share a page. Adding a page to all blocks would double blocks of 2^n bytes.
    spacious = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    return spacious[-spacious.data_ptr() % PAGE_BYTES :][:nbytes]


class Reservation(ABC):
    """A flat tensor. The memory of one interval is permanent; the other memory is allocated and freed repeatedly.

    Views of `flat` stay valid objects, and see the same memory again after each `restore`. Between `release` and `restore`, only
    `own` has contents.

    Attributes:
        flat: (numel,), to be read only between `restore` and `release`.
        own: elements of the permanent interval. A part of `flat` if `in_place`, otherwise separate memory.
    """

    flat: torch.Tensor
    own: torch.Tensor
    in_place: bool

    @abstractmethod
    def restore(self) -> None:
        """Allocates the memory of `flat`. Values outside `own` are undefined afterwards."""

    @abstractmethod
    def release(self) -> None:
        """Frees the memory of `flat` except the memory of `own`."""


class HostReservation(Reservation):
    """Pages of one anonymous mapping. Addresses never change, so a stale pointer cannot crash the process.

    Freed pages return to the system, while glibc keeps blocks below 32 MiB in the process. Large mappings use huge pages, whose
    page faults cost a fifth of those of small pages.

    Args:
        apart: `own` has separate memory, and all pages are freed.
    """

    def __init__(self, numel: int, dtype: torch.dtype, kept: slice, *, apart: bool = False):
        size, nbytes = dtype.itemsize, numel * dtype.itemsize
        own = slice(0, 0) if apart else slice(kept.start * size, kept.stop * size)
        huge = nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
        slack = 2 * _HUGE_PAGE_BYTES if huge else 0
        # At least one page, because the system maps no empty region. The slack is for the offset and the tail, each smaller than
        # a huge page.
        self._region = mmap.mmap(-1, max(nbytes, PAGE_BYTES) + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        everything = torch.frombuffer(self._region, dtype=torch.uint8)
        # `own` starts or ends at the start of a huge page, so the memory next to this boundary is freed in whole huge pages.
        boundary = own.stop if own.stop < nbytes else own.start
        self._offset = (-everything.data_ptr() - boundary) % _HUGE_PAGE_BYTES if huge else 0
        self._end = self._offset + nbytes
        if huge:
            start = _page_below(self._offset)
            # A tail smaller than its huge page uses small pages, which need less memory and no more time.
            spare = -(self._offset + everything.data_ptr() + nbytes) % _HUGE_PAGE_BYTES
            self._end += spare if spare < _HUGE_PAGE_BYTES // 4 else 0
            self._region.madvise(mmap.MADV_HUGEPAGE, start, self._end - start)
        self.flat = everything[self._offset : self._offset + nbytes].view(dtype)
        self.in_place = not apart
        self.own = allocate(kept.stop - kept.start, dtype, torch.device("cpu")) if apart else self.flat[kept]
        self._passing = [(0, own.start), (own.stop, nbytes)]

    def restore(self) -> None:
        """Does nothing, because pages are allocated by their first write."""

    def release(self) -> None:
        """Frees whole pages, which contain zeros afterwards."""
        for start, stop in self._passing:
            # Free only pages without elements of `own`; otherwise these elements would become zero.
            first = _page_below(self._offset + start + PAGE_BYTES - 1)
            # There is nothing after the end, in the last page and in a huge page.
            last = _page_below(self._end + PAGE_BYTES - 1 if stop == self.flat.nbytes else self._offset + stop)
            if last > first:
                self._region.madvise(mmap.MADV_DONTNEED, first, last - first)


class ResizedReservation(Reservation):
    """A storage resized to nothing and back through the device's allocator. Tensors saved by autograd share the storage."""

    in_place = False

    def __init__(self, numel: int, dtype: torch.dtype, kept: slice, device: torch.device):
        self.own = torch.empty(kept.stop - kept.start, dtype=dtype, device=device)
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._storage, self._nbytes = self.flat.untyped_storage(), self.flat.nbytes

    def restore(self) -> None:
        self._storage.resize_(self._nbytes)

    def release(self) -> None:
        self._storage.resize_(0)


def reserve(numel: int, dtype: torch.dtype, device: torch.device, kept: slice, *, apart: bool = False) -> Reservation:
    """Allocates a flat tensor of `numel` elements whose elements outside `kept` can be released.

    Views must be made before the first `release`, because torch cannot make views of a storage without memory.

    Args:
        apart: `own` is outside of `flat` on every device, so the two may hold different values.
    """
    if device.type == "cpu":
        return HostReservation(numel, dtype, kept, apart=apart)
    return ResizedReservation(numel, dtype, kept, device)


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


def in_units(nbytes: int) -> str:
    """Formats bytes: MiB with one decimal, GiB from ten GiB on, KiB or bytes below one MiB."""
    for least, unit_bytes, unit in ((10 * 2**30, 2**30, "GiB"), (2**20, 2**20, "MiB"), (2**10, 2**10, "KiB")):
        if nbytes >= least:
            return f"{nbytes / unit_bytes:,.1f} {unit}"
    return f"{nbytes} B" if nbytes else "0"
