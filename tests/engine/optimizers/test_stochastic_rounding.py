"""bfloat16 without masters: reproducible on any layout, and it learns where rounding to the nearest stands still."""

import math
from dataclasses import replace

import pytest
import torch
from cells import slow
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from ranks import run_ranks
from saved_engines import save_engine
from shared_ranks import on_ranks
from torch import nn
from training import Job, Outcome, adamw_in_two_groups, gpt2, of_one_seed, steps, train

from hf_zero import arithmetic
from hf_zero.config import ConfigError
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import state_plan
from hf_zero.integrations.state_io import load_engine
from hf_zero.optimizer.places import STEP

pytestmark = pytest.mark.timeout(180)

BY_CHANCE = {"param_dtype": "bfloat16", "rounding": "stochastic", "grad_accumulation": "local"}
NEAREST = {"param_dtype": "bfloat16", "grad_accumulation": "local"}


LAYOUTS = [{"stage": 0}, {"stage": 1}, {"stage": 2, "bucket_bytes": "7KiB"}, {"stage": 3, "bucket_bytes": "20KiB"}]


def on_layouts(rank: int, world_size: int, layouts: list[dict]) -> tuple[list[float], list[float]]:
    """The losses, by chance and from masters, of the same batch on every rank."""
    job = Job(make_batch=of_one_seed)
    runs: list[Outcome] = []
    for more in layouts:
        runs.append(train(rank, world_size, replace(job, settings={**BY_CHANCE, **more})))
        assert runs[-1].equals(runs[0]), f"{more}: {runs[-1].loss_error(runs[0])}"
    return runs[0].losses, train(rank, world_size, replace(job, settings={**NEAREST, "stage": 2})).losses


@pytest.mark.parametrize("layouts", [LAYOUTS[2:], slow(LAYOUTS)], ids=["some", "all"])
def test_bits_depend_on_the_parameter_and_the_step_alone(layouts):
    limited = {"time_limit_s": 120, "keyword_arguments": {"layouts": layouts}}
    by_world = {world_size: run_ranks(on_layouts, world_size=world_size, **limited) for world_size in (1, 2)}
    (losses, exact), *others = [outcome for outcomes in by_world.values() for outcome in outcomes]
    for other, _ in others:
        assert other == losses
    # One run in bfloat16 beside another: as near as its digits allow, and learning.
    assert losses == pytest.approx(exact, rel=0.02)
    assert losses[-1] < losses[0]


def prepared(settings: dict) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = adamw_in_two_groups(model)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


@on_ranks(2)
def test_edits_at_stage_3_go_into_the_next_step(rank, world_size):
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 3})
    with engine.gathered(model.transformer.wpe, writeback=True), torch.no_grad():
        model.transformer.wpe.weight.fill_(0.25)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    steps(model, optimizer, range(1))
    with engine.gathered(model.transformer.wpe):
        assert torch.equal(model.transformer.wpe.weight, torch.full_like(model.transformer.wpe.weight, 0.25))


@on_ranks(2, time_limit_s=120)
def test_a_run_goes_on_bit_for_bit_at_another_stage(rank, world_size, tmp_path):
    folder = str(tmp_path)
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 2, "bucket_bytes": "20KiB"})
    steps(model, optimizer, range(2))
    assert {row.kind for row in engine.state.rows()} == {"exp_avg", "exp_avg_sq"}
    assert all(state[STEP] == 2 for state in engine.state.scalars().values())
    save_engine(engine, folder)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = steps(model, optimizer, range(2, 4))
    for settings in ({**BY_CHANCE, "stage": 3}, {**BY_CHANCE, "stage": 1}):
        model, optimizer, engine = prepared(settings)
        model.load_state_dict(weights)
        load_engine(engine, f"{folder}/zero")
        assert steps(model, optimizer, range(2, 4)) == expected
    # Neither kind of run is lost to the other.
    model, optimizer, engine = prepared({**NEAREST, "stage": 2})
    model.load_state_dict(weights)
    load_engine(engine, f"{folder}/zero")
    assert steps(model, optimizer, range(2, 4)) == pytest.approx(expected, rel=0.02)
    save_engine(engine, folder)
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 2})
    load_engine(engine, f"{folder}/zero")
    assert all(state[STEP] == 2 for state in engine.state.scalars().values())


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))

    def forward(self) -> torch.Tensor:
        return self.weight.float().sum()


def drifted(settings: dict | None, steps: int = 100, lr: float = 1e-4) -> torch.Tensor:
    """Weights of 1 after `steps` updates of -lr, each far smaller than half of the last digit of 1 (2^-8)."""
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if settings is not None:
        ZeroEngine(model, [optimizer], settings)
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().double()


def test_it_learns_where_the_nearest_stands_still_and_is_right_on_average():
    assert torch.equal(drifted(None), torch.ones(4096, dtype=torch.float64))
    weights = drifted({"stage": 2, "rounding": "stochastic"})
    # Each weight's variance is at most steps x lr x 2^-8; the mean of 4096 stays within five of its standard deviations.
    bound = 5 * (100 * 1e-4 * 2**-8 / 4096) ** 0.5
    assert abs(weights.mean().item() - 0.99) < bound
    assert weights.unique().numel() > 1


def test_memory_is_ten_bytes_a_parameter():
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 2, "bucket_bytes": "1GiB"})
    steps(model, optimizer, range(1))
    rows = {row.kind: row.bytes for row in engine.memory_report().rows}
    numel = sum(p.numel() for p in model.parameters())
    padded = sum(bucket.layout.numel for bucket in engine.buckets)
    assert rows["fp32 master"] == state_plan(engine).masters == 0
    assert rows["parameters"] == 2 * padded and rows["optimizer state"] == 8 * numel
    assert all(bucket.master.untyped_storage().nbytes() == 4 for bucket in engine.buckets)


def test_an_edit_goes_into_the_next_step():
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 2})
    with engine.gathered(writeback=True):
        model.transformer.wte.weight.data.fill_(0.25)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    steps(model, optimizer, range(1))
    assert torch.equal(model.transformer.wte.weight, torch.full_like(model.transformer.wte.weight, 0.25))


def test_what_it_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"`rounding: stochastic` is for bfloat16 parameters.*torch\.float32"):
        prepared({"stage": 2, "rounding": "stochastic"})
    with pytest.raises(ConfigError, match=r"keeps no master that `offload\.optimizer: cpu` could move"):
        prepared({"stage": 2, "rounding": "stochastic", "offload": {"optimizer": "cpu"}})


def test_philox_gives_its_published_numbers():
    # The known answer of the Random123 library for counter and key 0.
    assert [int(word) for word in arithmetic.philox(0, torch.tensor([0]))] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]


@given(seed=st.integers(0, 2**63 - 1), numel=st.integers(0, 5000), offset=st.integers(0, 2**40))
@limits(deadline=None, max_examples=50)
def test_stochastic_rounding_goes_to_one_of_the_two_beside(seed, numel, offset):
    source = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    out, again = torch.zeros(2, numel, dtype=torch.bfloat16).unbind()
    arithmetic.round_stochastically(source, out, seed=seed, offset=offset)
    arithmetic.round_stochastically(source, again, seed=seed, offset=offset)
    assert torch.equal(out, again)
    below = (source.view(torch.int32) & -(1 << 16)).view(torch.float32)
    above = (below.view(torch.int32) + (1 << 16)).view(torch.float32)
    assert bool(((out.float() == below) | (out.float() == above)).all())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_stochastic_rounding_is_right_on_average(share):
    numel = 1 << 17
    source = torch.full((numel,), 1.0 + share * 2.0**-7)
    out = torch.zeros(numel, dtype=torch.bfloat16)
    arithmetic.round_stochastically(source, out, seed=5)
    up = (out > 1).double().mean().item()
    # Five standard deviations of a share of 131,072 throws, and the share's own 16 bits.
    assert abs(up - share) <= 5 * math.sqrt(share * (1 - share) / numel) + 2.0**-16


def test_a_shard_gets_the_bits_of_its_place_in_the_whole():
    source = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    whole, shard = torch.zeros(5000, dtype=torch.bfloat16), torch.zeros(5000 - 2048, dtype=torch.bfloat16)
    arithmetic.round_stochastically(source, whole, seed=9, offset=64)
    arithmetic.round_stochastically(source[2048:], shard, seed=9, offset=64 + 2048 // 8)
    assert torch.equal(whole[2048:], shard)
    assert arithmetic.counters_for(5000) == 640
    other = torch.zeros_like(whole)
    arithmetic.round_stochastically(source, other, seed=9, offset=64 + 640)
    assert not torch.equal(whole, other)


def test_stochastic_rounding_keeps_what_bfloat16_holds():
    kept = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, -3.0, 2.0**-133])
    source = torch.cat([kept, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    out = torch.zeros(10, dtype=torch.bfloat16)
    for seed in range(50):
        arithmetic.round_stochastically(source, out, seed=seed)
        assert torch.equal(out[:5].float(), kept[:5]) and torch.equal(out[6:8].float(), kept[6:])
        assert bool(out[[5, 8, 9]].isnan().all())
    with pytest.raises(ValueError, match="seed is -1"):
        arithmetic.round_stochastically(source, out, seed=-1)
