"""Optimizers as torch lets people write them: state by Parameter, step hooks, attributes of parameters, and subclasses."""

import copy
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from loops import engine_or_ddp, take_step
from shared_ranks import on_ranks, on_shared_ranks
from torch import nn

from hf_zero import ZeroEngine
from hf_zero.presence.arrivals import CommunicationError

pytestmark = pytest.mark.timeout(120)
STEPS = 5

Edit = Callable[[nn.Module, torch.optim.Optimizer], object]
"""What a script does between two steps; the value is compared with DDP's."""


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 31), nn.GELU(), nn.Linear(31, 16))


def trained(
    rank: int,
    stage: int | None,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    edit: Edit = lambda model, optimizer: None,
    settings: dict | None = None,
) -> tuple[list[float], list[torch.Tensor], object]:
    """Losses, last parameters and the answer of `edit` after the third step; stage None trains with DDP."""
    model = chain()
    optimizer = make(model)
    entry, engine = engine_or_ddp(model, optimizer, None if stage is None else {"stage": stage, **(settings or {})})
    generator, losses, answer = torch.Generator().manual_seed(rank), [], None
    for step in range(STEPS):
        losses.append(take_step((entry(torch.randn(4, 16, generator=generator)) - 1).square().mean(), optimizer))
        if step == 2:
            answer = edit(model, optimizer)
    if engine is not None:
        engine.close()
    return losses, [p.detach().clone() for p in model.parameters()], answer


def assert_as_ddp(
    rank: int, stage: int, make: Callable, edit: Edit = lambda model, optimizer: None, **settings
) -> None:
    losses, parameters, answer = trained(rank, stage, make, edit, settings)
    expected = trained(rank, None, make, edit)
    assert losses == expected[0] and answer == expected[2]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, expected[1], strict=True))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# ---- optimizer.state by the model's Parameters ----


def reset_neurons(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    found = []
    for parameter in model[2].parameters():
        found.append(parameter in optimizer.state)
        # By rows of the whole parameter, and by an edit that leaves no mark.
        optimizer.state[parameter]["exp_avg"][3:7] = 0
        optimizer.state[parameter]["exp_avg_sq"].data.mul_(0.5)
    return found, sorted(optimizer.state[model[0].weight]), optimizer.state.get(nn.Parameter(torch.ones(1)), "none")


def drop_and_replace(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    first, second, third = model[0].weight, model[2].weight, model[4].weight
    del optimizer.state[first]
    moved = optimizer.state.pop(second)
    optimizer.state[second] = {name: value * 2 if name == "exp_avg" else value for name, value in moved.items()}
    shape = tuple(optimizer.state[third]["exp_avg"].shape)
    return first in optimizer.state, second in optimizer.state, shape


@pytest.mark.parametrize("edit", [reset_neurons, drop_and_replace])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_shared_ranks
def test_state_is_found_and_edited_by_the_models_parameters(rank, world_size, stage, edit):
    assert_as_ddp(rank, stage, adamw, edit)


@pytest.mark.parametrize("where", [{"offload": {"optimizer": "cpu"}}, {"offload": {"optimizer": "nvme"}}])
def test_state_that_is_not_in_device_memory_is_edited_too(where, tmp_path):
    if where["offload"]["optimizer"] == "nvme":
        where = {"offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    check_offloaded(where=where)


@on_shared_ranks
def check_offloaded(rank, world_size, where):
    assert_as_ddp(rank, 2, adamw, reset_neurons, **where)


@on_shared_ranks
def test_edits_are_in_saved_state_and_copies_of_the_optimizer_are_plain(rank, world_size):
    model = chain()
    optimizer = adamw(model)
    engine = ZeroEngine(model, [optimizer], 2)
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weight = model[2].weight
    optimizer.state[weight]["exp_avg"].fill_(7.0)
    assert all(
        (row.tensor == 7.0).all() for row in engine.state.rows() if (row.kind, row.name) == ("exp_avg", "2.weight")
    )
    optimizer.state[weight]["exp_avg"].fill_(8.0)
    assert (engine.full_state(weight)["exp_avg"] == 8.0).all()
    assert type(copy.deepcopy(optimizer.state)) is type(copy.copy(optimizer.state)) is defaultdict
    optimizer.load_state_dict(optimizer.state_dict())
    assert weight in optimizer.state and (optimizer.state[weight]["exp_avg"] == 8.0).all()
    engine.close()
    assert type(optimizer.state) is defaultdict


@on_shared_ranks
def test_one_edit_by_parameter_and_another_by_row_are_refused(rank, world_size):
    model = chain()
    optimizer = adamw(model)
    engine = ZeroEngine(model, [optimizer], 1)
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    # All ranks have a row of this one.
    slot = engine._parts.slot_of[model[2].weight]
    optimizer.state[model[2].weight]["exp_avg"].zero_()
    if slot.row is not None:
        optimizer.state[slot.row.tensor]["exp_avg"].mul_(2.0)
        with pytest.raises(RuntimeError, match="edited both"):
            optimizer.state_dict()
    engine.close()


@on_ranks(2)
def test_a_rank_that_looks_up_state_alone_is_told_the_call(rank, world_size):
    model = chain()
    optimizer = adamw(model)
    ZeroEngine(model, [optimizer], {"stage": 2, "comm": {"late_s": 1.0, "timeout_s": 3.0}})
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    if rank == 0:
        with pytest.raises((CommunicationError, RuntimeError), match=r"optimizer\.state"):
            optimizer.state[model[0].weight]


# ---- hooks on the optimizer's step, attributes, subclasses ----


def with_projection(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def to_unit_norm(*_: object) -> None:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.div_(parameter.norm(dim=-1, keepdim=True))

    optimizer.register_step_post_hook(to_unit_norm)
    return optimizer


@pytest.mark.parametrize("stage", [1, 2])
@on_shared_ranks
def test_a_post_hook_from_before_the_engine_sees_and_edits_stepped_parameters(rank, world_size, stage):
    assert_as_ddp(rank, stage, with_projection)


class Twice(torch.optim.SGD):
    """Steps by the parent's step, then by a second momentum of the same gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["slow"] = (
                        state["slow"].mul(0.5).add(parameter.grad) if "slow" in state else parameter.grad.clone()
                    )
                    parameter.sub_(state["slow"], alpha=0.05)


class Fails(Twice):
    def step(self, closure=None):
        if self.param_groups[0]["lr"] < 0:
            raise ValueError("a negative rate")
        return super().step(closure)


def twice(model: nn.Module) -> torch.optim.Optimizer:
    # torch puts its hooks around the parent's step when the first object of the parent's class is made.
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    return Twice(model.parameters(), lr=0.1)


def with_a_failed_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The step raises once, before it has changed anything; the script catches that and goes on."""
    optimizer.param_groups[0]["lr"] = -0.1
    with pytest.raises(ValueError, match="negative"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_shared_ranks
def test_a_class_goes_on_with_gradients_after_its_parents_step(rank, world_size, stage):
    assert_as_ddp(rank, stage, twice)


@on_shared_ranks
def test_a_step_that_raised_is_not_taken_for_the_outer_one_of_the_next(rank, world_size):
    assert_as_ddp(rank, 2, lambda model: Fails(model.parameters(), lr=0.1), with_a_failed_step)


class Scaled(torch.optim.Optimizer):
    """SGD with a rate that a parameter carries as an attribute."""

    def __init__(self, parameters, lr: float = 0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * getattr(parameter, "lr_scale", 1.0))


def scaled(model: nn.Module) -> torch.optim.Optimizer:
    for name, parameter in model.named_parameters():
        parameter.lr_scale = 0.1 if name.startswith("0") else 2.0
    return Scaled(model.parameters())


def rescale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight.lr_scale = 0.3


@pytest.mark.parametrize("settings", [{}, {"offload": {"optimizer": "cpu"}}])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_shared_ranks
def test_a_step_reads_attributes_of_parameters_as_they_are_now(rank, world_size, stage, settings):
    assert_as_ddp(rank, stage, scaled, rescale, **settings)
