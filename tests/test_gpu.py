"""What runs on a GPU: the same losses as without the engine, memory back after the step. Skipped where there is none."""

import pytest
import torch
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def losses(settings: object, dtype: torch.dtype, steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    model = gpt2().to("cuda", dtype)
    optimizer = fused_adamw(model)
    engine = None if settings is None else ZeroEngine(model, [optimizer], settings)
    found = []
    for seed in range(steps):
        batch = {k: v.cuda() for k, v in gpt2_batch(torch.Generator().manual_seed(seed), 2).items()}
        loss = model(**batch).loss
        loss.backward()
        if engine is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        else:
            engine.clip_grad_norm_(100.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_gpu_follows_the_plain_loop(stage):
    assert losses(stage, torch.float32) == losses(None, torch.float32)


@pytest.mark.parametrize("stage", [1, 2])
def test_bf16_parameters_train_through_the_master(stage):
    found = losses(stage, torch.bfloat16)
    assert found[-1] < found[0]


def test_closing_gives_memory_back():
    before = torch.cuda.memory_allocated()
    losses(2, torch.float32)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20
