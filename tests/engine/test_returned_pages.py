"""What the host's memory of a bucket keeps when the part that passes is given back."""

import mmap

import pytest
import torch
from resident import resident_in

from hf_zero.device import reserve

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
