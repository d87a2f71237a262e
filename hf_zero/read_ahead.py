"""Memory-mapped files whose readers say what they will read, where the system would guess.

Linux answers a first touch of a mapped page by reading what lies around it, up to the disk's read-ahead size (8 MiB on cloud
disks). Of a file that ranks share out, most of that is another rank's.
"""

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)


def read_as_asked(values: torch.Tensor) -> None:
    """From now on, a touch of these values, of a tensor in a mapped file, reads the page that is touched and no other."""
    _advise(values, mmap.MADV_RANDOM)


def ask_for(values: torch.Tensor) -> None:
    """Has the system begin to read the pages of these values, if they lie in a mapped file."""
    _advise(values, mmap.MADV_WILLNEED)


def _advise(values: torch.Tensor, advice: int) -> None:
    if values.device.type != "cpu" or not values.is_contiguous() or not values.nbytes:
        return
    begin = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = values.data_ptr() + values.nbytes - begin
    # Advice: where the system has none to take, it reads as it did.
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), advice)
