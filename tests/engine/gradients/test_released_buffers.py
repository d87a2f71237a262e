"""Stage 1 gives the memory in which micro-batches accumulate back after the step, and computes what DDP does."""

from contextlib import nullcontext

import pytest
import torch
from ranks import run_ranks
from resident import resident_bytes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_zero.engine.engine import ZeroEngine

LARGE_BYTES = 4 << 20
MICRO_BATCHES = 2


def model_of(dtype: torch.dtype) -> nn.Module:
    """One bucket of huge pages, and a small one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 16)).to(dtype)


def losses_of(model: nn.Module, optimizer, rank: int, dtype: torch.dtype, no_sync, before_step, after_step) -> list:
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        for micro_batch in range(MICRO_BATCHES):
            with nullcontext() if micro_batch == MICRO_BATCHES - 1 else no_sync():
                inputs = torch.randn(4, 1024, generator=generator).to(dtype)
                loss = model(inputs).float().square().mean()
                loss.backward()
        losses.append(loss.item())
        before_step()
        optimizer.step()
        after_step()
        optimizer.zero_grad()
    return losses


def train(rank: int, world_size: int, *, dtype: torch.dtype) -> dict:
    model = model_of(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": 1, "bucket_bytes": "2MiB", "grad_accumulation": "local"})
    held = []

    def note() -> None:
        buffers = [buffer.flat for buffer in engine._step.store._lasting.values()]
        held.append((resident_bytes(buffers), sum(flat.nbytes for flat in buffers if flat.nbytes < LARGE_BYTES // 4)))

    losses = losses_of(model, optimizer, rank, dtype, engine.no_sync, note, note)
    engine.close()
    if dtype != torch.float32:
        return {"losses": losses, "expected": losses, "held": held}
    ddp = DistributedDataParallel(model_of(dtype))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    expected = losses_of(ddp, optimizer, rank, dtype, ddp.no_sync, lambda: None, lambda: None)
    return {"losses": losses, "expected": expected, "held": held}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_gradient_buffers_of_stage_1_are_not_in_memory_between_steps(dtype):
    for found in run_ranks(train, world_size=2, time_limit_s=50, keyword_arguments={"dtype": dtype}):
        assert found["losses"] == found["expected"]
        filled, released = found["held"][::2], found["held"][1::2]
        assert all(resident >= LARGE_BYTES * dtype.itemsize // 4 for resident, _ in filled)
        assert all(resident == kept for resident, kept in released), found["held"]
