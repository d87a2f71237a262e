"""Allocation of flat tensors, whose memory returns to the system or the allocator when freed."""

import ctypes
import mmap
from abc import ABC, abstractmethod

import torch

PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Calls `madvise` for memory from the start of a page on. Not all advice has to be followed, so errors are ignored."""
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def page_below(nbytes: int) -> int:
    return nbytes // PAGE_BYTES * PAGE_BYTES


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a flat tensor of `numel` elements, base aligned to 256 bytes, zero on the host and undefined elsewhere.

    On the host, each tensor has its own mapping, so dropping the last reference returns the memory to the system.
    """
    if device.type == "cpu":
        return HostReservation(numel, dtype, kept=slice(0, 0)).flat
    return torch.empty(numel, dtype=dtype, device=device)


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
        separate_own: `own` has separate memory, and all pages are freed.
    """

    def __init__(self, numel: int, dtype: torch.dtype, kept: slice, *, separate_own: bool = False):
        size, nbytes = dtype.itemsize, numel * dtype.itemsize
        own = slice(0, 0) if separate_own else slice(kept.start * size, kept.stop * size)
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
            start = page_below(self._offset)
            # A tail smaller than its huge page uses small pages, which need less memory and no more time.
            spare = -(self._offset + everything.data_ptr() + nbytes) % _HUGE_PAGE_BYTES
            self._end += spare if spare < _HUGE_PAGE_BYTES // 4 else 0
            self._region.madvise(mmap.MADV_HUGEPAGE, start, self._end - start)
        self.flat = everything[self._offset : self._offset + nbytes].view(dtype)
        self.in_place = not separate_own
        self.own = allocate(kept.stop - kept.start, dtype, torch.device("cpu")) if separate_own else self.flat[kept]
        self._passing = [(0, own.start), (own.stop, nbytes)]

    def restore(self) -> None:
        """Does nothing, because pages are allocated by their first write."""

    def release(self) -> None:
        """Frees whole pages, which contain zeros afterwards."""
        for start, stop in self._passing:
            # Free only pages without elements of `own`; otherwise these elements would become zero.
            first = page_below(self._offset + start + PAGE_BYTES - 1)
            # There is nothing after the end, in the last page and in a huge page.
            last = page_below(self._end + PAGE_BYTES - 1 if stop == self.flat.nbytes else self._offset + stop)
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


def reserve(
    numel: int, dtype: torch.dtype, device: torch.device, kept: slice, *, separate_own: bool = False
) -> Reservation:
    """Allocates a flat tensor of `numel` elements whose elements outside `kept` can be released.

    Views must be made before the first `release`, because torch cannot make views of a storage without memory.

    Args:
        separate_own: `own` is outside of `flat` on every device, so the two may hold different values.
    """
    if device.type == "cpu":
        return HostReservation(numel, dtype, kept, separate_own=separate_own)
    return ResizedReservation(numel, dtype, kept, device)
