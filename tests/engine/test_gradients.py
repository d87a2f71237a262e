"""Gradients between backward and step: read, zeroed, added up over backwards, and such as come after their bucket was sent."""

import contextlib
import copy
import io
import itertools
import pickle
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cells import short_of, slow
from loops import engine_or_ddp
from shared_ranks import on_ranks, on_shared_ranks, run_on_ranks, shared_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import VOCABULARY, Unruly, bert, gpt2, gpt2_batch

from hf_zero.buckets.sharded_gradient import ShardedGradientError
from hf_zero.comm.collective_log import ENDED, LABEL, STARTED
from hf_zero.engine.engine import ZeroEngine
from hf_zero.hooks.weak import engine_attached_to
from hf_zero.integrations.announce import state_plan
from hf_zero.layout import gradient_buffers
from hf_zero.step.nonfinite import NonFiniteGradientError
from hf_zero.step.reductions import ReplicatedReduction

pytestmark = pytest.mark.timeout(180)


def built(stage: int, make=gpt2, optimizer=torch.optim.SGD, **settings):
    torch.manual_seed(0)
    model = make()
    opt = optimizer(model.parameters(), lr=0.1)
    return model, opt, ZeroEngine(model, [opt], {"stage": stage, "bucket_bytes": "20KiB", **settings})


def batch(rank: int, seed: int = 0):
    return gpt2_batch(torch.Generator().manual_seed(10 * seed + rank), 2)


@cache
def whole_gradients(world_size: int, *seeds: int) -> dict[str, torch.Tensor]:
    """The mean over ranks of the gradients summed over `seeds`, by one process."""
    torch.manual_seed(0)
    model = gpt2()
    for seed in seeds:
        for rank in range(world_size):
            (model(**batch(rank, seed)).loss / world_size).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def check(engine: ZeroEngine, model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, p in model.named_parameters():
        torch.testing.assert_close(engine.full_grad(p), expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", short_of([0, 1, 2], [0, 2]))
@pytest.mark.short_cells("2")
@on_shared_ranks
def test_several_backward_calls_add_up(rank, world_size, stage):
    model, optimizer, engine = built(stage)
    for seed in (1, 2, 3):
        model(**batch(rank, seed)).loss.backward()
    check(engine, model, whole_gradients(world_size, 1, 2, 3))
    optimizer.step()
    optimizer.zero_grad()
    first, second = model(**batch(rank, 1)).loss, model(**batch(rank, 2)).loss
    (first + second).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.short_cells("0")
@on_shared_ranks
def test_the_agreement_on_used_parameters_is_on_its_way_while_reductions_are_waited_for(rank, world_size, stage):
    model, _, engine = built(stage)
    model(**batch(rank)).loss.backward()
    entries = engine.transport.watch.log.entries
    [agreement] = [entry for entry in entries if "used parameters" in entry[LABEL].kind]
    reductions = [entry for entry in entries if "gradients" in entry[LABEL].kind]
    assert all(entry[STARTED] <= agreement[STARTED] for entry in reductions)
    assert all(agreement[STARTED] < entry[ENDED] < agreement[ENDED] for entry in reductions[-2:])


@pytest.mark.parametrize("by", ["model", "optimizer"])
@pytest.mark.parametrize("stage", short_of([0, 1, 2], [0, 2]))
@pytest.mark.short_cells("0-optimizer", "2-model")
@on_shared_ranks
def test_zero_grad_drops_what_was_reduced(rank, world_size, stage, by):
    model, optimizer, engine = built(stage)
    model(**batch(rank, 1)).loss.backward()
    (model if by == "model" else optimizer).zero_grad()
    model(**batch(rank, 2)).loss.backward()
    check(engine, model, whole_gradients(world_size, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (model if by == "model" else optimizer).zero_grad()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), f"{name} moved by a gradient that was zeroed"


# Each way of dropping gradients and each of keeping them once; the other pairs are in the long run.
ACCUMULATING = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 2, "grad_accumulation": "local"}]
DROPPED = {
    ("optimizer", True): ACCUMULATING[2:],
    ("optimizer", False): ACCUMULATING[:1],
    ("model", True): ACCUMULATING[1:2],
}


@pytest.mark.parametrize(
    ("settings", "by", "set_to_none"),
    [
        pytest.param(settings, *way, id=f"{settings}-{way}", marks=[] if settings in short else pytest.mark.slow)
        for settings in ACCUMULATING
        for way, short in DROPPED.items()
    ],
)
@pytest.mark.short_cells("{'stage': 2}-('optimizer', True)")
@on_shared_ranks
def test_zero_grad_drops_what_was_not_yet_reduced(rank, world_size, settings, by, set_to_none):
    model, optimizer, engine = built(**settings)
    zero_grad = optimizer.zero_grad if by == "optimizer" else model.zero_grad
    with engine.no_sync():
        model(**batch(rank, 1)).loss.backward()
    zero_grad(set_to_none=set_to_none)
    model(**batch(rank, 2)).loss.backward()
    check(engine, model, whole_gradients(world_size, 2))
    # Once more with a reduced gradient beneath, and twice after it: nothing that was dropped comes back.
    with engine.no_sync():
        model(**batch(rank, 3)).loss.backward()
    zero_grad(set_to_none=set_to_none or by == "model")
    for seeds in ([4], [4, 5]):
        model(**batch(rank, seeds[-1])).loss.backward()
        check(engine, model, whole_gradients(world_size, *seeds))
    optimizer.step()


@pytest.mark.parametrize(
    "settings", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 2, "grad_accumulation": "local"}], ids=str
)
@pytest.mark.short_cells("{'stage': 2}", "{'stage': 2, 'grad_accumulation': 'local'}")
@on_shared_ranks
def test_no_sync_after_a_reduced_backward_and_nested(rank, world_size, settings):
    model, _, engine = built(**settings)
    model(**batch(rank, 1)).loss.backward()
    with engine.no_sync():
        model(**batch(rank, 2)).loss.backward()
        with engine.no_sync():
            model(**batch(rank, 3)).loss.backward()
    model(**batch(rank, 4)).loss.backward()
    check(engine, model, whole_gradients(world_size, 1, 2, 3, 4))


class LastFirst(nn.Module):
    """The first bucket contains `shift`. The forward adds `shift` first, so its gradient comes last and delays the bucket."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(5))
        self.shift = nn.ParameterList([torch.randn(64)])

    def loss_of(self, rank: int, number: int, layers: Sequence[int], shifting: Sequence[int]) -> torch.Tensor:
        """The loss of a rank's micro-batch, which uses some layers, and `shift` on some ranks."""
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        x = x + self.shift[0] if rank in shifting else x
        for layer in layers:
            x = self.layers[layer](x)
        return x.square().mean()

    def forward(self, *arguments) -> torch.Tensor:
        return self.loss_of(*arguments)


EVERY, NONE, BOTH = range(5), (), (0, 1)


@pytest.mark.parametrize(
    ("stage", "passes"),
    [
        (2, [(EVERY, BOTH), (EVERY, BOTH)]),
        (2, [(EVERY, BOTH), (EVERY, NONE)]),
        (2, [(EVERY, (1,)), (EVERY, (0,))]),
        # Stage 1 keeps only the buffer of the bucket with `shift`, so the other buckets share the pool.
        (1, [([4], BOTH), (EVERY, BOTH)]),
        (1, [([4], BOTH), (EVERY, NONE)]),
    ],
    ids=["late", "not used again", "on either rank", "late in a lasting buffer", "not used again in a lasting buffer"],
)
@on_shared_ranks
def test_a_sum_of_micro_batches_has_ddps_bits_although_its_bucket_starts_before_the_sum_is_complete(
    rank, world_size, stage, passes
):
    model, _, engine = built(stage, LastFirst, grad_accumulation="local")
    torch.manual_seed(0)
    expected = LastFirst()
    sums = {name: torch.zeros_like(p) for name, p in expected.named_parameters()}
    for each in range(world_size):
        expected.zero_grad()
        for number, micro_batch in enumerate(passes):
            expected.loss_of(each, number, *micro_batch).backward()
        for name, p in expected.named_parameters():
            sums[name] += 0 if p.grad is None else p.grad / world_size
    for number, micro_batch in enumerate(passes):
        with contextlib.nullcontext() if number else engine.no_sync():
            model(rank, number, *micro_batch).backward()
    for name, p in model.named_parameters():
        assert torch.equal(engine.full_grad(p), sums[name]), name
    entries = engine.transport.watch.log.entries
    assert 2 in Counter(entry[LABEL] for entry in entries if "gradients" in entry[LABEL].kind).values()


def never_reduced(rank: int, world_size: int, settings: dict) -> str:
    model, optimizer, engine = built(**settings)
    with engine.no_sync():
        model(**batch(rank, 1)).loss.backward()
    with pytest.raises(RuntimeError, match="never reduced") as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2, "grad_accumulation": "local"}], ids=str)
def test_step_on_unreduced_gradients_is_refused(settings):
    assert "outside no_sync" in shared_ranks.run(never_reduced, settings=settings)[0]


@pytest.mark.parametrize("stage", short_of([1, 2, 3], [2, 3]))
@on_shared_ranks
def test_a_gradient_set_by_hand_is_not_passed_over(rank, world_size, stage):
    model, optimizer, _ = built(stage)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ShardedGradientError, match=r"was set by hand.*`stage: 0`"):
        optimizer.step()


def mask_of(grad: torch.Tensor) -> torch.Tensor:
    return torch.arange(grad.numel()).view(grad.shape) % 3 == 0


EDITS = {
    "noise": lambda grad: grad.add_(torch.arange(grad.numel()).view(grad.shape) * 0.1),
    "noise of the form": lambda grad: torch.manual_seed(3) and grad.add_(torch.randn_like(grad)),
    "a number": lambda grad: grad.add_(0.1),
    "decay": lambda grad: grad.add_(torch.ones(grad.shape), alpha=0.1),
    "+=": lambda grad: grad.__iadd__(torch.ones(grad.shape)),
    "sub_": lambda grad: grad.sub_(torch.full_like(grad, 0.1), alpha=2.0),
    "a scale": lambda grad: grad.mul_(0.5),
    "a scale of each column": lambda grad: grad.mul_(torch.arange(grad.shape[-1])),
    "a tensor without dimensions": lambda grad: grad.div_(torch.tensor(3.0)),
    "data": lambda grad: grad.data.add_(0.1),
    "detached": lambda grad: grad.detach().mul_(0.5),
    "copy_": lambda grad: grad.copy_(torch.arange(grad.numel()).view(grad.shape)),
    "lerp_": lambda grad: grad.lerp_(torch.ones(grad.shape), 0.1),
    "clamp_": lambda grad: grad.clamp_(-0.01, 0.02),
    "nan_to_num_": lambda grad: torch.nan_to_num_(grad),
    "masked_fill_": lambda grad: grad.masked_fill_(mask_of(grad), 2.0),
    "addcmul_": lambda grad: grad.addcmul_(torch.ones(grad.shape), torch.full(grad.shape, 2.0), value=0.1),
    "fill_": lambda grad: grad.fill_(0.25),
}
GATHERED_EDITS = {
    "an index": lambda grad: grad.__setitem__(0, 0.0),
    "indices": lambda grad: grad.__setitem__(torch.tensor([0, 2]), 1.0),
    "a mask": lambda grad: grad.__setitem__(mask_of(grad), 0.0),
    "a slice": lambda grad: grad[:2].zero_(),
    "a slice of data": lambda grad: grad.data[1:].mul_(0.5),
    "a part of a view": lambda grad: grad.view(-1)[3:].add_(1.0),
    "a chunk": lambda grad: grad.chunk(2)[0].fill_(0.1),
    "transposed": lambda grad: grad.t().mul_(2.0),
    "another part": lambda grad: grad[:2].copy_(grad[-2:]),
    "a view from before an edit": lambda grad: [view := grad.view(-1), grad.mul_(2.0), grad.add_(view.sum())],
    "foreach": lambda grad: torch._foreach_mul_([grad], 0.3),
    "foreach, tensors": lambda grad: torch._foreach_add_([grad], [torch.ones(grad.shape)]),
    "sums": lambda grad: grad.cumsum_(0),
    "a norm": lambda grad: grad.div_(grad.norm()),
    "itself": lambda grad: grad.add_(grad),
    "sorted": lambda grad: grad.copy_(grad.sort(0)[0]),
    "an output": lambda grad: torch.mul(grad, 2.0, out=grad),
    "one of several outputs": lambda grad: torch.sort(grad, 0, out=(grad, torch.zeros(grad.shape, dtype=torch.long))),
}
REFUSED_EDITS = {
    "data replaced": lambda grad: setattr(grad, "data", torch.ones(grad.shape)),
    "another form": lambda grad: grad.resize_(1),
    "another form in place": lambda grad: grad.t_(),
}
READS = {
    "norm": lambda grad: grad.norm(),
    "largest": lambda grad: grad.abs().max(),
    "finite": lambda grad: torch.isfinite(grad).all(),
    "flat": lambda grad: torch.cat([grad.view(-1), grad.flatten()]),
    "a row": lambda grad: grad[0].sum() + grad.view(-1)[3],
    "transposed": lambda grad: grad.t() + 1,
    "several results": lambda grad: grad.max(0)[0],
    "a copy": lambda grad: torch.zeros_like(grad).copy_(grad),
    "numpy": lambda grad: torch.from_numpy(grad.detach().cpu().numpy().copy()),
    "numpy of a part": lambda grad: torch.from_numpy(grad[0].numpy().copy()),
    "a list": lambda grad: torch.tensor(grad.tolist()),
    "a number": lambda grad: torch.tensor(grad.abs().max().item()),
    "iterated": lambda grad: torch.stack(list(grad)).sum(),
    "compared": lambda grad: torch.tensor(bool((grad == grad).all())),
}


@pytest.mark.short_cells("2", "3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_shared_ranks
def test_an_edit_of_a_sharded_gradient_is_made_or_raises(rank, world_size, stage):
    warnings.simplefilter("ignore")
    model, _, engine = built(stage)
    names = ["transformer.ln_f.weight", "transformer.h.0.attn.c_attn.weight", "transformer.wte.weight"]
    expected = whole_gradients(world_size, 1)
    for edit in (*EDITS.values(), *GATHERED_EDITS.values()):
        model(**batch(rank, 1)).loss.backward()
        changed = {name: gradient.clone() for name, gradient in expected.items()}
        for name in names:
            edit(model.get_parameter(name).grad)
            edit(changed[name])
        check(engine, model, changed)
        model.zero_grad()
    for what, edit in REFUSED_EDITS.items():
        model(**batch(rank, 1)).loss.backward()
        try:
            with pytest.raises((ShardedGradientError, RuntimeError)):
                edit(model.get_parameter(names[1]).grad)
        except pytest.fail.Exception as silent:
            raise AssertionError(f"{what}: neither made nor refused") from silent
        check(engine, model, expected)
        model.zero_grad()


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_shared_ranks
def test_a_read_of_a_sharded_gradient_sees_the_values_of_ddp(rank, world_size, stage):
    warnings.simplefilter("ignore")
    model, optimizer, engine = built(stage)
    copied = copy.deepcopy(model)
    under_ddp = DistributedDataParallel(copied)
    for each in (model, under_ddp):
        each(**batch(rank, 1)).loss.backward()
    for name in ("transformer.ln_f.weight", "transformer.h.0.attn.c_attn.weight", "transformer.wte.weight"):
        own, its = model.get_parameter(name).grad, copied.get_parameter(name).grad
        for what, read in READS.items():
            found, expected = read(own), read(its)
            assert type(found) is torch.Tensor and torch.equal(found, expected), (name, what)
    optimizer.step()
    with pytest.raises(ShardedGradientError, match=r"between the last backward and optimizer\.step"):
        model.get_parameter("transformer.ln_f.weight").grad.norm()
    engine.close()


def read_and_clipped(rank: int, stage: int | None, micro_batches: int, **settings: Any) -> list[torch.Tensor]:
    """Trains with torch's clips, which read and edit `p.grad`, and returns norms and parameters. None trains with DDP."""
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    entry, engine, norms = model, None, []
    if stage is None:
        entry = DistributedDataParallel(model)
    else:
        engine = ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "20KiB", **settings})
    for step in range(2):
        for number in range(micro_batches):
            entry(**batch(rank, 10 * step + number)).loss.backward()
        parameters = list(model.parameters())
        norms.append(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
        model.get_parameter("transformer.wte.weight").grad[:3] = 0.0
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=(2.0, float("inf"))[step]))
        torch.nn.utils.clip_grad_value_(parameters, 0.01)
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return [*norms, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize("world_size", [2, slow(3)])
@on_ranks()
def test_torchs_clips_train_as_under_ddp(rank, world_size):
    warnings.simplefilter("ignore")
    ways: dict[int, dict] = {1: {}, 2: {"grad_accumulation": "local"}, 3: {"offload": {"optimizer": "cpu"}}}
    for micro_batches in (1, 2):
        expected = read_and_clipped(rank, None, micro_batches)
        for stage, settings in ways.items():
            found = read_and_clipped(rank, stage, micro_batches, **settings)
            if (world_size, micro_batches) == (2, 1):
                assert all(map(torch.equal, found, expected)), (stage, settings)
            for own, its in zip(found, expected, strict=True):
                torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-5)


def edited(rank: int, stage: int | None, micro_batches: int, **settings: Any) -> list[torch.Tensor]:
    """Trains with noise, a mask and decay in the gradients, before and after a clip; None trains with DDP."""
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    entry, engine = model, None
    if stage is None:
        entry = DistributedDataParallel(model)
    else:
        engine = ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "20KiB", **settings})
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for number in range(micro_batches):
            entry(**batch(rank, 10 * step + number)).loss.backward()
        for name, parameter in model.named_parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
            if "mlp" in name:
                parameter.grad.mul_(mask_of(parameter))
        if step % 2:
            (
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
                if engine is None
                else engine.clip_grad_value_(0.02)
            )
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [2, slow(3)])
@on_ranks()
def test_edited_gradients_train_as_under_ddp(rank, world_size):
    ways: list[dict] = [{}, {"grad_accumulation": "local"}, {"offload": {"optimizer": "cpu"}}]
    for micro_batches in (1, 2):
        expected = edited(rank, None, micro_batches)
        for stage, settings in itertools.product((1, 2, 3), ways):
            found = edited(rank, stage, micro_batches, **settings)
            if (world_size, micro_batches) == (2, 1):
                assert all(map(torch.equal, found, expected)), (stage, settings)
            for own, its in zip(found, expected, strict=True):
                torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_shared_ranks
def test_an_edit_of_a_sharded_gradient_within_a_backward_raises(rank, world_size, stage):
    model, _, _ = built(stage)
    parameter = model.get_parameter("transformer.ln_f.weight")
    model(**batch(rank, 1)).loss.backward()
    loss = model(**batch(rank, 2)).loss
    loss.register_hook(lambda _: parameter.grad.add_(torch.ones(parameter.shape), alpha=0.5))
    with pytest.raises(ShardedGradientError, match="cannot read or change"):
        loss.backward()


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_shared_ranks
def test_an_edit_of_a_gradient_that_is_partly_reduced_raises(rank, world_size, stage):
    model, _, engine = built(stage, grad_accumulation="local")
    parameter = model.get_parameter("transformer.ln_f.weight")
    model(**batch(rank, 1)).loss.backward()
    with engine.no_sync():
        model(**batch(rank, 2)).loss.backward()
        with pytest.raises(ShardedGradientError, match="cannot read or change"):
            parameter.grad.mul_(2.0)
    model(**batch(rank, 3)).loss.backward()
    check(engine, model, whole_gradients(world_size, 1, 2, 3))


@pytest.mark.parametrize("stage", [1, 2])
@on_shared_ranks
def test_sharded_gradients_are_clipped_truly(rank, world_size, stage):
    model, optimizer, engine = built(stage)
    model(**batch(rank, 1)).loss.backward()
    parameter = model.get_parameter("transformer.ln_f.weight")
    expected = whole_gradients(world_size, 1)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
    torch.testing.assert_close(engine.clip_grad_norm_(0.1), norm, rtol=1e-5, atol=0)
    check(engine, model, {name: g * (0.1 / (norm + 1e-6)) for name, g in expected.items()})
    largest = max(g.abs().max() for g in expected.values()) * 0.1 / norm
    torch.testing.assert_close(engine.clip_grad_norm_(float("inf"), float("inf")), largest, rtol=1e-4, atol=0)
    engine.clip_grad_value_(1e-4)
    assert engine.full_grad(parameter).abs().max() <= 1e-4
    torch.testing.assert_close(
        engine.clip_grad_norm_(float("inf"), 1.0, [parameter]),
        engine.full_grad(parameter).abs().sum(),
        rtol=1e-4,
        atol=0,
    )
    optimizer.step()
    assert engine.full_grad(parameter) is None
    optimizer.zero_grad()
    assert parameter.grad is None


@on_shared_ranks
def test_stage_0_has_ordinary_gradients(rank, world_size):
    model, _, engine = built(0)
    model(**batch(rank, 1)).loss.backward()
    expected = whole_gradients(world_size, 1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(engine.clip_grad_norm_(float("inf")), torch.tensor(0.1), rtol=1e-4, atol=0)


def poisoned(rank: int, world_size: int, stage: int, clip: bool) -> str:
    model, optimizer, engine = built(stage)
    loss = model(**batch(rank, 1)).loss
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (loss * (float("nan") if rank == 1 else 1.0)).backward()
    with pytest.raises(NonFiniteGradientError) as error:
        if clip:
            engine.clip_grad_norm_(1.0)
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return str(error.value)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("stage", short_of([0, 1, 2], [0, 2]))
def test_a_nan_on_one_rank_stops_all_ranks_before_the_step(stage, clip):
    messages = shared_ranks.run(poisoned, stage=stage, clip=clip)
    assert messages[0] == messages[1]
    assert "the gradient norm is nan" in messages[0] and "`nonfinite: ignore`" in messages[0]


@pytest.mark.parametrize("stage", short_of([0, 1, 2], [0, 2]))
@on_shared_ranks
def test_a_parameter_that_no_rank_used_keeps_no_gradient(rank, world_size, stage):
    model, optimizer, engine = built(stage, Unruly)
    model(**batch(rank, 1)).loss.backward()
    assert engine.full_grad(model.never.weight) is None
    assert engine.full_grad(model.shared.weight) is not None
    optimizer.step()


@pytest.mark.parametrize("stage", short_of([0, 1, 2], [0, 2]))
@on_shared_ranks
def test_autograd_grad_and_losses_past_the_root(rank, world_size, stage):
    model, optimizer, engine = built(stage)
    # torch.autograd.grad passes the outputs' hooks and reaches no parameter's.
    loss = model(**batch(rank, 1)).loss
    torch.autograd.grad(loss, [model.transformer.wte.weight], retain_graph=True)
    loss.backward()
    check(engine, model, whole_gradients(world_size, 1))
    optimizer.step()
    optimizer.zero_grad()
    # A loss of a part of the model never goes through the root's outputs.
    ids = batch(rank, 2)["input_ids"]
    model.transformer(input_ids=ids).last_hidden_state.sum().backward()
    assert engine.full_grad(model.transformer.wpe.weight) is not None
    optimizer.step()


@on_shared_ranks
def test_two_engines_in_one_process(rank, world_size):
    teacher, teacher_opt, _ = built(1)
    student, student_opt, _ = built(2, bert)
    for seed in range(3):
        data = batch(rank, seed)
        student_loss = student(input_ids=data["input_ids"], labels=data["input_ids"][:, 0] % 3).loss
        (teacher(**data).loss + student_loss).backward()
        for optimizer in (teacher_opt, student_opt):
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        teacher(**batch(rank, 9))


def full_state(rank: int, world_size: int, stage: int) -> None:
    model, optimizer, engine = built(stage, optimizer=torch.optim.AdamW)
    assert engine.full_state(model.transformer.wte.weight) == {}
    model(**batch(rank, 1)).loss.backward()
    optimizer.step()
    state = engine.full_state(model.transformer.wte.weight)
    expected = whole_gradients(world_size, 1)["transformer.wte.weight"]
    assert state["step"] == 1
    torch.testing.assert_close(state["exp_avg"], expected * 0.1, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("stage", short_of([0, 1, 2], [0, 2]))
def test_full_state_of_a_parameter(stage):
    shared_ranks.run(full_state, stage=stage)


@on_ranks(2)
def test_a_backward_that_broke_off_is_not_trained_on(rank, world_size):
    # What it has begun to send is never waited for.
    model, _optimizer, _engine = built(2)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("out of luck")

    hidden = model.transformer(inputs_embeds=Broken.apply(model.transformer.wte(batch(rank)["input_ids"])))
    with pytest.raises(ValueError, match="out of luck"):
        model.lm_head(hidden.last_hidden_state).sum().backward()
    with pytest.raises(RuntimeError, match="resume it from a checkpoint"):
        model(**batch(rank))


# ---- one rank, no process group ----


def test_a_reduction_that_fails_to_start_leaves_no_bytes_in_the_report():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ZeroEngine(model, [optimizer], {"stage": 2, "offload": {"optimizer": "cpu"}})
    model(torch.ones(2, 8)).sum().backward()
    before = engine.memory_report().rows
    optimizer.zero_grad()
    with mock.patch.object(ReplicatedReduction, "start", side_effect=MemoryError), pytest.raises(MemoryError):
        model(torch.ones(2, 8)).sum().backward()
    assert engine.memory_report().rows == before
    with pytest.raises(RuntimeError, match="could not be reduced: MemoryError"):
        model(torch.ones(2, 8))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_world_size_one_trains_without_a_process_group(stage, dtype):
    torch.manual_seed(0)
    model = gpt2().to(dtype)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = ZeroEngine(model, [optimizer], {"stage": stage})
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for seed in range(4):
        loss, expected = model(**batch(0, seed)).loss, reference(**batch(0, seed)).loss
        if dtype == torch.float32:
            assert loss.item() == expected.item()
        for value, opt in ((loss, optimizer), (expected, theirs)):
            value.backward()
            opt.step()
            opt.zero_grad()
    assert torch.isfinite(loss)
    assert engine.comm_report().bytes_sent == 0


def test_copies_and_pickles_leave_the_engine_behind():
    model, optimizer, engine = built(2)
    copied = copy.deepcopy(model)
    revived = pickle.loads(pickle.dumps(model))
    for other in (copied, revived):
        assert engine_attached_to(other) is None
        loss = other(**batch(0)).loss
        loss.backward()
        assert all(type(p.grad) is torch.Tensor for p in other.parameters())
    assert engine_attached_to(model) is engine
    model(**batch(0)).loss.backward()
    optimizer.step()


def test_closed_engine_hands_back_an_ordinary_model():
    model, optimizer, engine = built(2, optimizer=torch.optim.AdamW)
    model(**batch(0)).loss.backward()
    optimizer.step()
    engine.close()
    assert engine_attached_to(model) is None
    model(**batch(0)).loss.backward()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    before = model.transformer.wte.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.transformer.wte.weight)


def test_parameters_that_left_are_named_and_taken_back():
    model, optimizer, engine = built(2)
    values = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    model(**batch(0)).loss.backward()
    model.load_state_dict({**model.state_dict(), **values}, assign=True)
    for meets_it in (optimizer.step, lambda: model(**batch(0))):
        with pytest.raises(
            RuntimeError, match=r"load_state_dict\(assign=True\).*is no longer in the engine's memory.*readopt\(\)"
        ):
            meets_it()
    optimizer.zero_grad()
    engine.readopt()
    model(**batch(0)).loss.backward()
    optimizer.step()
    assert all(bucket.holds(slot) for bucket in engine.buckets for slot in bucket.slots)


class SparseEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8, sparse=True)
        self.bag = nn.EmbeddingBag(VOCABULARY, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).tanh().mean(1) + self.bag(ids))


def trained_sparsely(rank: int, settings: dict | None, optimizer_class: type, accumulation: int) -> list[float]:
    """Losses of a few steps, and the sums of the parameters. Each batch names some rows twice."""
    torch.manual_seed(0)
    model = SparseEmbeddings()
    optimizer = optimizer_class(model.parameters(), lr=0.5)
    entry, engine = engine_or_ddp(model, optimizer, settings)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(4):
        for micro_batch in range(accumulation):
            is_last = micro_batch == accumulation - 1
            with contextlib.nullcontext() if is_last else (entry if engine is None else engine).no_sync():
                loss = entry(torch.randint(VOCABULARY, (4, 6), generator=generator)).square().mean()
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return losses + [parameter.double().sum().item() for parameter in model.parameters()]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("accumulation", [1, 2])
@on_shared_ranks
def test_embeddings_with_sparse_gradients_train_as_under_ddp(rank, world_size, optimizer_class, accumulation):
    expected = trained_sparsely(rank, None, optimizer_class, accumulation)
    for stage in range(4):
        found = trained_sparsely(rank, {"stage": stage}, optimizer_class, accumulation)
        if optimizer_class is torch.optim.SGD and accumulation == 1:
            assert found == expected
        # DDP adds the micro-batches of a row in another order. Adagrad divides sparse gradients separately.
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_mixed_dtypes_train_at_one_rank(stage):
    torch.manual_seed(0)
    model = gpt2().to(torch.bfloat16)
    model.transformer.ln_f.float()
    model.transformer.ln_f.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    model.transformer.ln_f.register_forward_hook(lambda module, args, output: output.bfloat16())
    before = model.transformer.ln_f.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ZeroEngine(model, [optimizer], stage)
    losses = []
    for _ in range(4):
        loss = model(**batch(0)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not torch.equal(model.transformer.ln_f.weight, before)


@pytest.mark.parametrize("stage", short_of([0, 1, 2], [1, 2]))
@on_shared_ranks
def test_state_dict_of_a_sharded_optimizer_fits_its_own_shard_only(rank, world_size, stage):
    model, optimizer, _ = built(stage, optimizer=torch.optim.AdamW)
    model(**batch(rank)).loss.backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    stock = torch.optim.AdamW(copy.deepcopy(model).parameters())
    for p in stock.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    stock.step()
    if stage == 0:
        optimizer.load_state_dict(stock.state_dict())
        return
    with pytest.raises(ValueError, match="a whole optimizer"):
        optimizer.load_state_dict(stock.state_dict())
    marked = {**stock.state_dict(), "hf_zero_shard": "rank 5 of 7"}
    with pytest.raises(ValueError, match="rank 5 of 7"):
        optimizer.load_state_dict(marked)


@pytest.mark.parametrize("stage", short_of([0, 1, 2, 3], [0, 2]))
@on_shared_ranks
def test_a_shards_state_dict_is_copied_and_refuses_to_be_saved_by_hand(rank, world_size, stage):
    model, optimizer, _ = built(stage, optimizer=torch.optim.AdamW)
    model(**batch(rank)).loss.backward()
    optimizer.step()
    if stage == 0:
        torch.save(optimizer.state_dict(), io.BytesIO())
        return
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for saved in (optimizer.state_dict(), {"optimizer": {**optimizer.state_dict()}}):
        with pytest.raises(ValueError, match=rf"only the state of rank {rank} of 2.*accelerator\.save_state"):
            torch.save(saved, io.BytesIO())
    torch.save(get_optimizer_state_dict(model, optimizer), io.BytesIO())


WIDTH = 6
# ---- zeroed gradients ----

# At one rank, state in host memory has the gradients in shards, as several ranks have them.
SHARDED = {"stage": 2, "offload": {"optimizer": "cpu"}}
ZEROED = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "grad_accumulation": "local"},
    {"stage": 2, "offload": {"optimizer": "cpu"}},
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


def train_zeroing(rank: int, settings: dict | None, way: tuple[str, str, int], accumulation: int) -> list[torch.Tensor]:
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
        expected = train_zeroing(rank, None, way, accumulation)
        for place in range(settings_a_way):
            settings = ZEROED[(number * settings_a_way + place) % len(ZEROED)]
            found = train_zeroing(rank, settings, way, accumulation)
            errors[f"{settings}, {way}"] = max((a - b).abs().max().item() for a, b in zip(found, expected))
    return errors


@pytest.mark.parametrize("settings_a_way", short_of([1, len(ZEROED)], [1]))
def test_unused_and_frozen_parameters_are_stepped_as_under_ddp_whether_gradients_are_zeroed_or_none(settings_a_way):
    errors = run_on_ranks(compare, settings_a_way=settings_a_way)[0]
    assert len(errors) == len(WAYS) * settings_a_way
    assert not {name: error for name, error in errors.items() if not error <= 1e-6}


def branching(settings: dict) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


def backward(model: nn.Module, seed: int = 0) -> None:
    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)), True).backward()


@pytest.mark.parametrize("who", ["optimizer", "model"])
def test_a_step_on_zeroed_gradients_decays_as_torch_does(who):
    model, optimizer, _ = branching(SHARDED)
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
    model, optimizer, _ = branching(SHARDED)
    backward(model)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(
            ShardedGradientError, match=r"freed it.*optimizer\.zero_grad\(\) between a step and the next"
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
    model, optimizer, engine = branching(SHARDED)
    backward(model)
    optimizer.step()
    engine.finish_parameters()
    assert model.half().head.weight.dtype == torch.float16
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_micro_batches_do_not_write_into_a_gradient_that_two_parameters_share():
    model, _, engine = branching({**SHARDED, "grad_accumulation": "local"})
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
            # gloo's thread lets go of a tensor a moment after the wait for it has ended.
            until = time.monotonic() + 5
            while not all(storage.expired() for storage in storages):
                assert time.monotonic() < until
                time.sleep(0.001)
        engine.close()


LATE = {
    "stage 0": {"stage": 0},
    "stage 0, bf16 in transit": {"stage": 0, "reduce_dtype": "bfloat16"},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, one buffer": {"stage": 2, "buffers": 1},
    "stage 2, local": {"stage": 2, "grad_accumulation": "local"},
    "stage 2, state in host memory": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "stage 2, int8": {"stage": 2, "comm": {"gradients": "int8"}},
    "stage 3": {"stage": 3},
}
# ---- gradients that come after their bucket was sent ----

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


def train_loop(rank: int, world_size: int, loop: Loop, *, saves: bool) -> list[torch.Tensor]:
    """Parameters after a few steps by the engine."""
    torch.manual_seed(0)
    model = Shared(saves, loop.frozen)
    model.layers[0].sleeps = rank in loop.sleeping
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::2], "lr": 0.02}, {"params": trained[1::2], "lr": 0.05}]
    optimizer = torch.optim.AdamW(groups, eps=1e-2)
    settings = {"bucket_bytes": 300, **loop.settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buffers, "GRAD_BUFFERS", settings.pop("buffers", gradient_buffers.GRAD_BUFFERS))
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
        saved, plain = (train_loop(rank, world_size, loop, saves=saves) for saves in (True, False))
        found.append(max((a - b).abs().max().item() for a, b in zip(saved, plain) if a.numel()))
    return found


@pytest.mark.extra("wire")
@pytest.mark.parametrize(
    ("world_size", "names"),
    [slow(1, [name for name in LATE if name not in ROUNDED]), (2, list(LATE)[1::2]), slow(2, list(LATE)[::2])],
    ids=["1", "2", "2-others"],
)
def test_a_layer_used_again_under_reentrant_checkpointing_has_the_sum_of_its_gradients(world_size, names):
    loops = [Loop(settings=LATE[name]) for name in names]
    errors = run_on_ranks(with_and_without, world_size=world_size, loops=loops)[0]
    wrong = {name: error for name, error in zip(names, errors) if not error <= ROUNDED.get(name, 1e-6)}
    assert not wrong


@pytest.mark.slow
def test_it_has_so_beside_ranks_that_use_less_and_layers_that_are_frozen():
    loops = [
        Loop(settings={"stage": stage}, accumulation=2, sleeping=(0,), frozen=frozen)
        for stage in (0, 1, 2, 3)
        for frozen in (True, False)
    ]
    loops += [Loop(settings={"stage": 3, "prefetch_units": 0}, accumulation=2, sleeping=(0,))]
    errors = run_on_ranks(with_and_without, loops=loops)[0]
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
    results = run_on_ranks(past_an_unused_layer, kind=kind)
    for most, planned, twice in results:
        assert most <= planned
        assert twice == 0
