"""Read-ahead of memory-mapped files."""

import mmap

import torch

from .allocation import advise

# When a mapped page is first touched, Linux reads its surroundings up to the disk's read-ahead size (8 MiB on cloud disks). In a
# file shared by ranks, most of these bytes belong to other ranks. So such files are mapped without read-ahead (MADV_RANDOM), and
# each rank requests its own part as a whole before reading.

_ASKED_BYTES = 128 << 10
"""Bytes for one call. For more than the disk's read-ahead size (by default 128 KiB), Linux reads the beginning only."""


def ask_for(values: torch.Tensor) -> None:
    """Asks the system to start reading the pages of these values, for values in a mapped file."""
    if values.device.type != "cpu" or not values.is_contiguous() or not values.nbytes:
        return
    # madvise requires an address at the start of a page.
    begin = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = values.data_ptr() + values.nbytes
    for start in range(begin, end, _ASKED_BYTES):
        # The system may ignore this advice. Pages are then read one at a time.
        advise(start, min(_ASKED_BYTES, end - start), mmap.MADV_WILLNEED)
