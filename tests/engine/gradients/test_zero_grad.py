"""What a script does with gradients between a step and the next backward: None, zeros, or nothing."""

import contextlib
import copy

import pytest
import torch
from cells import short_of
from ranks import run_ranks
from shared_ranks import on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from hf_zero.buckets.sharded import ShardedGradientError
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(180)

WIDTH = 6
# At one rank, state in host memory has the gradients in shards, as several ranks have them.
SHARDED = {"stage": 2, "offload": {"optimizer": "cpu"}}
SETTINGS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "grad_accumulation": "local"},
    {"stage": 2, "offload": {"optimizer": "cpu", "speculate_bytes": "1MiB"}},
    {"stage": 3},
]
WAYS = [(who, when, to_none) for who in ("optimizer", "model") for when in ("before", "between") for to_none in (0, 1)]


class Branching(nn.Module):
    """A layer that is used in some steps, one that is frozen in some, and two parameters that get the same gradient."""

    def __init__(self):
        super().__init__()
        self.entry, self.branch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fixed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.twins = nn.ParameterList([torch.zeros(4, WIDTH) for _ in range(2)])

    def forward(self, inputs: torch.Tensor, branches: bool) -> torch.Tensor:
        hidden = torch.tanh(self.entry(inputs)) + (self.twins[0] + self.twins[1])
        hidden = self.fixed(hidden + self.branch(hidden) if branches else hidden)
        return self.head(hidden).square().mean()


def train(rank: int, settings: dict | None, way: tuple[str, str, int], accumulation: int) -> list[torch.Tensor]:
    """Parameters after a few steps by the engine, or by DDP where `settings` is None."""
    who, when, to_none = way
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    engine = ZeroEngine(model, [optimizer], {"bucket_bytes": 300, **settings}) if settings else None
    entry = model if engine else DistributedDataParallel(model, find_unused_parameters=True)
    zero_grad = (optimizer if who == "optimizer" else model).zero_grad
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        model.fixed.requires_grad_(step not in (2, 3))
        if when == "before":
            zero_grad(set_to_none=bool(to_none))
        for micro in range(accumulation):
            with contextlib.nullcontext() if micro == accumulation - 1 else (engine or entry).no_sync():
                loss = entry(torch.randn(4, WIDTH, generator=generator), step % 3 == 0)
                if when == "between" and micro == 0:
                    zero_grad(set_to_none=bool(to_none))
                loss.backward()
        optimizer.step()
    tensors = [value.clone() for value in model.state_dict().values()]
    if engine:
        engine.close()
    return tensors


def compare(rank: int, world_size: int, settings_a_way: int) -> dict[str, float]:
    """The largest difference from DDP, by what was tried: each way with so many of the settings, in turn."""
    errors = {}
    for number, way in enumerate(WAYS):
        accumulation = 1 + number % 3
        expected = train(rank, None, way, accumulation)
        for place in range(settings_a_way):
            settings = SETTINGS[(number * settings_a_way + place) % len(SETTINGS)]
            found = train(rank, settings, way, accumulation)
            errors[f"{settings}, {way}"] = max((a - b).abs().max().item() for a, b in zip(found, expected))
    return errors


@pytest.mark.parametrize("settings_a_way", short_of([1, len(SETTINGS)], [1]))
def test_unused_and_frozen_parameters_are_stepped_as_under_ddp_whether_gradients_are_zeroed_or_none(settings_a_way):
    arguments = {"settings_a_way": settings_a_way}
    errors = run_ranks(compare, world_size=2, time_limit_s=150, keyword_arguments=arguments)[0]
    assert len(errors) == len(WAYS) * settings_a_way
    assert not {name: error for name, error in errors.items() if not error <= 1e-6}


def built(settings: dict) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


def backward(model: nn.Module, seed: int = 0) -> None:
    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)), True).backward()


@pytest.mark.parametrize("who", ["optimizer", "model"])
def test_a_step_on_zeroed_gradients_decays_as_torch_does(who):
    model, optimizer, _ = built(SHARDED)
    plain = copy.deepcopy(model)
    stock = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for network, steps in ((model, optimizer), (plain, stock)):
        backward(network)
        steps.step()
        for _ in range(2):
            (steps if who == "optimizer" else network).zero_grad(set_to_none=False)
            steps.step()
        network.zero_grad()
        backward(network)
        (steps if who == "optimizer" else network).zero_grad(set_to_none=False)
        steps.step()
    for found, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_step_on_gradients_that_a_step_has_used_is_refused_by_name():
    model, optimizer, _ = built(SHARDED)
    backward(model)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(
            ShardedGradientError, match=r"used it.*optimizer\.zero_grad\(\) between a step and the next"
        ):
            optimizer.step()
        backward(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))
    model.zero_grad()
    backward(model)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before))


def adversaries(rank: int, settings: dict | None) -> list[float]:
    """Losses of a generator and a discriminator; the generator's backward goes through both. Each is zeroed before its own."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, numel)) for numel in (WIDTH, 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    pairs = list(zip(models, optimizers))
    engines = [
        ZeroEngine(model, [optimizer], {"bucket_bytes": 200, **settings}) for model, optimizer in pairs if settings
    ]
    makes, judges = models if settings else map(DistributedDataParallel, models)
    generator, losses = torch.Generator().manual_seed(rank), []
    for step in range(4):
        noise, real = (torch.randn(4, WIDTH, generator=generator) for _ in range(2))
        optimizers[1].zero_grad()
        judged = judges(torch.cat([real, makes(noise).detach()]))
        loss = nn.functional.softplus(judged * torch.tensor([[-1.0]] * 4 + [[1.0]] * 4)).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad(set_to_none=step % 2 == 0)
        fooled = nn.functional.softplus(-judges(makes(noise))).mean()
        fooled.backward()
        optimizers[0].step()
        losses += [loss.item(), fooled.item()]
    for engine in engines:
        engine.close()
    return losses


@on_ranks(2)
def test_what_a_generators_backward_leaves_in_its_discriminator_is_dropped_as_under_ddp(rank, world_size):
    settings = [{"stage": stage} for stage in (1, 2, 3)]
    expected = adversaries(rank, None)
    for each in settings:
        assert adversaries(rank, each) == expected, each


def test_a_trained_model_can_be_moved_before_its_gradients_are_zeroed():
    model, optimizer, engine = built(SHARDED)
    backward(model)
    optimizer.step()
    engine.finish_parameters()
    assert model.half().head.weight.dtype == torch.float16
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_micro_batches_do_not_write_into_a_gradient_that_two_parameters_share():
    model, _, engine = built({**SHARDED, "grad_accumulation": "local"})
    plain = copy.deepcopy(model)
    backward(model)
    backward(plain)
    with engine.no_sync():
        for seed in (1, 2):
            backward(model, seed)
            backward(plain, seed)
    backward(model, 3)
    backward(plain, 3)
    for (name, found), expected in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(engine.full_grad(found), expected.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_whole_gradients_leave_no_memory_behind_when_they_are_zeroed(rank, world_size):
    """As under plain torch: DDP's buckets stay, beside the next forward's activations."""
    for reduce_dtype in ("float32", "bfloat16"):
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = ZeroEngine(model, [optimizer], {"stage": 0, "reduce_dtype": reduce_dtype})
        for _ in range(2):
            model(torch.ones(1, WIDTH)).sum().backward()
            storages = [StorageWeakRef(parameter.grad.untyped_storage()) for parameter in model.parameters()]
            optimizer.step()
            assert not any(storage.expired() for storage in storages)
            optimizer.zero_grad()
            assert all(storage.expired() for storage in storages)
        engine.close()
