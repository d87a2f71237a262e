"""What the host's memory of a bucket keeps when the part that passes is given back."""

import mmap
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from resident import resident_in

from hf_zero import device as devices
from hf_zero.device import allocate, pin, reserve, unpin

NUMEL = int(9.5 * (2 << 20) // 4)
QUARTER = NUMEL // 4


@pytest.mark.parametrize("rank", range(4))
def test_a_released_bucket_keeps_only_the_shards_pages_whichever_rank_has_them(rank):
    kept = slice(rank * QUARTER, (rank + 1) * QUARTER)
    reservation = reserve(NUMEL, torch.float32, torch.device("cpu"), kept)
    region = reservation._arena._region
    start = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    reservation.flat.fill_(1.0)
    reservation.release()
    held_bytes = resident_in([(start, start + len(region))])
    # A shard begins and ends within a page; the last one's tail may lie on a huge page that it fills to three quarters.
    assert held_bytes <= 4 * QUARTER + 2 * mmap.PAGESIZE + ((2 << 20) // 4 if rank == 3 else 0)
    assert torch.all(reservation.own == 1.0)


def is_left_out_of_forks(tensor: torch.Tensor) -> bool:
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, stop = (int(end, 16) for end in area.partition(" ")[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return " dc " in re.search("VmFlags:(.*)", area)[1] + " "
    raise AssertionError("the tensor is in no area")


@pytest.mark.parametrize("nbytes", [100, 5 << 20])
def test_pinned_pages_are_left_out_of_forks_until_they_are_unpinned(nbytes, monkeypatch):
    driver = SimpleNamespace(cudaHostRegister=lambda *where: 0, cudaHostUnregister=lambda where: 0)
    monkeypatch.setattr(devices, "_runtime", lambda device: driver)
    monkeypatch.setattr(devices, "current", lambda device: nullcontext())
    memory, accelerator = allocate(nbytes, torch.uint8, torch.device("cpu")), torch.device("cuda", 0)
    assert not is_left_out_of_forks(memory)
    assert pin(memory, accelerator) and is_left_out_of_forks(memory)
    unpin(memory, accelerator)
    assert not is_left_out_of_forks(memory)
