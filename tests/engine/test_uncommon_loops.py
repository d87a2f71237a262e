"""Models and loops that are not a chain of layers with a forward, a backward and a step: trained as under DDP, or refused."""

from collections.abc import Callable

import pytest
import torch
from shared_ranks import shared_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_zero
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(120)

WIDTH = 8
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.outer(torch.tanh(self.inner(hidden)))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


Loss = Callable[[nn.Module, nn.Module, torch.Tensor], torch.Tensor]
"""(what the script calls, the model itself, batch) → loss."""


def trained(rank: int, stage: int | None, loss_of: Loss) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and last parameters at a stage; None trains with DDP."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    entry = model
    if stage is None:
        entry = DistributedDataParallel(model)
    else:
        of_stage_3 = {"unit_bytes": 0} if stage == 3 else {}
        engine = ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "1KiB", **of_stage_3})
    losses = []
    for batch in batches(rank, 3):
        with hf_zero.gathered(model):
            loss = loss_of(entry, model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if stage is not None:
        engine.close()
    return losses, [p.detach().clone() for p in model.parameters()]


def with_fast_weights(entry: nn.Module, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """MAML: the loss of parameters that one step on the batch has made, differentiated through that step."""
    parameters = dict(model.named_parameters())
    inner = torch.func.functional_call(model, parameters, (batch,)).square().mean()
    gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
    prefix = "" if entry is model else "module."
    fast = {prefix + name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients)}
    return torch.func.functional_call(entry, fast, (batch.flip(0) + 1,)).square().mean()


def trains_as_ddp(rank: int, world_size: int, loss_of: Loss) -> None:
    losses, parameters = trained(rank, None, loss_of)
    for stage in STAGES:
        found, values = trained(rank, stage, loss_of)
        assert found == losses, f"stage {stage}"
        assert all(map(torch.equal, values, parameters)), f"stage {stage}"


def test_parameters_that_are_made_for_one_call_train_as_under_ddp():
    shared_ranks.run(trains_as_ddp, loss_of=with_fast_weights)
