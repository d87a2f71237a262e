"""A mapped file gives up the pages that are asked for, and no more of the disk is read than those."""

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_zero.checkpoint.files import CheckpointError
from hf_zero.checkpoint.pieces import mapped_tensors
from hf_zero.device import ask_for

NUMEL = 8 << 20
"""Elements of the file: 32 MiB, more than any disk's read-ahead."""


def forgotten_file(folder: Path) -> Path:
    path = folder / "weights.safetensors"
    save_file({"weight": torch.arange(NUMEL, dtype=torch.float32)}, path)
    handle = os.open(path, os.O_RDWR)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    return path


def bytes_in_memory(values: torch.Tensor) -> int:
    """Of the pages on which a mapped tensor lies, those that have been read."""
    begin = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = values.data_ptr() + values.nbytes - begin
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def far(tmp_path):
    """The second half of the file, where no reading of its header comes to."""
    values = mapped_tensors(forgotten_file(tmp_path))["weight"][NUMEL // 2 :]
    assert bytes_in_memory(values) == 0
    return values


def test_single_values_cost_a_page_each(far):
    at = torch.arange(0, len(far), len(far) // 16)
    assert torch.equal(far[at], NUMEL // 2 + at.float())
    assert 0 < bytes_in_memory(far) <= 16 * mmap.PAGESIZE


def test_what_is_asked_for_is_read_and_what_lies_beside_it_is_not(far):
    own = far[len(far) // 4 : len(far) // 2]
    ask_for(own)
    assert torch.equal(own, own[0] + torch.arange(len(own), dtype=torch.float32))
    assert 0 < bytes_in_memory(far) <= own.nbytes + 2 * mmap.PAGESIZE


def test_all_that_is_asked_for_comes_without_being_touched(far):
    ask_for(far)
    until_s = time.monotonic() + 20
    while bytes_in_memory(far) < far.nbytes and time.monotonic() < until_s:
        time.sleep(0.01)
    assert bytes_in_memory(far) >= far.nbytes


@pytest.mark.parametrize("values", [torch.ones(3), torch.empty(0), torch.ones(4, 4).t()], ids=["3", "none", "strided"])
def test_memory_of_other_kinds_keeps_its_values(values):
    ask_for(values)
    assert torch.equal(values, torch.ones_like(values))


def test_tensors_have_their_shapes_and_values_and_a_damaged_file_is_refused(tmp_path):
    tensors = {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2, dtype=torch.int64),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    mapped = mapped_tensors(path)
    assert mapped.keys() == tensors.keys()
    assert all(
        torch.equal(mapped[name], tensors[name]) and mapped[name].dtype == tensors[name].dtype for name in tensors
    )
    mapped["matrix"].zero_()
    assert torch.equal(load_file(path)["matrix"], tensors["matrix"])
    for size in (path.stat().st_size - 1, 4, 0):
        os.truncate(path, size)
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .*header"):
            mapped_tensors(path)
