"""torch's DCP helpers on an engine: names and values are those of DDP, and each loads the states of the other."""

import copy
import itertools
from typing import Any

import pytest
import torch
from loops import engine_or_ddp, take_step
from shared_ranks import on_shared_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from hf_zero import ZeroEngine

pytestmark = pytest.mark.timeout(120)
OPTIONS = {
    "plain": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full-on-the-host": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "from-rank-0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}
States = tuple[dict[str, Any], dict[str, Any]]


def trained(
    rank: int, stage: int | None, options: StateDictOptions, load: States | None = None, **settings: Any
) -> tuple[list[float], States]:
    """Losses of three steps, after a load if there is one, and the states at their end. Stage None trains with DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 2))
    groups = [{"params": [m.weight for m in model]}, {"params": [m.bias for m in model], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    entry, engine = engine_or_ddp(model, optimizer, None if stage is None else {"stage": stage, **settings})
    if load is not None:
        set_model_state_dict(model, copy.deepcopy(load[0]), options=options)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(load[1]), options=options)
    generator = torch.Generator().manual_seed(rank)
    losses = [take_step(entry(torch.randn(4, 8, generator=generator)).square().mean(), optimizer) for _ in range(3)]
    states = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    if engine is not None:
        engine.close()
    return losses, states


def are_equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return one == other


@pytest.mark.short_cells("3-plain", "1-full", "2-full-on-the-host", "0-flat", "2-flat", "3-from-rank-0")
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_shared_ranks
def test_states_are_those_of_ddp_and_each_loads_the_others(rank, world_size, stage, how):
    options = OPTIONS[how]
    losses, states = trained(rank, None, options)
    mine = trained(rank, stage, options)
    assert mine[0] == losses and are_equal(mine[1][0], states[0]) and are_equal(mine[1][1], states[1])
    # With `cpu_offload`, rank 0 alone has a full state, and only a broadcast of it can be loaded.
    if not options.cpu_offload:
        further = trained(rank, None, options, states)
        assert trained(rank, stage, options, states)[0] == further[0]
        assert trained(rank, None, options, mine[1])[0] == further[0]


@pytest.mark.parametrize("settings", [{"offload": {"optimizer": "cpu"}}, {"reshard_after_forward": False, "stage": 3}])
@on_shared_ranks
def test_states_in_other_places_load_too(rank, world_size, settings):
    options = OPTIONS["full"]
    settings = dict(settings)
    stage = settings.pop("stage", 2)
    _, states = trained(rank, None, options)
    assert trained(rank, stage, options, states, **settings)[0] == trained(rank, None, options, states)[0]


@on_shared_ranks
def test_before_the_first_step_the_state_is_that_of_ddp_and_no_step_is_counted(rank, world_size):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    plain = nn.Linear(8, 4)
    theirs = get_optimizer_state_dict(plain, torch.optim.AdamW(plain.parameters()))
    engine = ZeroEngine(model, [optimizer], 2)
    assert are_equal(get_optimizer_state_dict(model, optimizer), theirs)
    assert engine.steps_taken == 0 and not optimizer.state
    engine.close()


class Adapted(nn.Module):
    """A frozen layer, and trained ones around it."""

    def __init__(self):
        super().__init__()
        self.before, self.frozen, self.after = nn.Linear(8, 9), nn.Linear(9, 9), nn.Linear(9, 2)
        self.frozen.requires_grad_(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.after(self.frozen(self.before(values)))


def trained_around_frozen(
    rank: int, settings: dict[str, Any] | None, options: StateDictOptions, load: States | None = None
) -> tuple[list[float], States]:
    """Losses of three steps and the states at their end, after a load into a model of other values if there is one."""
    torch.manual_seed(0 if load is None else 1)
    model = Adapted()
    if load is not None:
        torch.manual_seed(0)
        model.frozen.load_state_dict(Adapted().frozen.state_dict())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    entry, engine = engine_or_ddp(model, optimizer, settings)
    if load is not None:
        weights, state = copy.deepcopy(load) if not (rank and options.broadcast_from_rank0) else ({}, {})
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    generator = torch.Generator().manual_seed(rank)
    losses = [take_step(entry(torch.randn(4, 8, generator=generator)).square().mean(), optimizer) for _ in range(3)]
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    if engine is not None:
        engine.close()
    return losses, states


@pytest.mark.parametrize("is_full", [False, True])
@on_shared_ranks
def test_states_without_frozen_parameters_are_those_of_ddp_and_load(rank, world_size, is_full):
    options = StateDictOptions(ignore_frozen_params=True, full_state_dict=is_full, strict=False)
    losses, states = trained_around_frozen(rank, None, options)
    assert not any("frozen" in name for name in states[0])
    further = trained_around_frozen(rank, None, options, states)
    for settings in (
        *({"stage": stage} for stage in range(3)),
        {"stage": 3, "unit_bytes": 0},
        {"stage": 3, "unit_bytes": 0, "offload": {"optimizer": "cpu", "params": "cpu"}},
    ):
        mine = trained_around_frozen(rank, settings, options)
        assert mine[0] == losses and are_equal(list(mine[1]), list(states)), settings
        loaded = trained_around_frozen(rank, settings, options, states)
        assert loaded[0] == further[0] and are_equal(list(loaded[1]), list(further[1])), settings


@pytest.mark.slow
@pytest.mark.timeout(600)
@on_shared_ranks
def test_states_are_those_of_ddp_with_all_options_that_torch_accepts(rank, world_size):
    names = (
        "full_state_dict",
        "cpu_offload",
        "flatten_optimizer_state_dict",
        "ignore_frozen_params",
        "broadcast_from_rank0",
    )
    count = 0
    for values in itertools.product([False, True], repeat=len(names)):
        options = StateDictOptions(**dict(zip(names, values)))
        if options.broadcast_from_rank0 and not options.full_state_dict:
            continue
        losses, states = trained_around_frozen(rank, None, options)
        for settings in ({"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "unit_bytes": 0}):
            mine = trained_around_frozen(rank, settings, options)
            assert mine[0] == losses and are_equal(list(mine[1]), list(states)), (options, settings)
        count += 1
    assert count == 24
