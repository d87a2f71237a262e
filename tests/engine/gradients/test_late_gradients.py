"""A layer used more than once under reentrant checkpointing: its gradient comes in parts, some after its bucket was sent."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from cells import slow
from ranks import run_ranks
from shared_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import state_plan
from hf_zero.layout import slots

pytestmark = pytest.mark.timeout(180)

WIDTH = 6
SETTINGS = {
    "stage 0": {"stage": 0},
    "stage 0, bf16 in transit": {"stage": 0, "reduce_dtype": "bfloat16"},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, one buffer": {"stage": 2, "buffers": 1},
    "stage 2, local": {"stage": 2, "grad_accumulation": "local"},
    "stage 2, early steps": {"stage": 2, "offload": {"optimizer": "cpu", "speculate_bytes": "1MiB"}},
    "stage 2, int8": {"stage": 2, "comm": {"gradients": "int8"}},
    "stage 3": {"stage": 3},
}
ROUNDED = {"stage 0, bf16 in transit": 5e-3, "stage 2, int8": 1e-2}


class Layer(nn.Module):
    """A layer whose second branch may sleep, with a parameter that has no elements."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.sleeps = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.first(hidden) + self.empty.sum()
        return hidden + torch.tanh(out if self.sleeps else out + self.second(hidden))


class Shared(nn.Module):
    """Some layers, the first of which comes again at the end, each under reentrant checkpointing if `saves`."""

    def __init__(self, saves: bool, frozen: bool):
        super().__init__()
        self.saves = saves
        self.entry, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Layer(), Layer()])
        self.never, self.fixed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.fixed(self.entry(inputs))
        for layer in (*self.layers, self.layers[0], self.layers[0]):
            hidden = checkpoint(layer, hidden, use_reentrant=True) if self.saves else layer(hidden)
        return hidden.square().mean()


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How it is trained. `sleeping`: ranks on which the second branch of the first layer sleeps."""

    settings: dict
    accumulation: int = 1
    sleeping: tuple[int, ...] = ()
    frozen: bool = False


def train(rank: int, world_size: int, loop: Loop, *, saves: bool) -> list[torch.Tensor]:
    """Parameters after a few steps by the engine."""
    torch.manual_seed(0)
    model = Shared(saves, loop.frozen)
    model.layers[0].sleeps = rank in loop.sleeping
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::2], "lr": 0.02}, {"params": trained[1::2], "lr": 0.05}]
    optimizer = torch.optim.AdamW(groups, eps=1e-2)
    settings = {"bucket_bytes": 300, **loop.settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "GRAD_BUFFERS", settings.pop("buffers", slots.GRAD_BUFFERS))
        engine = ZeroEngine(model, [optimizer], settings)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for micro in range(loop.accumulation):
            with contextlib.nullcontext() if micro == loop.accumulation - 1 else engine.no_sync():
                model(torch.randn(4, WIDTH, generator=generator)).backward()
        assert engine.full_grad(model.never.weight) is None
        optimizer.step()
        optimizer.zero_grad()
    tensors = list(model.state_dict().values())
    engine.close()
    return tensors


def with_and_without(rank: int, world_size: int, loops: list[Loop]) -> list[float]:
    """The largest difference that checkpointing makes, for each loop."""
    found = []
    for loop in loops:
        saved, plain = (train(rank, world_size, loop, saves=saves) for saves in (True, False))
        found.append(max((a - b).abs().max().item() for a, b in zip(saved, plain) if a.numel()))
    return found


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        slow(1, [name for name in SETTINGS if name not in ROUNDED]),
        (2, list(SETTINGS)[1::2]),
        slow(2, list(SETTINGS)[::2]),
    ],
    ids=["1", "2", "2-others"],
)
def test_a_layer_used_again_under_reentrant_checkpointing_has_the_sum_of_its_gradients(world_size, names):
    loops = [Loop(settings=SETTINGS[name]) for name in names]
    errors = run_ranks(with_and_without, world_size=world_size, time_limit_s=150, keyword_arguments={"loops": loops})[0]
    wrong = {name: error for name, error in zip(names, errors) if not error <= ROUNDED.get(name, 1e-6)}
    assert not wrong


@pytest.mark.slow
def test_it_has_so_beside_ranks_that_use_less_and_layers_that_are_frozen():
    loops = [
        Loop(settings={"stage": stage}, accumulation=2, sleeping=(0,), frozen=frozen)
        for stage in (0, 1, 2, 3)
        for frozen in (True, False)
    ]
    errors = run_ranks(with_and_without, world_size=2, time_limit_s=150, keyword_arguments={"loops": loops})[0]
    assert max(errors) <= 1e-6, errors


@on_ranks(2)
def test_what_one_rank_alone_has_put_in_a_bucket_stays_when_it_is_sent_again(rank, world_size):
    """A bucket that one rank sends again has what the other rank alone has put there."""
    for stage in (0, 1, 2):
        torch.manual_seed(0)
        model, reference = Shared(True, False), Shared(False, False)
        reference.load_state_dict(model.state_dict())
        for each in (model, reference):
            each.layers[0].sleeps = rank == 0
        engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"stage": stage})
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
        model(inputs).backward()
        reference(inputs).backward()
        for (name, parameter), other in zip(model.named_parameters(), reference.parameters()):
            expected = torch.zeros_like(other) if other.grad is None else other.grad / world_size
            dist.all_reduce(expected)
            found = engine.full_grad(parameter)
            if name.startswith("never"):
                assert found is None
            elif parameter.numel():
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=f"stage {stage}: {name}")
        engine.close()


class Passed(nn.Module):
    """Layers of which the last is not used, or only at odd calls: those before it wait for its bucket."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.uses = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        # Made before the layers', so that its gradient comes behind theirs.
        return hidden.square().mean() + (self.unused(inputs).sum() if self.uses else 0)


class Registered(Passed):
    """The unused layer is computed first, and its gradient comes last."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first = self.unused(inputs).sum() if self.uses else 0
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.square().mean() + first


def past_an_unused_layer(rank: int, world_size: int, kind: type[nn.Module]) -> tuple[int, int, int]:
    """Bytes of the buffers and of the plan, and reductions in the steps behind the one in which it was used after all."""
    torch.manual_seed(0)
    model, plain = kind(), kind()
    plain.load_state_dict(model.state_dict())
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    # A layer's weight and bias.
    engine = ZeroEngine(model, [sgd[0]], {"stage": 2, "bucket_bytes": 4 * (WIDTH + 1) * WIDTH + 64})
    inputs = torch.randn(world_size, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    most = 0
    for step in range(6):
        model.uses = plain.uses = step in (3, 4)
        before = sum(row.calls for row in engine.comm_report().rows if "reduce-scatter" in row.kind)
        model(inputs[rank]).backward()
        reduced = sum(row.calls for row in engine.comm_report().rows if "reduce-scatter" in row.kind) - before
        if step < 3:
            most = max(most, engine._step.store.held_bytes()["gradient buffers"])
        for each in inputs:
            (plain(each) / world_size).backward()
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    return most, state_plan(engine).gradient_buffers, reduced - len(engine.buckets)


@pytest.mark.parametrize("kind", [Passed, Registered])
def test_an_unused_parameter_does_not_hold_up_the_buckets_behind_it(kind):
    results = run_ranks(past_an_unused_layer, world_size=2, time_limit_s=60, keyword_arguments={"kind": kind})
    for most, planned, twice in results:
        assert most <= planned
        assert twice == 0
