"""Checkpoints of torch.distributed.checkpoint with options that are seldom met: each goes on, or is refused by one message."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from hf_zero.checkpoint.files import CheckpointError
from hf_zero.engine.engine import ZeroEngine
from hf_zero.foreign.convert import load_foreign_weights, open_saved_by_others
from hf_zero.integrations.state_io import load_state
from hf_zero.integrations.trainer_parts import open_plain

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]


class Frozen(torch.nn.Module):
    """Two layers that are trained, perhaps with one weight, around one that is not."""

    def __init__(self, *, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.last = (torch.nn.Linear(6, 6) for _ in range(3))
        self.frozen.requires_grad_(False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(values)))


def in_two_groups(model: torch.nn.Module, kind=torch.optim.AdamW) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    vectors = {"params": [p for p in trained if p.dim() == 1], "lr": 5e-3}
    return kind([{"params": [p for p in trained if p.dim() > 1]}, vectors], lr=1e-2)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        dtype = model.first.weight.dtype
        model(torch.ones(2, 6, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved_by_torch(folder: Path, model: torch.nn.Module, kind=torch.optim.AdamW) -> torch.optim.Optimizer:
    """Saves a run after two steps."""
    optimizer = in_two_groups(model, kind)
    steps(model, optimizer, 2)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder), no_dist=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return optimizer


def goes_on(folder: Path, model: torch.nn.Module, kind=torch.optim.AdamW) -> None:
    load_foreign_weights(model, folder)
    optimizer = in_two_groups(model, kind)
    engine = ZeroEngine(model, [optimizer], 2)
    load_state(engine, folder, open_saved_by_others)
    steps(model, optimizer, 2)
    engine.close()


@pytest.mark.parametrize("tied", [False, True])
def test_groups_frozen_and_tied_parameters_go_on_as_torch_would(tied, tmp_path):
    theirs, ours = Frozen(tied=tied), Frozen(tied=tied)
    optimizer = saved_by_torch(tmp_path, theirs)
    steps(theirs, optimizer, 2)
    goes_on(tmp_path, ours)
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_in_bfloat16_goes_on_in_the_dtype_that_is_stepped(dtype, tmp_path):
    theirs = saved_by_torch(tmp_path, Frozen().bfloat16())
    saved = [theirs.state[p] for group in theirs.param_groups for p in group["params"]]
    for file, opens in ((tmp_path, open_saved_by_others), (tmp_path / "optimizer.pt", open_plain)):
        model = Frozen().to(dtype)
        load_foreign_weights(model, tmp_path)
        optimizer = in_two_groups(model)
        engine = ZeroEngine(model, [optimizer], 2)
        load_state(engine, file, opens)
        rows = [row for group in optimizer.param_groups for row in group["params"]]
        for row, before in zip(rows, saved, strict=True):
            for kind in ("exp_avg", "exp_avg_sq"):
                found = optimizer.state[row][kind]
                # On bfloat16 parameters it is the master in float32 that is stepped.
                assert found.dtype == row.dtype == torch.float32
                assert torch.equal(found.flatten(), before[kind].float().flatten()), kind
        steps(model, optimizer, 1)
        assert all(p.isfinite().all() for p in model.parameters())
        engine.close()


@pytest.mark.parametrize(
    ("there", "here", "lacks"),
    [
        (torch.optim.Adagrad, torch.optim.AdamW, "exp_avg"),
        (torch.optim.AdamW, torch.optim.Adamax, "exp_inf"),
        (torch.optim.AdamW, torch.optim.NAdam, "mu_product"),
        (partial(torch.optim.SGD, momentum=0.9), torch.optim.RMSprop, "square_avg"),
    ],
)
def test_state_of_another_optimizer_is_refused_by_what_it_lacks(there, here, lacks, tmp_path):
    saved_by_torch(tmp_path, Frozen(), there)
    with pytest.raises(CheckpointError, match=f"as state of a parameter, and {here.__name__} needs '{lacks}'"):
        goes_on(tmp_path, Frozen(), here)


def test_the_file_of_a_plain_trainer_with_state_of_another_optimizer_is_refused(tmp_path):
    saved_by_torch(tmp_path, Frozen())
    model = Frozen()
    engine = ZeroEngine(model, [in_two_groups(model, torch.optim.Adamax)], 2)
    with pytest.raises(CheckpointError, match="as state of a parameter, and Adamax needs 'exp_inf'"):
        load_state(engine, tmp_path / "optimizer.pt", open_plain)
