"""Runs of GPT-2 with settings of `comm`, saved and resumed."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from training import adamw_in_two_groups, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine, seal_state, write_state

SMALL_BUCKETS = "20KiB"


def setting(stage: int, comm: dict, **more) -> dict:
    return {"stage": stage, "bucket_bytes": SMALL_BUCKETS, "comm": comm, **more}


def start(settings: dict, steps: int = 3, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = gpt2().to(dtype)
    optimizer = adamw_in_two_groups(model, fused=True)
    engine = ZeroEngine(model, [optimizer], settings)
    losses = go_on(model, optimizer, range(steps))
    return model, optimizer, engine, losses


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps) -> list[float]:
    losses = []
    for step in steps:
        loss = model(**gpt2_batch(torch.Generator().manual_seed(10 * step + dist.get_rank()), 2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(engine: ZeroEngine, model: nn.Module, folder: Path) -> None:
    seal_state(engine, folder, write_state(engine, folder / ZERO_FOLDER))
    weights = engine.whole_state_dict(wanted=dist.get_rank() == 0)
    if weights:
        torch.save(weights, folder / "weights.pt")
    dist.barrier()


def resume(settings: dict, folder: Path):
    torch.manual_seed(1)
    model = gpt2()
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    optimizer = adamw_in_two_groups(model, fused=True)
    engine = ZeroEngine(model, [optimizer], settings)
    load_engine(engine, folder / ZERO_FOLDER)
    return model, optimizer, engine
