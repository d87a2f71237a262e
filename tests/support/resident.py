"""Bytes of tensors that are in memory, by the kernel's page map."""

import mmap
from array import array

import torch


def resident_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the tensors that are in memory, in whole pages, by the kernel's page map."""
    return resident_in([(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors])


def resident_in(spans: list[tuple[int, int]]) -> int:
    """The same of (first, last + 1) addresses."""
    resident, page_bytes = 0, mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as pagemap:
        for start, stop in spans:
            first = start // page_bytes
            pagemap.seek(8 * first)
            present = sum(entry >> 63 for entry in array("Q", pagemap.read(8 * (-(-stop // page_bytes) - first))))
            resident += min(page_bytes * present, stop - start)
    return resident
