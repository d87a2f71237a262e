"""State and settings of optimizers that are unlike torch's own: saved to the bit, or refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from saved_engines import save_engine
from torch import nn

from hf_zero.checkpoint.files import CheckpointError
from hf_zero.checkpoint.structure import plain_settings, restore_settings
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine
from hf_zero.integrations.verify import checkpoint_faults

pytestmark = pytest.mark.timeout(60)


class Named(torch.optim.Optimizer):
    """Keeps what it is told to: names of tensors with one value an element, numbers, and steps in a tensor of one element."""

    def __init__(self, parameters, names=(), numbers=(), counts=False, **settings):
        super().__init__(parameters, {"lr": 0.1, "names": names, "numbers": numbers, "counts": counts, **settings})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                for number, name in enumerate(group["names"]):
                    state.setdefault(name, torch.zeros_like(parameter)).add_(parameter.grad, alpha=number + 1)
                if group["counts"]:
                    state.setdefault("count", torch.zeros(1)).add_(1)
                state |= {str(number): torch.tensor(number) for number in group["numbers"]}
                parameter.add_(parameter.grad, alpha=-group["lr"])


def built(
    make_optimizer, config: dict, *, before: int = 0, steps: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    """A model with a parameter without dimensions, as CLIP's temperature is, and its engine, after some steps.

    Args:
        before: steps before there is an engine.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    model.temperature = nn.Parameter(torch.tensor(2.0))
    optimizer = make_optimizer(model.parameters())
    step(model, optimizer, before)
    engine = ZeroEngine(model, [optimizer], config)
    step(model, optimizer, steps)
    return model, optimizer, engine


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        (model(torch.ones(2, 4, dtype=model.weight.dtype)) * model.temperature).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model: nn.Module, engine: ZeroEngine) -> dict[str, dict]:
    return {name: engine.full_state(parameter) for name, parameter in model.named_parameters()}


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


# A parameter without dimensions


@pytest.mark.parametrize("make_optimizer", [adamw, torch.optim.Adagrad], ids=["adamw", "adagrad"])
def test_state_of_a_parameter_without_dimensions_goes_to_rows_that_have_one(tmp_path, make_optimizer):
    model, _, engine = built(make_optimizer, {"stage": 0}, before=1)
    save_engine(engine, tmp_path)
    saved = states(model, engine)
    for loads in (True, False):
        in_rows = {"stage": 2, "param_dtype": "bfloat16"}
        other, optimizer, loaded = built(make_optimizer, in_rows, before=0 if loads else 1)
        if loads:
            load_engine(loaded, tmp_path / ZERO_FOLDER)
        assert optimizer.param_groups[0]["params"][-1].shape == (1,)
        torch.testing.assert_close(states(other, loaded), saved, rtol=0, atol=0)
        step(other, optimizer)
        assert loaded.full_state(other.temperature)["step"] == 2


def test_parameters_without_state_have_no_entry_that_looks_like_a_step(tmp_path):
    """Optimizers may ask `parameter in self.state`."""
    _, _, engine = built(adamw, {"stage": 2})
    save_engine(engine, tmp_path)
    _, optimizer, loaded = built(adamw, {"stage": 2}, steps=1)
    load_engine(loaded, tmp_path / ZERO_FOLDER)
    assert not optimizer.state


# A counter with a dimension


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.ones(1000))

    def forward(self) -> torch.Tensor:
        return self.values.square().sum()


def counts(rank: int, world_size: int, folder: str) -> float:
    """On one rank it saves, on several it goes on; returns the count after a further step."""
    model = Vector()
    optimizer = Named(model.parameters(), names=("m",), counts=True)
    engine = ZeroEngine(model, [optimizer], 2)
    if world_size > 1:
        load_engine(engine, Path(folder) / ZERO_FOLDER)
    model().backward()
    optimizer.step()
    if world_size == 1:
        save_engine(engine, folder)
    return engine.full_state(model.values)["count"].item()


def test_a_counter_with_a_dimension_is_no_state_of_the_whole_parameter(tmp_path):
    arguments = {"folder": str(tmp_path)}
    assert run_ranks(counts, world_size=1, time_limit_s=50, keyword_arguments=arguments) == [1]
    assert run_ranks(counts, world_size=2, time_limit_s=50, keyword_arguments=arguments) == [2, 2]


# Names


OF_THE_FORMAT = ("master", "weights", "residual.0", "outer.momentum", "replica.1.x", "own.master")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_optimizer_may_call_its_state_by_words_of_the_format(tmp_path, dtype):
    def make_optimizer(parameters):
        return Named(parameters, names=OF_THE_FORMAT)

    settings = {} if dtype is None else {"param_dtype": dtype}
    model, _, engine = built(make_optimizer, {"stage": 2, **settings}, steps=2)
    save_engine(engine, tmp_path)
    assert checkpoint_faults(tmp_path, ZERO_FOLDER) == []
    other, _, loaded = built(make_optimizer, {"stage": 1, **settings})
    load_engine(loaded, tmp_path / ZERO_FOLDER)
    assert states(model, engine)["weight"].keys() == set(OF_THE_FORMAT)
    torch.testing.assert_close(states(other, loaded), states(model, engine), rtol=0, atol=0)
    masters = [
        {row.name: row.tensor.clone() for row in each.state.rows() if row.kind == "master"} for each in (engine, loaded)
    ]
    assert bool(masters[0]) == (dtype is not None)
    torch.testing.assert_close(*masters, rtol=0, atol=0)


def test_the_word_for_masters_is_refused_in_files(tmp_path):
    settings = {"stage": 2, "param_dtype": "bfloat16", "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(ValueError, match=r"Named keeps state that it calls 'master'.*Give it another name"):
        built(lambda parameters: Named(parameters, names=("master",)), settings)


# Numbers and settings


def test_numbers_without_a_bound_come_back(tmp_path):
    """Prodigy and D-Adaptation have the setting `growth_rate=inf`."""

    def make_optimizer(parameters):
        numbers = (float("inf"), -float("inf"), float("nan"), 1e30)
        return Named(parameters, numbers=numbers, growth_rate=float("inf"), limits=(-float("inf"), 1e30))

    model, _, engine = built(make_optimizer, {"stage": 2}, steps=1)
    save_engine(engine, tmp_path)
    other, optimizer, loaded = built(make_optimizer, {"stage": 2})
    load_engine(loaded, tmp_path / ZERO_FOLDER)
    torch.testing.assert_close(states(other, loaded), states(model, engine), rtol=0, atol=0, equal_nan=True)
    assert optimizer.param_groups[0]["growth_rate"] == float("inf")
    assert optimizer.param_groups[0]["limits"] == (-float("inf"), 1e30)


def test_settings_come_back_as_the_kind_of_number_that_they_were():
    group = {
        "lr": np.float32(0.1),
        "warmup": np.int64(3),
        "betas": (torch.tensor(0.9), 0.99),
        "steps": [torch.tensor(2)],
    }
    saved = json.loads(json.dumps(plain_settings(group)))
    beta, count = torch.tensor(0.0), torch.tensor(0)
    other = {"lr": np.float32(0), "warmup": np.int64(0), "betas": (beta, 0.0), "steps": [count]}
    restore_settings(other, saved)
    assert other == group and type(other["lr"]) is np.float32 and type(other["warmup"]) is np.int64
    assert other["betas"][0] is beta and other["steps"][0] is count


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (torch.zeros(2), "setting 'odd' is a tensor of 2 numbers"),
        (len, "setting 'odd' is a builtin_function_or_method"),
        ([torch.float32], "setting 'odd' is a dtype"),
        ({1: 2}, "setting 'odd' is a dict"),
    ],
)
def test_settings_that_cannot_be_saved_are_named(tmp_path: Path, setting, says):
    _, optimizer, engine = built(adamw, {"stage": 2}, steps=1)
    optimizer.param_groups[0]["odd"] = setting
    with pytest.raises(CheckpointError, match=rf"{says}, which cannot be saved"):
        save_engine(engine, tmp_path)


def test_state_of_no_parameter_is_refused_and_not_lost(tmp_path):
    _, optimizer, engine = built(adamw, {"stage": 2}, steps=1)
    optimizer.state["count"] = 2
    with pytest.raises(
        CheckpointError, match="AdamW keeps state of no parameter, under 'count', and only that of para"
    ):
        save_engine(engine, tmp_path)


def test_a_checkpoint_of_steps_that_were_one_step_late_is_resumed_without_them(tmp_path):
    """`offload.delay` kept gradients that were due, their settings and a count beside each parameter's state."""
    saved, resumed = ([], [])
    for held in (saved, resumed):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        held += [model, optimizer, ZeroEngine(model, [optimizer], {"stage": 2})]
    model, optimizer, engine = saved
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for parameter, state in optimizer.state.items():
        state |= {"delayed gradient": torch.ones_like(parameter), "delayed setting lr": 0.5}
        state["delayed after steps in time"] = 3
    save_engine(engine, tmp_path)
    with pytest.warns(
        UserWarning, match=r"offload.delay: 1`, which was taken out of hf_zero: the gradients of its last"
    ):
        load_engine(resumed[2], tmp_path / ZERO_FOLDER)
    rows = [each.param_groups[0]["params"] for each in (resumed[1], optimizer)]
    for row, expected_of in zip(*rows, strict=True):
        state, expected = resumed[1].state[row], optimizer.state[expected_of]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[name], expected[name]) for name in state)
