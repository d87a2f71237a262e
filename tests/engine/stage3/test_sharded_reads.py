"""Stage 3: values of parameters are read whole, or the read is refused by name; nobody is handed what stands in for them."""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import pytest
import torch
from shared_ranks import on_ranks, shared_ranks
from stage3_runs import FAR_AHEAD, SHARDED, Run, assert_equal, assert_same, same_as_ddp
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from training import Answer, gpt2

import hf_zero
from hf_zero.buckets.sharded import ShardedParametersError, are_hidden
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(120)

READS = {
    "clone": lambda p: p.clone(),
    "detach().clone()": lambda p: p.detach().clone(),
    "data.clone()": lambda p: p.data.clone(),
    "data.cpu()": lambda p: p.data.cpu(),
    "to": lambda p: p.to(torch.float64),
    "sum": lambda p: p.sum(),
    "times": lambda p: p * 2,
    "minus": lambda p: torch.ones(()) - p.data,
    "compared": lambda p: p == 0,
    "item": lambda p: p.reshape(-1)[0].item(),
    "slice": lambda p: p[:1],
    "list": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "copied from": lambda p: torch.empty(p.shape).copy_(p.data),
    "lerp": lambda p: torch.zeros(p.shape).lerp(p.data, 0.1),
    "foreach": lambda p: torch._foreach_norm([p]),
    "stack": lambda p: torch.stack([torch.zeros(p.shape), p]),
    "functional": lambda p: nn.functional.linear(torch.ones(1, p.shape[-1]), p),
    "to a vector": lambda p: nn.utils.parameters_to_vector([p]),
    "storage": lambda p: p.untyped_storage(),
    "pointer": lambda p: p.data_ptr(),
    "copy.deepcopy": lambda p: copy.deepcopy(p),
    "copy.deepcopy of data": lambda p: copy.deepcopy(p.data),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "torch.save of data": lambda p: torch.save({"weight": p.data}, io.BytesIO()),
    "pickle": lambda p: pickle.dumps(p),
}

LOOKS = [
    lambda p: (
        p.shape,
        p.size(),
        p.size(0),
        p.dim(),
        p.ndim,
        p.numel(),
        p.nelement(),
        len(p),
        p.dtype,
        p.device,
        p.layout,
    ),
    lambda p: (
        p.nbytes,
        p.element_size(),
        p.itemsize,
        p.is_floating_point(),
        torch.is_floating_point(p),
        p.is_complex(),
    ),
    lambda p: (
        p.requires_grad,
        p.is_leaf,
        p.grad_fn,
        p.is_cuda,
        p.is_meta,
        p.is_sparse,
        p.is_quantized,
        p.get_device(),
    ),
    lambda p: (p.data.shape, p.data.dtype, p.data.device, p.detach().numel(), p.data.ndimension()),
    lambda p: (
        isinstance(p, nn.Parameter),
        isinstance(p.data, nn.Parameter),
        torch.is_tensor(p),
        torch.is_tensor(p.data),
    ),
    lambda p: (
        torch.empty_like(p).stride(),
        torch.zeros_like(p.data).tolist(),
        type(torch.ones_like(p)),
        len(p.new_ones(2)),
    ),
]


@on_ranks(2)
def test_reading_a_sharded_parameter_names_it_and_the_way_out_and_looking_at_it_is_free(rank, world_size):
    run, plain = Run(rank, gpt2, SHARDED), dict(gpt2().named_parameters())
    for trained in (False, True):
        for name, parameter in run.model.named_parameters():
            assert [look(parameter) for look in LOOKS] == [look(plain[name]) for look in LOOKS]
            assert hash(parameter) == id(parameter) and parameter in {parameter}
            assert name in repr(parameter) and name in f"{parameter.data}"
            assert (parameter.grad is not None) == trained
        parameter = run.model.get_parameter("transformer.h.1.attn.c_attn.weight")
        for how, read in READS.items():
            with pytest.raises(
                ShardedParametersError,
                match=r"'transformer\.h\.1\.attn\.c_attn\.weight', which is sharded .*hf_zero\.gathered",
            ):
                read(parameter)
                pytest.fail(how)
        run.entry(**run.batch()).loss.backward()


@on_ranks(2)
def test_an_alias_taken_while_sharded_reads_the_values_that_the_parameter_has_when_it_is_whole(rank, world_size):
    """`p.data` taken while a parameter was sharded is the parameter, whenever it is read."""
    run = Run(rank, gpt2, SHARDED)
    aliases = {name: p.data for name, p in run.model.named_parameters()}
    run.step()
    with hf_zero.gathered(run.model):
        taken = {name: alias.clone() for name, alias in aliases.items()}
        assert_equal(taken, {name: p.detach() for name, p in run.model.named_parameters()})
        assert all(type(p) is nn.Parameter for p in run.model.parameters())
    with pytest.raises(ShardedParametersError, match=r"`clone` needs the values of 'transformer\.wte\.weight'"):
        aliases["transformer.wte.weight"].clone()
    run.engine.close()
    assert not any(are_hidden(p) for p in run.model.parameters())
    assert_equal({name: alias.clone() for name, alias in aliases.items()}, dict(run.model.named_parameters()))


# ---- averages ----


def averaging(run: Run) -> None:
    """A moving average as scripts keep it."""
    with hf_zero.gathered(run.model):
        averages = [p.detach().clone() for p in run.model.parameters()]
    for _ in range(3):
        run.step()
        with hf_zero.gathered(run.model), torch.no_grad():
            torch._foreach_lerp_(averages, list(run.model.parameters()), 0.1)
    run.seen += averages


def test_a_moving_average_inside_gathered_is_ddps():
    shared_ranks.run(same_as_ddp, script=averaging, variants=[SHARDED], make=gpt2)


# ---- penalties on parameters ----


def penalty(model: nn.Module) -> torch.Tensor:
    return 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


class Penalised(nn.Module):
    """Reads parameters of layers that it is not in the forward of; some through a list that no module knows."""

    def __init__(self):
        super().__init__()
        self.inner = gpt2()
        self.kept = [self.inner.transformer.h[1].mlp.c_fc.weight]

    def forward(self, **batch) -> Answer:
        return Answer(self.inner(**batch).loss + penalty(self) + self.kept[0].abs().sum())


def training(run: Run) -> None:
    for _ in range(3):
        run.step()


def penalising(run: Run) -> None:
    for backward_inside in (False, True, False):
        loss = run.entry(**run.batch()).loss
        with hf_zero.gathered(run.model):
            loss = loss + penalty(run.model)
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        run.seen.append(loss.item())
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize(("make", "script"), [(Penalised, training), (gpt2, penalising)])
def test_a_penalty_on_parameters_in_the_forward_or_inside_gathered_trains_as_under_ddp(make, script):
    shared_ranks.run(same_as_ddp, script=script, variants=[SHARDED, FAR_AHEAD], make=make)


@on_ranks(2)
def test_a_penalty_outside_of_forward_and_gathered_is_refused_and_training_goes_on(rank, world_size):
    run, smooth = (Run(rank, gpt2, SHARDED) for _ in range(2))
    for each in (run, smooth):
        each.step()
    with pytest.raises(ShardedParametersError, match=r"`pow` needs the values of '.*hf_zero\.gathered\(model\)"):
        penalty(run.model)
    for each in (run, smooth):
        each.step()
    assert_same(run, smooth)


# ---- torch.func ----


def scores(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (vmap(grad(lambda row: model(row).sum()))(rows) - rows).square().mean()


def gradients_of_rows(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    of_row = grad(lambda parameters, row: functional_call(model, parameters, (row,)).sum())
    return sum(each.square().sum() for each in vmap(of_row, in_dims=(None, 0))(parameters, rows).values())


def directional(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return jvp(model, (rows,), (torch.ones_like(rows),))[1].square().mean()


def jacobian(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return jacrev(lambda rows: model(rows).sum(0))(rows).square().mean()


TRANSFORMS = (scores, gradients_of_rows, directional, jacobian, lambda model, rows: vmap(model)(rows).square().mean())


def trains_with(transform: Callable, settings: dict | None, inside: Callable) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if settings is not None:
        ZeroEngine(model, [optimizer], settings)
    rows, seen = torch.arange(24.0).view(3, 8) / 24, []
    for _ in range(2):
        with inside(model):
            found = transform(model, rows)
        loss = model(rows).square().mean()
        loss = loss + found if found.requires_grad else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [found.item(), loss.item()]
    return seen


@contextmanager
def gathered_without_graph(model: nn.Module):
    with torch.no_grad(), hf_zero.gathered(model):
        yield


@on_ranks(2)
def test_torch_func_gives_the_values_of_a_plain_model_or_is_refused_by_name(rank, world_size):
    bare, without_graph = (lambda _model: nullcontext()), (lambda _model: torch.no_grad())
    for transform in TRANSFORMS:
        expected = trains_with(transform, None, bare)
        for stage in (1, 2):
            for inside in (bare, hf_zero.gathered):
                assert trains_with(transform, {"stage": stage}, inside) == expected, (transform, stage)
        for settings in ({"stage": 3}, {"stage": 3, "unit_bytes": 0, "reshard_after_forward": False}):
            for inside in (bare, hf_zero.gathered, hf_zero.unsharded):
                with pytest.raises(RuntimeError, match=r"torch\.func.*hf_zero\.gathered\(model\).*`stage: 2`"):
                    trains_with(transform, settings, inside)
            values = trains_with(transform, None, without_graph)
            assert trains_with(transform, settings, gathered_without_graph) == values, transform
