"""What scripts do with gradients between backward and step, and what they get."""

import copy
import pickle
from functools import cache

import pytest
import torch
from cells import short_of
from shared_ranks import on_ranks, on_shared_ranks, shared_ranks
from torch import nn
from training import VOCABULARY, Unruly, bert, gpt2, gpt2_batch

from hf_zero.buckets.sharded import ShardedGradientError
from hf_zero.comm.watch import ENDED, LABEL, STARTED
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.nonfinite import NonFiniteGradientError
from hf_zero.hooks import engine_attached_to

pytestmark = pytest.mark.timeout(120)


def run_on_ranks(target, **arguments):
    return shared_ranks.run(target, **arguments)


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
@pytest.mark.short_cells("{'stage': 2}-('optimizer', True)", "{'stage': 1}-('model', True)")
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


def never_reduced(rank: int, world_size: int, settings: dict) -> str:
    model, optimizer, engine = built(**settings)
    with engine.no_sync():
        model(**batch(rank, 1)).loss.backward()
    with pytest.raises(RuntimeError, match="never reduced") as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2, "grad_accumulation": "local"}], ids=str)
def test_step_on_unreduced_gradients_is_refused(settings):
    assert "outside no_sync" in run_on_ranks(never_reduced, settings=settings)[0]


@pytest.mark.parametrize("stage", short_of([1, 2, 3], [2, 3]))
@on_shared_ranks
def test_a_gradient_set_by_hand_is_not_passed_over(rank, world_size, stage):
    model, optimizer, _ = built(stage)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ShardedGradientError, match=r"was set by hand.*`stage: 0`"):
        optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
@on_shared_ranks
def test_sharded_gradients_are_clipped_truly_or_raise(rank, world_size, stage):
    model, optimizer, engine = built(stage)
    model(**batch(rank, 1)).loss.backward()
    parameter = model.get_parameter("transformer.ln_f.weight")
    with pytest.raises(ShardedGradientError, match=r"transformer\.ln_f\.weight.*full_grad"):
        parameter.grad.abs()
    with pytest.raises(ShardedGradientError, match=r"accelerator\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ShardedGradientError, match=r"can neither read nor change.*optimizer\.zero_grad\(\)"):
        parameter.grad.mul_(2.0)
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
    messages = run_on_ranks(poisoned, stage=stage, clip=clip)
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
    run_on_ranks(full_state, stage=stage)


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
            RuntimeError, match=r"load_state_dict\(assign=True\).*has left the engine's memory.*readopt\(\)"
        ):
            meets_it()
    optimizer.zero_grad()
    engine.readopt()
    model(**batch(0)).loss.backward()
    optimizer.step()
    assert all(bucket.holds(slot) for bucket in engine.buckets for slot in bucket.slots)


def test_sparse_gradients_and_closures_are_refused():
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8, sparse=True))
    # Without one who holds it, an engine goes with its optimizer.
    _engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 2)
    with pytest.raises(RuntimeError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
    model, optimizer, _ = built(2)
    with pytest.raises(ValueError, match=r"optimizer\.step\(closure\) is not supported"):
        optimizer.step(lambda: model(**batch(0)).loss)


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
