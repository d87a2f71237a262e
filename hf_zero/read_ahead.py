"""What is asked of the system before it is read from a memory-mapped file, where the system would guess.

Linux answers a first touch of a mapped page by reading what lies around it, up to the disk's read-ahead size (8 MiB on cloud
disks). Of a file that ranks share out, most of that is another rank's; so such files are mapped without it (MADV_RANDOM), and
what is about to be read is asked for as a whole.
"""

import ctypes
import mmap

import torch

_ASKED_BYTES = 128 << 10
"""In one call: of more than the disk's read-ahead size, which is 128 KiB unless it is set, Linux reads the beginning alone."""

_libc = ctypes.CDLL(None, use_errno=True)


def ask_for(values: torch.Tensor) -> None:
    """Has the system begin to read the pages of these values, if they lie in a mapped file."""
    if values.device.type != "cpu" or not values.is_contiguous() or not values.nbytes:
        return
    begin = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = values.data_ptr() + values.nbytes
    for start in range(begin, end, _ASKED_BYTES):
        # Advice: where the system takes none, it reads a page at a time.
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(min(_ASKED_BYTES, end - start)), mmap.MADV_WILLNEED)
