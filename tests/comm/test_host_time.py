"""What a steady step asks of the host: as few messages as can be, and no walk over the model."""

import os
from collections import Counter

import pytest
import torch
from cells import short_of
from host_calls import count_calls as count_calls_of_engines
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from hf_zero.arithmetic import sum_of_squares, sums_of_squares
from hf_zero.buckets.bucket import FlatViews
from hf_zero.buckets.sharded import ShardedValues
from hf_zero.comm.control import Control
from hf_zero.comm.groups import receiving_threads
from hf_zero.engine.engine import ZeroEngine
from hf_zero.kernels.statistics import PART_NUMEL
from hf_zero.layout.slots import Interval

pytestmark = pytest.mark.timeout(120)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Model(nn.Module):
    """Some layers, and a buffer."""

    def __init__(self):
        super().__init__()
        self.entry, self.layers = nn.Linear(8, 8), nn.ModuleList([Layer() for _ in range(3)])
        self.register_buffer("places", torch.arange(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(inputs + self.places)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def count_calls(counts: Counter, holder: type, name: str) -> None:
    """Has each call of a method counted, a classmethod's too."""
    own = holder.__dict__[name]
    function = own.__func__ if isinstance(own, classmethod) else own

    def counted(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)

    setattr(holder, name, classmethod(counted) if isinstance(own, classmethod) else counted)


def calls_of_steady_steps(rank: int, world_size: int, stage: int, steps: int) -> dict[str, int]:
    """Of what is slow, in steps with clipping."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": stage})
    generator, counts = torch.Generator().manual_seed(rank), Counter()

    def step() -> None:
        model(torch.randn(4, 8, generator=generator)).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    watched = [(ShardedValues, "__torch_function__"), (nn.Module, "named_modules"), (Control, "_start")]
    for holder, name in watched:
        count_calls(counts, holder, name)
    for _ in range(steps):
        step()
    return {name: counts[name] for _, name in watched}


@pytest.mark.parametrize("stage", short_of([0, 1, 2, 3], [3]))
def test_a_steady_step_walks_over_no_modules_reads_no_sharded_parameter_and_agrees_twice(stage):
    arguments = {"stage": stage, "steps": 4}
    for counts in run_ranks(calls_of_steady_steps, world_size=2, time_limit_s=60, keyword_arguments=arguments):
        # On used parameters and, where gradients are sharded, on their norm.
        agreements = 4 if stage == 0 else 8
        assert counts == {"__torch_function__": 0, "named_modules": 0, "_start": agreements}


MOST_CALLS = {"hf_zero0": 680, "hf_zero1": 860, "hf_zero2": 880, "hf_zero3": 1950}
"""Of this package's functions, in a step of two layers of BERT (39 parameters): a tenth more than there are."""


@pytest.mark.slow
def test_a_step_calls_no_more_functions_than_it_did():
    arguments = {"engine_names": ["ddp", "fsdp2", *MOST_CALLS], "n_layer": 2, "steps": 2}
    found = run_ranks(count_calls_of_engines, world_size=2, time_limit_s=100, keyword_arguments=arguments)[0]
    for name, most in MOST_CALLS.items():
        assert found[name].package <= most, f"{name}: {found[name].functions}"
    for name in ("hf_zero1", "hf_zero2"):
        assert found[name].python < found["ddp"].python and found[name].operations < found["ddp"].operations
    assert found["hf_zero3"].python < 0.4 * found["fsdp2"].python


def policies_of_receiving_threads(rank: int, world_size: int) -> list[int]:
    """How the system schedules the threads in which gloo receives, those of the script's own group first."""
    scripts = receiving_threads()
    model = nn.Linear(4, 4)
    ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"stage": 2})
    ours = receiving_threads() - scripts
    return [os.sched_getscheduler(thread) for thread in (*scripts, *ours)]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="threads are scheduled in batch on Linux only")
def test_the_threads_that_receive_for_an_engine_take_no_busy_core_and_the_scripts_own_are_left_alone():
    policies = run_ranks(policies_of_receiving_threads, world_size=2, time_limit_s=60)
    if not any(policies):
        pytest.skip("this release of gloo does not name its threads")
    for script, *ours in policies:
        assert script == os.SCHED_OTHER
        assert ours and set(ours) == {os.SCHED_BATCH}


class Failing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


def gradients_behind_one_that_failed(rank: int, world_size: int, stage: int) -> list[list[float]]:
    """Whole gradients of a backward that came after one that failed, and the same without it."""
    found = []
    for fails in (True, False):
        torch.manual_seed(0)
        model = Model()
        engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"stage": stage})
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        if fails:
            with pytest.raises(ArithmeticError):
                model.layers[1](Failing.apply(model.layers[2](inputs))).sum().backward()
        model(inputs).backward()
        found.append(torch.cat([engine.full_grad(p).flatten() for p in model.parameters()]).tolist())
    return found


@pytest.mark.parametrize("stage", short_of([0, 1, 2], [2]))
def test_small_gradients_of_a_backward_that_failed_are_forgotten(stage):
    arguments = {"stage": stage}
    for after, plain in run_ranks(
        gradients_behind_one_that_failed, world_size=2, time_limit_s=60, keyword_arguments=arguments
    ):
        assert after == plain


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 4), min_size=1, max_size=3)), min_size=1, max_size=6),
    st.integers(0, 9),
)
def test_views_made_at_once_are_those_made_one_by_one(parts, tail):
    end, places = 0, []
    for gap, shape in parts:
        start = end + gap
        end = start + torch.Size(shape).numel()
        places.append((Interval(start, end), shape))
    flat = torch.arange(end + tail, dtype=torch.float32)
    views = FlatViews(places).of(flat)
    for view, (interval, shape) in zip(views, places, strict=True):
        one = flat[interval.start : interval.stop].view(shape)
        assert view.shape == one.shape and view.stride() == one.stride() and torch.equal(view, one)
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert view.numel() == 0 or view.data_ptr() == one.data_ptr()


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.lists(st.integers(0, 4), min_size=1, max_size=3)), min_size=1, max_size=6
    ),
    st.integers(0, 9),
)
def test_slots_filled_at_once_have_what_one_by_one_gives_them_and_zeros_between(parts, tail):
    end, places = 0, []
    for gap, shape in parts:
        start = end + gap
        end = start + torch.Size(shape).numel()
        places.append((Interval(start, end), shape))
    generator = torch.Generator().manual_seed(end)
    views, values = FlatViews(places), [torch.randn(shape, generator=generator) for _, shape in places]
    # As gradients of transposed weights are.
    values = [value.mT.contiguous().mT if value.ndim > 1 else value for value in values]
    for dtype in (torch.float32, torch.bfloat16):
        filled = torch.full((end + tail,), float("nan"), dtype=dtype)
        views.fill(filled, [value.to(dtype) for value in values], 1 / 3)
        one_by_one = torch.zeros(end + tail, dtype=dtype)
        for (interval, _), value in zip(places, values, strict=True):
            one_by_one[interval.start : interval.stop] = value.to(dtype).reshape(-1) * (1 / 3)
        assert torch.equal(filled, one_by_one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_squares_of_many_tensors_are_summed_to_the_same_bits(dtype):
    torch.manual_seed(0)
    sizes = [1, 7, 16, 31, 33, 96, 1000, 4096, 40_000, PART_NUMEL - 1, PART_NUMEL, PART_NUMEL + 5, 200_000]
    tensors = [torch.randn(size).mul_(3 * size).to(dtype) for size in sizes]
    tensors += [torch.zeros(0, dtype=dtype), torch.randn(32, 48).to(dtype), torch.randn(3, 5, 7).to(dtype)]
    for some in (tensors, tensors[:6], tensors[10:11], tensors[-2:]):
        one_by_one = torch.stack([sum_of_squares(tensor.reshape(-1)) for tensor in some])
        assert torch.equal(sums_of_squares(some), one_by_one)
