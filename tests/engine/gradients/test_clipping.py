"""Clipping that kernels do as they read: no one who looks, edits, adds or steps sees a gradient that is not clipped."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cells import examples
from hypothesis import given
from hypothesis import strategies as st
from small_kernel_steps import Small, small
from torch import nn

from hf_zero import GradScaler
from hf_zero.buckets.sharded import ClippedGradient
from hf_zero.comm.transport import Agreement
from hf_zero.engine.engine import ZeroEngine
from hf_zero.optimizer.holder import StepChoice

WITH_ROWS = {
    "masters": {"stage": 2, "param_dtype": "bfloat16"},
    "masters, stage 3": {"stage": 3, "param_dtype": "bfloat16", "bucket_bytes": "1KiB"},
    "moments in 8 bits": {"stage": 2, "param_dtype": "bfloat16", "moments": "8bit"},
}
"""Settings with which rows are no parameters, whose gradients anyone may add to."""
SIZES = (4200, 5, 48)


def gradients(engine: ZeroEngine) -> list[torch.Tensor]:
    return [row.tensor.grad for bucket in engine.buckets for row in bucket.rows]


def clipped(engine: ZeroEngine) -> list[bool]:
    """Of each row, whether its gradient is still to be multiplied."""
    return [isinstance(g, ClippedGradient) and g.coefficient is not None for g in gradients(engine)]


@pytest.mark.parametrize("setting", WITH_ROWS)
def test_a_clip_that_only_kernels_read_makes_no_pass_over_the_gradients(setting):
    model, optimizer, engine = small(SIZES, **WITH_ROWS[setting])
    model().backward()
    held = gradients(engine)
    before = [gradient.clone() for gradient in held]
    norm = engine.clip_grad_norm_(0.5)
    assert norm > 1 and all(clipped(engine))
    optimizer.step()
    assert all(torch.equal(g, b) for g, b in zip(held, before))


def test_gradients_of_parameters_and_those_that_torch_steps_are_clipped_at_once():
    whole = {"stage": 0}
    for more in (whole, {"stage": 2, "param_dtype": "bfloat16", "kernels": "never"}):
        model, _, engine = small(**more)
        model().backward()
        expected = [gradient * (0.5 / (engine.clip_grad_norm_(float("inf")) + 1e-6)) for gradient in gradients(engine)]
        engine.clip_grad_norm_(0.5)
        assert not any(clipped(engine))
        for gradient, other in zip(gradients(engine), expected):
            torch.testing.assert_close(gradient, other)
    model, _, engine = small(
        make_optimizer=lambda model: torch.optim.RMSprop(model.parameters()), **WITH_ROWS["masters"]
    )
    model().backward()
    engine.clip_grad_norm_(0.5)
    assert not any(clipped(engine))


READERS = {
    "an operation": lambda g: g + 0,
    "one on several": lambda g: torch._foreach_mul([g], 1.0)[0],
    "a name": lambda g: g.data,
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "a view": lambda g: g[:],
    "text": lambda g: (repr(g), g.data)[1],
    "keyword arguments": lambda g: torch.add(input=g, other=0),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_a_row_finds_it_clipped_once(reader):
    model, _, engine = small(**WITH_ROWS["masters"])
    model().backward()
    before = [gradient.clone() for gradient in gradients(engine)]
    norm = engine.clip_grad_norm_(0.5)
    for gradient, plain in zip(gradients(engine), before):
        # In the dtype of the step, whatever gradients wait in.
        expected = plain.float() * torch.clamp(0.5 / (norm + 1e-6), max=1.0)
        for _ in range(2):
            found = READERS[reader](gradient)
            assert type(found) is torch.Tensor and torch.equal(found, expected)
    assert not any(clipped(engine))


def clip(engine: ZeroEngine, _model: nn.Module, _optimizer: torch.optim.Optimizer, **options) -> None:
    engine.clip_grad_norm_(**options)


def clip_some(engine: ZeroEngine, model: Small, _optimizer: torch.optim.Optimizer) -> None:
    engine.clip_grad_norm_(0.7, parameters=[model.parts[0], model.parts[2]])


def clip_values(engine: ZeroEngine, _model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    engine.clip_grad_value_(0.01)


def look(engine: ZeroEngine, model: Small, _optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [engine.full_grad(model.parts[1])]


def accumulate(_engine: ZeroEngine, model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    (model() * 0.3).backward()


def edit(_engine: ZeroEngine, _model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    row = optimizer.param_groups[0]["params"][0]
    row.grad = row.grad.sign()


def double(_engine: ZeroEngine, _model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch._foreach_mul_([p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None], 2.0)


def drop(_engine: ZeroEngine, _model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][1].grad = None


def step(_engine: ZeroEngine, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
    model().backward()


def step_by_torch(engine: ZeroEngine, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["maximize"] = True
    step(engine, model, optimizer)
    optimizer.param_groups[0]["maximize"] = False


ACTS = {
    "clip": partial(clip, max_norm=0.5),
    "clip harder": partial(clip, max_norm=0.1),
    "measure": partial(clip, max_norm=float("inf")),
    "clip by another norm": partial(clip, max_norm=0.2, norm_type=3.0),
    "clip some": clip_some,
    "clip values": clip_values,
    "look": look,
    "accumulate": accumulate,
    "edit": edit,
    "double": double,
    "drop": drop,
    "step": step,
    "step by torch": step_by_torch,
}


@given(acts=st.lists(st.sampled_from(sorted(ACTS)), min_size=1, max_size=8), setting=st.sampled_from(sorted(WITH_ROWS)))
@examples(60)
def test_any_order_comes_to_the_bits_of_clipping_at_once(acts, setting):
    ends = []
    for at_once in (False, True):
        model, optimizer, engine = small(SIZES, **WITH_ROWS[setting])
        if at_once:
            engine._parts.holder.choice.scale_gradients = StepChoice().scale_gradients
        model().backward()
        seen = [ACTS[act](engine, model, optimizer) or [] for act in acts]
        assert not (at_once and any(clipped(engine)))
        optimizer.step()
        rows = [torch.as_tensor(row.tensor.detach()) for row in engine.state.rows()]
        ends.append([*(tensor for tensors in seen for tensor in tensors if tensor is not None), *rows])
    for later, once in zip(*ends, strict=True):
        assert torch.equal(later, once)


def test_hooks_before_the_step_see_clipped_gradients():
    model, optimizer, engine = small(**WITH_ROWS["masters"])
    seen = []
    hook = lambda opt, *_: seen.append(sum(p.grad.square().sum() for p in opt.param_groups[0]["params"]))  # noqa: E731
    optimizer.register_step_pre_hook(hook)
    model().backward()
    engine.clip_grad_norm_(0.5)
    optimizer.step()
    assert seen[0].sqrt() == pytest.approx(0.5, rel=1e-5)


def test_a_scaler_unscales_what_has_been_clipped():
    model, optimizer, engine = small(**WITH_ROWS["masters"])
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model()).backward()
    engine.clip_grad_norm_(512.0)
    scaler.unscale_(optimizer)
    norm = torch.stack([gradient.norm() for gradient in gradients(engine)]).norm()
    assert norm == pytest.approx(0.5, rel=1e-5)


def test_the_largest_gradient_of_all_ranks_is_nan_where_one_rank_has_nan():
    ranks = SimpleNamespace(exchange=lambda value: [1.0, value])
    assert Agreement(ranks).agree_largest(torch.tensor(float("nan"), dtype=torch.float64)).isnan()
