"""How much host memory is pinned beside an accelerator: what is needed there, and no power of two of it."""

import gc
from pathlib import Path

import pytest
import standin_device
import torch
from cells import slow
from ranks import run_ranks
from shared_ranks import on_ranks
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.device import PAGE_BYTES, PinnedPool, pinned
from hf_zero.engine.engine import ZeroEngine
from hf_zero.offload.copies import PART_BYTES

pytestmark = [pytest.mark.timeout(150), standin_device.needs_compiler]


HOST = {"optimizer": "cpu", "speculate_bytes": 0}


def pinned_bytes(rank: int, world_size: int, library: Path, folder: str) -> list[tuple[str, int, int, int]]:
    """For each way to train: its name, what is pinned after some steps, what masters and gradients take, and sums at most."""
    compiled = standin_device.register(library)
    found = []
    with standin_device.process_group(rank, world_size, folder):
        for stage in (2, 3):
            for dtype in (torch.float32, torch.bfloat16):
                gc.collect()
                before = compiled.pinned()
                torch.manual_seed(0)
                model = gpt2().to(standin_device.NAME, dtype)
                optimizer = fused_adamw(model)
                settings = {"stage": stage, "offload": HOST, "bucket_bytes": "20KiB"}
                engine = ZeroEngine(model, [optimizer], settings)
                for step in range(2):
                    for micro in range(2):
                        batch = gpt2_batch(torch.Generator().manual_seed(2 * step + micro), 2)
                        model(
                            **{name: values.to(standin_device.NAME) for name, values in batch.items()}
                        ).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                shards = sum(bucket.layout.shard_numel for bucket in engine.buckets)
                name = f"stage {stage}, {dtype}"
                found.append((name, compiled.pinned() - before, shards * (4 + 4), shards * dtype.itemsize))
                engine.close()
                del engine, optimizer, model
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_pinned_memory_is_that_of_masters_and_gradients(world_size, library, tmp_path):
    arguments = {"library": library, "folder": str(tmp_path)}
    for found in run_ranks(pinned_bytes, world_size=world_size, time_limit_s=100, keyword_arguments=arguments):
        for name, there, needed, sums in found:
            # Numbers that the host reads are pinned too.
            passing = 2 * PART_BYTES if "bfloat16" in name else 0
            assert needed <= there - passing <= needed + sums + PAGE_BYTES, name


@on_ranks(1)
def test_pinned_memory_is_given_back_or_out_again_when_its_last_view_has_gone(rank, world_size, library):
    compiled = standin_device.register(library)
    device = torch.device(standin_device.NAME, 0)
    view = pinned(5000, device)[100:200].view(torch.float32)
    assert compiled.pinned() == 5000
    del view
    assert compiled.pinned() == 0
    pool = PinnedPool(device)
    one, other = pool.take(5000), pool.take(5000)
    assert one.data_ptr() != other.data_ptr() and compiled.pinned() == pool.nbytes == 10_000
    address, part = one.data_ptr(), one[10:]
    del one
    third = pool.take(5000)
    assert compiled.pinned() == 15_000, "memory was given out again while a view of it was there"
    del part
    assert pool.take(5000).data_ptr() == address and compiled.pinned() == 15_000
    del third, other, pool
    assert compiled.pinned() == 0
