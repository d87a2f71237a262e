"""Bytes of tensors in memory, from the kernel's page map."""

import gc
import mmap
from array import array

import torch


def resident_bytes(tensors: list[torch.Tensor]) -> int:
    """Returns the bytes of the tensors in memory, in whole pages, from the kernel's page map."""
    return resident_in([(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors])


def resident_in(spans: list[tuple[int, int]]) -> int:
    """Returns the bytes in memory of (first, last + 1) addresses."""
    resident, page_bytes = 0, mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as pagemap:
        for start, stop in spans:
            first = start // page_bytes
            pagemap.seek(8 * first)
            present = sum(entry >> 63 for entry in array("Q", pagemap.read(8 * (-(-stop // page_bytes) - first))))
            resident += min(page_bytes * present, stop - start)
    return resident


def living_tensors() -> list[torch.Tensor]:
    """Returns all tensors known to Python in this process."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def covered_spans(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns the addresses of contiguous tensors; memory shared by several counts once."""
    spans: list[tuple[int, int]] = []
    for start, stop in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return spans
