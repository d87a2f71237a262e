"""A state saved by four ranks at stage 3 is the same state on any number of ranks at any stage."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate_job import make_accelerator
from cells import short_of
from ranks import run_ranks
from torch import nn
from trainer_job import as_launched
from training import adamw_in_two_groups, gpt2, gpt2_batch

from hf_zero import engine_of, gathered

pytestmark = pytest.mark.timeout(120)

GLOBAL_BATCH = 12
BEFORE, AFTER = range(3), range(3, 8)


def prepared(stage: int, seed: int, lr: float) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = make_accelerator(f"attach {stage}", cpu=True)
    torch.manual_seed(seed)
    model = gpt2()
    optimizer = adamw_in_two_groups(model)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return accelerator, *accelerator.prepare(model, optimizer)


def trained(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The global batch's loss at each step: the same batches, whatever the number of ranks."""
    size = GLOBAL_BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    losses = []
    for step in steps:
        batch = gpt2_batch(torch.Generator().manual_seed(step), GLOBAL_BATCH)
        loss = model(**{key: value[mine] for key, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and all its optimizer state, whole. Collective."""
    engine = engine_of(model)
    with gathered(model):
        state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind, value in engine.full_state(parameter).items():
            state[f"{kind} of {name}"] = torch.as_tensor(value).clone()
    return state


def saves(rank: int, world_size: int, folder: str) -> list[float]:
    """Trains, saves, trains on; the losses of the second half."""
    as_launched(rank, world_size)
    accelerator, model, optimizer = prepared(stage=3, seed=0, lr=1e-3)
    trained(accelerator, model, optimizer, BEFORE)
    accelerator.save_state(f"{folder}/state")
    state = whole_state(model)
    if rank == 0:
        torch.save(state, f"{folder}/whole.pt")
    return trained(accelerator, model, optimizer, AFTER)


def loads(rank: int, world_size: int, folder: str) -> list[list[float]]:
    """The losses of the second half at each stage, after a look at every bit of what was loaded."""
    as_launched(rank, world_size)
    saved = torch.load(f"{folder}/whole.pt", weights_only=True)
    losses = []
    for stage in range(4):
        accelerator, model, optimizer = prepared(stage=stage, seed=5 + stage, lr=0.5)
        accelerator.load_state(f"{folder}/state")
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3]
        state = whole_state(model)
        assert state.keys() == saved.keys() and len(state) == 4 * len(dict(model.named_parameters()))
        for name, value in saved.items():
            assert value.dtype == state[name].dtype == torch.float32, name
            assert torch.equal(value.view(torch.int32), state[name].view(torch.int32)), f"{name} at stage {stage}"
        losses.append(trained(accelerator, model, optimizer, AFTER))
        accelerator.free_memory()
    return losses


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("saved")
    losses = run_ranks(saves, world_size=4, time_limit_s=110, keyword_arguments={"folder": str(folder)})
    assert losses[0] == losses[3] and len(losses[0]) == len(AFTER)
    return folder, losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", short_of([1, 2, 3, 4], [3]))
def test_a_state_of_4_ranks_at_stage_3_is_the_same_at_every_stage(world_size, uninterrupted):
    folder, expected = uninterrupted
    for losses in run_ranks(loads, world_size=world_size, time_limit_s=110, keyword_arguments={"folder": str(folder)}):
        for stage, after in enumerate(losses):
            assert np.allclose(after, expected, rtol=1e-5, atol=0), f"stage {stage}"
        if world_size == 4:
            assert losses[3] == expected
