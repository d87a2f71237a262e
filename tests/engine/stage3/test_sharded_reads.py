"""Stage 3: values of parameters are read whole, or the read is refused by name; nobody is handed what stands in for them."""

import copy
import io
import pickle

import pytest
import torch
from shared_ranks import shared_ranks
from stage3_runs import FAR_AHEAD, SHARDED, Run, assert_equal, assert_same, run_on_ranks, same_as_ddp
from torch import nn
from training import Answer, gpt2

import hf_zero
from hf_zero.buckets.sharded_parameter import ShardedParametersError, are_hidden

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


def reads_while_sharded(rank: int, world_size: int) -> None:
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


def test_reading_a_sharded_parameter_names_it_and_the_way_out_and_looking_at_it_is_free():
    run_on_ranks(reads_while_sharded)


def names_taken_before(rank: int, world_size: int) -> None:
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


def test_an_alias_taken_while_sharded_reads_the_values_that_the_parameter_has_when_it_is_whole():
    run_on_ranks(names_taken_before)


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


def penalises_outside(rank: int, world_size: int) -> None:
    run, smooth = (Run(rank, gpt2, SHARDED) for _ in range(2))
    for each in (run, smooth):
        each.step()
    with pytest.raises(ShardedParametersError, match=r"`pow` needs the values of '.*hf_zero\.gathered\(model\)"):
        penalty(run.model)
    for each in (run, smooth):
        each.step()
    assert_same(run, smooth)


def test_a_penalty_outside_of_forward_and_gathered_is_refused_and_training_goes_on():
    run_on_ranks(penalises_outside)
