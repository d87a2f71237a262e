"""What scripts ask of an Accelerator beside prepare, backward and step: as under DDP, or refused by name."""

import copy
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate_job import make_accelerator
from ranks import run_ranks
from shared_ranks import on_ranks
from torch import nn
from trainer_job import as_launched, make_trainer
from transformers import Trainer

from hf_zero import ConfigError, ZeroPlugin, engine_of
from hf_zero.disguise import mix_in

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def run_on_ranks(target, world_size: int = 2, **arguments):
    return run_ranks(target, world_size=world_size, time_limit_s=120, keyword_arguments=arguments)


def prepared(accelerator: Accelerator, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def clipped_at_each(rank: int, world_size: int, door: str) -> list[float]:
    """Clips micro-batches, too: parameters after three steps."""
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True, gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(5, 6, generator=generator)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
            accelerator.clip_grad_value_(model.parameters(), 0.002)
            optimizer.step()
            optimizer.zero_grad()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def test_micro_batches_that_are_clipped_before_they_are_reduced_are_clipped_as_under_ddp():
    found, expected = (run_on_ranks(clipped_at_each, door=door)[0] for door in ("plugin 1", "ddp"))
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-7)


def clips_amiss(rank: int, world_size: int) -> list[str]:
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(2), cpu=True, gradient_accumulation_steps=2)
    # Large enough that each rank has a part of it.
    model, optimizer = prepared(accelerator, nn.Linear(64, 64))
    said: list[str] = []
    logging.getLogger("hf_zero.integrations.accelerator").addFilter(lambda line: said.append(line.getMessage()))
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(5, 64)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"out of optimizer\.param_groups.*Give it model\.parameters\(\)"):
        accelerator.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    return said


def test_clipping_micro_batches_that_are_reduced_is_told_once_and_clipping_rows_is_refused():
    main, other = run_on_ranks(clips_amiss)
    assert len(main) == 1 and "before the last micro-batch" in main[0] and "sync_gradients" in main[0]
    assert other == []


@on_ranks(2)
def test_clipping_scaled_micro_batches_is_refused(rank, world_size):
    as_launched(rank, world_size)
    accelerator = Accelerator(
        parallelism_config=ZeroPlugin(2), cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2
    )
    model, _ = prepared(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(5, 6)).sum())
        with pytest.raises(RuntimeError, match=r"unscaled only once.*sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)


def asked_of_ddp(rank: int, world_size: int) -> list[float]:
    as_launched(rank, world_size)
    asked = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(2), cpu=True, kwargs_handlers=[asked])
    model, optimizer = prepared(accelerator, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        accelerator.backward(model(torch.full((3, 4), float(rank))).sum())
        optimizer.step()
        optimizer.zero_grad()
    return model[1].running_mean.tolist()


def test_buffers_stay_apart_where_ddp_is_told_so():
    first, second = run_on_ranks(asked_of_ddp)
    assert first != second


class Ending(torch.autograd.Function):
    """Returns its input, whose gradient it leaves undefined."""

    @staticmethod
    def forward(_ctx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx, _gradient: torch.Tensor) -> None:
        return None


class Ended(nn.Module):
    def __init__(self):
        super().__init__()
        self.stays, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(inputs + Ending.apply(self.stays(inputs)))


def decayed(rank: int, world_size: int, asked: dict[str, bool], door: str) -> list[float]:
    as_launched(rank, world_size)
    plugin = ZeroPlugin(2) if door == "zero" else None
    handler = DistributedDataParallelKwargs(**asked)
    accelerator = Accelerator(parallelism_config=plugin, cpu=True, kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = Ended()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    for _ in range(3):
        accelerator.backward(prepared(torch.ones(3, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return model.stays.weight.flatten().tolist()


@pytest.mark.parametrize("asked", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_gradient_that_is_undefined_on_all_ranks_is_what_ddps_settings_make_of_it(asked):
    assert run_on_ranks(decayed, asked=asked, door="zero") == run_on_ranks(decayed, asked=asked, door="ddp")


def test_hooks_of_ddp_are_refused(fresh_state):
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    with pytest.raises(ConfigError, match=r"comm_hook=bf16.*`reduce_dtype: bfloat16`"):
        Accelerator(cpu=True, parallelism_config=ZeroPlugin(2), kwargs_handlers=[hook])


class SlowWeights(torch.optim.Optimizer):
    """Steps another optimizer, and sets nothing up for its own hooks."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, {}

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_around_another_and_one_of_two_models_are_refused(fresh_state):
    accelerator = Accelerator(cpu=True, parallelism_config=ZeroPlugin(2))
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"SlowWeights has another one in it, SGD, whose state.*Prepare the SGD by itself"
    ):
        accelerator.prepare(first, SlowWeights(torch.optim.SGD(first.parameters(), lr=0.1)))
    accelerator.free_memory()
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(
        ValueError, match=r"2 parameters that are not in the model.*give each model an optimizer of its own"
    ):
        accelerator.prepare(first, second, both)


def with_optimizers_apart(rank: int, world_size: int, door: str) -> list[float]:
    """Losses of a model whose second optimizer is prepared later, and whose third takes the place of the first."""
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    of_the_first, of_the_second = list(model[0].parameters()), list(model[2].parameters())
    generator = torch.Generator().manual_seed(rank)
    losses = []

    def train(*optimizers: torch.optim.Optimizer) -> None:
        for _ in range(3):
            loss = prepared_model(torch.randn(5, 6, generator=generator)).square().mean()
            accelerator.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            losses.append(loss.item())

    prepared_model, first = accelerator.prepare(model, torch.optim.AdamW(of_the_first, lr=1e-2))
    second = torch.optim.AdamW(of_the_second, lr=1e-2)
    train(first)
    second = accelerator.prepare(second)
    train(first, second)
    third = accelerator.prepare(torch.optim.SGD(of_the_first, lr=1e-1))
    train(second, third)
    return losses


@pytest.mark.parametrize("door", ["plugin 1", "plugin 2", "plugin 3"])
def test_optimizers_that_are_prepared_one_after_the_other_train_together(door):
    found, expected = (run_on_ranks(with_optimizers_apart, door=each) for each in (door, "ddp"))
    assert found == expected


def test_a_parameter_of_two_optimizers_is_refused_by_name(fresh_state):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizers = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model[1].parameters())
    with pytest.raises(
        ValueError, match=r"'1.weight' is held by two optimizers, AdamW and SGD. Give each parameter to one"
    ):
        Accelerator(parallelism_config=ZeroPlugin(2), cpu=True).prepare(model, *optimizers)


def shown(thing: Any) -> list[str]:
    """How an object, its pickle and its copies show themselves; an error by its class."""
    found = []
    for again in (lambda: thing, lambda: pickle.loads(pickle.dumps(thing)), lambda: copy.deepcopy(thing)):
        try:
            kind = type(again())
            found.append(f"{kind.__module__}.{kind.__qualname__}.{kind.__name__}")
        except Exception as error:
            found.append(type(error).__name__)
    return found


OF_VALUES = ("read parameter", "text")


class OwnScaler(torch.amp.GradScaler):
    pass


class OwnTrainer(Trainer):
    pass


def shown_in_a_run(rank: int, world_size: int, door: str, folder: str) -> dict[str, list[str]]:
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True)
    found = {"accelerator": shown(accelerator)}
    accelerator.scaler = OwnScaler("cpu", init_scale=4.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    listed = list(model.parameters())
    optimizer = torch.optim.AdamW(listed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    found |= {type(each).__name__: shown(each) for each in (*prepared[1:], optimizer, scheduler)}
    found |= {"scaler": shown(accelerator.scaler), "prepared accelerator": shown(accelerator)}
    for _ in range(2):
        accelerator.backward(prepared[0](torch.ones(4, 64)).sum())
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found |= {"gradient of the optimizer's": shown(gradients[-1]), "its text": [repr(gradients[-1])[:7]]}
        prepared[1].step()
        # Taken beforehand, and on its way now.
        found["parameter"] = shown(listed[0])[:1]
        prepared[1].zero_grad()
    if not door.endswith("3"):
        found |= dict(zip(OF_VALUES, (shown(listed[0]), [repr(listed[0])[:20]])))
    shallow = copy.copy(accelerator)
    assert shallow._models == accelerator._models and shallow.__dict__.items() <= accelerator.__dict__.items()
    if door != "ddp":
        assert shallow.zero_engines == accelerator.zero_engines != []
        another = pickle.loads(pickle.dumps(accelerator))
        assert another.zero_engines == [] == another._models == another._optimizers == another._schedulers
        other = nn.Linear(64, 64)
        trained, stepping = another.prepare(other, torch.optim.SGD(other.parameters(), 0.1))
        another.backward(trained(torch.ones(4, 64)).sum())
        stepping.step()
        assert engine_of(other) in another.zero_engines and len(accelerator.zero_engines) == 1
    doors = {"ddp": "ddp"} | {f"plugin {stage}": f"callback {stage}" for stage in range(4)}
    for kind in (Trainer, OwnTrainer):
        trainer = make_trainer(doors[door], "gpt2", folder, trainer_class=kind)
        found[kind.__name__] = shown(trainer)
        assert copy.copy(trainer).__dict__ == trainer.__dict__
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_objects_whose_class_is_replaced_show_copy_and_pickle_themselves_as_before(stage, tmp_path):
    stock, ours = (run_on_ranks(shown_in_a_run, door=d, folder=str(tmp_path)) for d in ("ddp", f"plugin {stage}"))
    # At stage 3 the values of a parameter cannot be read outside of a forward.
    assert ours == [{name: each for name, each in rank.items() if stage < 3 or name not in OF_VALUES} for rank in stock]


def test_an_object_with_a_pickle_of_its_own_keeps_it():
    thing = ByArguments(3)
    mix_in(thing, Mixed)
    again = pickle.loads(pickle.dumps(thing))
    assert (again.number, again.made_by) == (3, "arguments") and isinstance(again, Mixed)


class Mixed:
    pass


class ByArguments:
    def __init__(self, number: int, made_by: str = "hand"):
        self.number, self.made_by = number, made_by

    def __reduce__(self):
        return type(self), (self.number, "arguments")


@pytest.mark.parametrize("reset_partial_state", [False, True])
def test_behind_a_reset_of_accelerates_state_its_own_explanation_comes(fresh_state, tmp_path, reset_partial_state):
    accelerator = Accelerator(cpu=True, parallelism_config=ZeroPlugin(2))
    prepared(accelerator)
    AcceleratorState._reset_state(reset_partial_state)
    for call in (
        lambda: accelerator.prepare(nn.Linear(1, 1)),
        lambda: accelerator.prepare_model(nn.Linear(1, 1)),
        lambda: accelerator.prepare_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)),
        lambda: accelerator.save_state(str(tmp_path)),
        lambda: accelerator.load_state(str(tmp_path)),
    ):
        with pytest.raises(AttributeError, match=r"This happens if `AcceleratorState._reset_state\(\)` was called"):
            call()


def steps_one_more(rank: int, world_size: int, stage: int) -> list[str]:
    """What steps of optimizers that were built after prepare are told."""
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage), cpu=True)
    model, first = prepared(accelerator, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    said = []
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor]
    for make in (*kinds, lambda parameters: torch.optim.AdamW(parameters, foreach=False)):
        accelerator.backward(model(torch.ones(5, 64)).sum())
        with pytest.raises(RuntimeError) as error:
            make(model.parameters()).step()
        said.append(str(error.value))
        first.zero_grad()
    # A hook of the prepared optimizer's own that reads a gradient is no step without the engine.
    first.optimizer.register_step_pre_hook(lambda *_: model[0].weight.grad.norm())
    accelerator.backward(model(torch.ones(5, 64)).sum())
    with pytest.raises(RuntimeError, match="is sharded over the ranks") as error:
        first.step()
    assert "was not prepared" not in str(error.value)
    return said


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_was_built_after_prepare_is_named(stage):
    for said in run_on_ranks(steps_one_more, stage=stage):
        for name, told in zip(("AdamW", "SGD", "Adafactor", "AdamW"), said, strict=True):
            assert f"this {name} was not prepared" in told and "accelerator.prepare(model, optimizer)" in told
            assert len(told.split()) <= 35
