"""A mapped file gives up the pages that are asked for, and no more of the disk is read than those."""

import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_zero.read_ahead import ask_for, read_as_asked

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


def bytes_read() -> int:
    """From disks, on behalf of this process; a file system in memory counts none."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def test_single_values_cost_a_page_each(tmp_path):
    with safe_open(forgotten_file(tmp_path), framework="pt") as file:
        values = file.get_tensor("weight")
        read_as_asked(values)
        before = bytes_read()
        at = torch.arange(0, NUMEL, NUMEL // 16)
        assert torch.equal(values[at], at.float())
        assert bytes_read() - before <= 17 * mmap.PAGESIZE


def test_what_is_asked_for_is_read_and_what_lies_beside_it_is_not(tmp_path):
    with safe_open(forgotten_file(tmp_path), framework="pt") as file:
        values = file.get_tensor("weight")
        read_as_asked(values)
        before = bytes_read()
        own = values[NUMEL // 4 : NUMEL // 2]
        ask_for(own)
        assert torch.equal(own, torch.arange(NUMEL // 4, NUMEL // 2, dtype=torch.float32))
        assert bytes_read() - before <= own.nbytes + 2 * mmap.PAGESIZE


@pytest.mark.parametrize("values", [torch.ones(3), torch.empty(0), torch.ones(4, 4).t()], ids=["3", "none", "strided"])
def test_memory_of_other_kinds_keeps_its_values(values):
    read_as_asked(values)
    ask_for(values)
    assert torch.equal(values, torch.ones_like(values))
