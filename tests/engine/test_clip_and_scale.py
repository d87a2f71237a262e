"""Clipped norms, and losses that are scaled for float16."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradScalerKwargs
from cells import examples, short_of
from hypothesis import given
from hypothesis import strategies as st
from loops import engine_or_ddp
from scaled_runs import OVERFLOWS, SCALE, muon_and_adamw, train
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from trainer_job import as_launched, make_trainer
from training import Small, adamw_in_two_groups, gpt2, gpt2_batch, small

from hf_zero import GradScaler, ZeroPlugin
from hf_zero.buckets.clipped_gradient import ClippedGradient, Coefficient, clip_later
from hf_zero.comm.transport import Transport
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.loss_scale import scale_over_shards
from hf_zero.optimizer.storage import StepChoice
from hf_zero.step.nonfinite import NonFiniteCheck

pytestmark = pytest.mark.timeout(180)
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


@pytest.mark.extra("kernels")
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


def test_a_clip_of_other_parameters_than_the_last_ones_is_of_these():
    model, _, engine = small(kernels="never")
    model().backward()
    # As many each time; and the first again, which has been clipped.
    for part in (0, 1, 1, 0):
        expected = engine.full_grad(model.parts[part]).norm()
        norm = engine.clip_grad_norm_(0.01, parameters=[model.parts[part]])
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(
            engine.full_grad(model.parts[part]).norm(), torch.tensor(0.01).to(norm), rtol=1e-3, atol=0
        )


@pytest.mark.extra("kernels")
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


@pytest.mark.extra("kernels")
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


@pytest.mark.extra("kernels")
@given(acts=st.lists(st.sampled_from(sorted(ACTS)), min_size=1, max_size=8), setting=st.sampled_from(sorted(WITH_ROWS)))
@examples(60)
def test_any_order_comes_to_the_bits_of_clipping_at_once(acts, setting):
    ends = []
    for at_once in (False, True):
        model, optimizer, engine = small(SIZES, **WITH_ROWS[setting])
        if at_once:
            engine._parts.storage.choice.scale_gradients = StepChoice().scale_gradients
        model().backward()
        seen = [ACTS[act](engine, model, optimizer) or [] for act in acts]
        assert not (at_once and any(clipped(engine)))
        optimizer.step()
        rows = [torch.as_tensor(row.tensor.detach()) for row in engine.state.rows()]
        ends.append([*(tensor for tensors in seen for tensor in tensors if tensor is not None), *rows])
    for later, once in zip(*ends, strict=True):
        assert torch.equal(later, once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_clips_that_nobody_has_read_between_come_to_the_bits_of_two_products(dtype):
    row, first, second = nn.Parameter(torch.zeros(1000)), torch.tensor(0.3), torch.tensor(0.7)
    row.grad_dtype = None
    row.grad = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = row.grad.float() * first * second
    for value in (first, second):
        clip_later([row], Coefficient(value))
    assert torch.equal(row.grad + 0, expected)


@pytest.mark.extra("kernels")
def test_hooks_before_the_step_see_clipped_gradients():
    model, optimizer, engine = small(**WITH_ROWS["masters"])
    seen = []
    hook = lambda opt, *_: seen.append(sum(p.grad.square().sum() for p in opt.param_groups[0]["params"]))  # noqa: E731
    optimizer.register_step_pre_hook(hook)
    model().backward()
    engine.clip_grad_norm_(0.5)
    optimizer.step()
    assert seen[0].sqrt() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.extra("kernels")
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
    assert Transport.agree_largest(ranks, torch.tensor(float("nan"), dtype=torch.float64)).isnan()


# ---- scaled losses ----

STAGES = [{"stage": stage, "bucket_bytes": "20KiB"} for stage in (0, 1, 2, 3)]
ON_HOST = {**STAGES[2], "offload": {"optimizer": "cpu"}}
SOME = [({}, STAGES[::3]), ({"max_norm": 1e3}, [ON_HOST])]
EVERY = [
    ({}, [*STAGES, ON_HOST]),
    ({"max_norm": 1e3}, [STAGES[3], ON_HOST]),
    ({"make_optimizer": muon_and_adamw}, [STAGES[2]]),
]


def follow_ddp(rank: int, world_size: int, cells: list[tuple[dict, list[dict]]]) -> list[float]:
    for change, configs in cells:
        plain = train(rank, None, **change)
        assert plain.skipped == [step in OVERFLOWS for step in range(12)]
        for config in configs:
            run = train(rank, config, **change)
            assert run.equals(plain), f"{config}, {change}: {run.losses} for {plain.losses}, {run.scales}"
    return run.scales


@pytest.mark.parametrize("cells", short_of([SOME, EVERY], [SOME]), ids=["some", "every"])
def test_autocast_in_fp16_is_ddps_bit_for_bit_with_overflows_on_either_rank(cells):
    first, second = run_on_ranks(follow_ddp, cells=cells)
    assert first == second


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks()
def test_float16_parameters_train_through_fp32_masters(rank, world_size):
    config = {"param_dtype": "float16", "grad_accumulation": "local", "bucket_bytes": "20KiB"}
    runs = [
        train(rank, {**config, **more}, autocast=False, max_norm=1e3)
        for more in ({"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 2, "offload": {"optimizer": "cpu"}})
    ]
    assert all(run.equals(runs[0]) for run in runs[1:])
    assert sum(runs[0].skipped) == len([r for r in OVERFLOWS.values() if r < world_size])
    exact = train(rank, STAGES[2], autocast=False)
    losses, exact = runs[0].losses, exact.losses
    assert losses == pytest.approx(exact, rel=5e-3)


def through_accelerate(rank: int, world_size: int, folder: str, config: dict, mixed_precision: str) -> list[float]:
    as_launched(rank, world_size)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        parallelism_config=ZeroPlugin(config),
        kwargs_handlers=[GradScalerKwargs(**SCALE)],
    )
    torch.manual_seed(0)
    model = gpt2()
    optimizer = adamw_in_two_groups(model, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert isinstance(accelerator.scaler, GradScaler)
    generator = torch.Generator().manual_seed(100 + rank)
    losses, taken = [], 0

    def steps(numbers: range) -> None:
        nonlocal taken
        for step in numbers:
            loss = model(**gpt2_batch(generator, 2)).loss
            losses.append(loss.item())
            accelerator.backward(loss * (float("inf") if OVERFLOWS.get(step) == rank else 1.0))
            accelerator.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            assert accelerator.optimizer_step_was_skipped == (step in OVERFLOWS)
            taken += not accelerator.optimizer_step_was_skipped

    steps(range(6))
    # AcceleratedScheduler counts a step for each rank's batch.
    assert scheduler.scheduler.last_epoch == taken * world_size == 3 * world_size
    accelerator.save_state(folder)
    held = accelerator.scaler.get_scale(), generator.get_state()
    steps(range(6, 9))
    after, scale = losses[6:], accelerator.scaler.get_scale()
    accelerator.load_state(folder)
    assert accelerator.scaler.get_scale() == held[0] != scale
    generator.set_state(held[1])
    steps(range(6, 9))
    assert losses[9:] == after
    return losses[:6]


@pytest.mark.slow
def test_accelerate_skips_step_and_scheduler_and_saves_the_scale(tmp_path):
    fp16 = {"folder": str(tmp_path / "autocast"), "config": STAGES[3], "mixed_precision": "fp16"}
    expected = run_on_ranks(plain_losses)
    assert run_on_ranks(through_accelerate, **fp16) == expected
    for losses, near in zip(
        run_on_ranks(
            through_accelerate,
            folder=str(tmp_path / "float16"),
            config={"stage": 2, "param_dtype": "float16"},
            mixed_precision="no",
        ),
        expected,
        strict=True,
    ):
        assert losses == pytest.approx(near, rel=5e-3)


def plain_losses(rank: int, world_size: int) -> list[float]:
    return train(rank, STAGES[2], partial(adamw_in_two_groups, fused=True), steps=6, max_norm=1e3).losses


def with_trainer(rank: int, world_size: int, door: str, folder: str, resume: str | None = None) -> tuple:
    """(losses, learning rates, the scale at the end) of a Trainer whose first scale is far too large."""
    as_launched(rank, world_size)
    trainer = make_trainer(
        door, "gpt2", folder, fp16=True, max_steps=8, dropout=0.0, save_strategy="steps", save_steps=4, warmup_steps=8
    )
    trainer.accelerator.scaler_handler = GradScalerKwargs(
        init_scale=2.0**40, backoff_factor=2.0**-12, growth_interval=3
    )
    trainer.train(resume_from_checkpoint=resume)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    rates = [entry["learning_rate"] for entry in logged]
    return [entry["loss"] for entry in logged], rates, trainer.accelerator.scaler.get_scale()


@pytest.mark.slow
def test_trainer_in_fp16_goes_on_with_its_scale(tmp_path):
    def run(door: str, **more) -> tuple:
        return run_on_ranks(with_trainer, door=door, folder=str(tmp_path / door), **more)[0]

    losses, rates, scale = run("flag 2")
    # Two scales overflow; the scheduler has made six steps of eight.
    assert rates == [pytest.approx(1e-3 * step / 8) for step in (0, 0, 0, 1, 2, 3, 4, 5)]
    assert scale == 2.0**18
    assert run("flag 0") == (losses, rates, scale)
    assert (tmp_path / "flag 2" / "checkpoint-4" / "scaler.pt").is_file()
    resumed = run("flag 3", resume=str(tmp_path / "flag 2" / "checkpoint-4"))
    assert (resumed[0][-4:], resumed[1][-4:], resumed[2]) == (losses[-4:], rates[-4:], scale)


class Rows:
    """What a scaler asks an engine: `overflows` says by step whether another rank found one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.engine = ZeroEngine(model, [optimizer], {"stage": 2})
        self.elsewhere = False
        self.engine.bad_steps = NonFiniteCheck(model, self.engine.config, self, self.engine.transport, speaks=False)

    def agree_sum(self, values: torch.Tensor, _label) -> torch.Tensor:
        return values + float(self.elsewhere)


@examples(30)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=14),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([2.0**4, 2.0**16]),
)
def test_the_scale_is_torchs_for_any_overflows_here_or_elsewhere(found, interval, swapped, init_scale):
    arguments = {"init_scale": init_scale, "growth_interval": interval}
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rows = Rows(model, optimizer)
    ours, stock = GradScaler("cpu", **arguments), torch.amp.GradScaler("cpu", **arguments)
    if swapped:
        ours = torch.amp.GradScaler("cpu", **arguments)
        scale_over_shards(ours)
    alone = nn.Linear(2, 2)
    other = torch.optim.SGD(alone.parameters(), lr=0.0)
    for here, elsewhere in found:
        rows.elsewhere = elsewhere
        ours.scale(model(torch.ones(2)).sum() * (float("inf") if here else 1.0)).backward()
        stock.scale(alone(torch.ones(2)).sum() * (float("inf") if here or elsewhere else 1.0)).backward()
        for scaler, stepped in ((ours, optimizer), (stock, other)):
            scaler.step(stepped)
            scaler.update()
            stepped.zero_grad()
        assert ours.state_dict() == stock.state_dict()


def test_the_scale_waits_for_all_optimizers_of_a_model():
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([model.weight], lr=0.0), torch.optim.SGD([model.bias], lr=0.0)]
    engine = ZeroEngine(model, optimizers, {"stage": 2})
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(model(torch.ones(2)).sum()).backward()
    for optimizer in optimizers:
        # As accelerate does.
        scaler.step(optimizer)
        assert torch.equal(engine.full_grad(model.bias), torch.ones(2)) or optimizer is optimizers[1]
        scaler.update()
    assert scaler.get_scale() == 8.0
    # One that does not step this time (a GAN's other half) holds nobody up.
    for _ in range(2):
        scaler.scale(model(torch.ones(2)).sum()).backward()
        scaler.step(optimizers[0])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == 32.0


def scaled_steps(rank: int, stage: int | None, kind: type, way: str) -> tuple[list[bool], float, torch.Tensor]:
    """Which steps were skipped, the last scale and weight; the second step's gradient overflows in the shard of one rank."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=way == "fused")
    entry, engine = engine_or_ddp(model, optimizer, stage)
    scaler, skipped = kind("cpu", **SCALE), []
    stepped = AcceleratedOptimizer(optimizer, device_placement=False) if "wrapped" in way else optimizer
    for step in range(4):
        outputs = entry(torch.full((4, 64), 1.0 + rank + step))
        loss = outputs.mean() + outputs[:, -1].sum() * (1e36 if step == 1 else 1.0)
        scaler.scale(loss).backward()
        if "by hand" in way:
            scaler.unscale_(stepped)
        before = scaler.get_scale()
        scaler.step(stepped)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
        stepped.zero_grad()
    if engine is not None:
        with engine.gathered():
            found = model.weight.detach().clone()
        engine.close()
        assert getattr(optimizer, "_step_supports_amp_scaling", False) is (way == "fused")
        return skipped, scaler.get_scale(), found
    return skipped, scaler.get_scale(), model.weight.detach().clone()


@on_ranks(2)
def test_ranks_skip_together_whoever_scales_the_loss_and_holds_the_optimizer(rank, world_size):
    as_launched(rank, world_size)
    # accelerate's wrapper asks accelerate for the run's state.
    Accelerator()
    for way in ("plain", "fused", "wrapped", "by hand", "wrapped, by hand"):
        skipped, scale, weight = scaled_steps(rank, None, torch.amp.GradScaler, way)
        assert skipped == [False, True, False, False]
        for kind in (torch.amp.GradScaler, GradScaler):
            for stage in range(4):
                found = scaled_steps(rank, stage, kind, way)
                assert found[:2] == (skipped, scale) and torch.equal(found[2], weight), (way, kind, stage)


def test_a_scaler_that_is_not_enabled_does_nothing():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = ZeroEngine(model, [optimizer], {"stage": 2})
    scaler, before = GradScaler("cpu", enabled=False), model.bias.detach().clone()
    scaler.scale(model(torch.ones(2)).sum()).backward()
    assert scaler.has_unscaled(optimizer)
    engine.clip_grad_norm_(100.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.bias, before - 0.5)


def test_float16_parameters_are_not_stepped_without_a_scaler():
    model = gpt2()
    optimizer = adamw_in_two_groups(model)
    ZeroEngine(model, [optimizer], {"stage": 2, "param_dtype": "float16"})
    model(**gpt2_batch(torch.Generator().manual_seed(0), 2)).loss.backward()
    with pytest.raises(RuntimeError, match=r"float16 parameters without loss scaling.*GradScaler"):
        optimizer.step()


def test_parameters_that_an_optimizer_got_later_are_named_when_it_unscales():
    model, later = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ZeroEngine(model, [optimizer], {"stage": 2})
    optimizer.param_groups[0]["params"] += list(later.parameters())
    scaler = GradScaler("cpu", init_scale=2.0)
    loss = model(torch.ones(2)).sum() + later(torch.ones(2, dtype=torch.float16)).sum()
    scaler.scale(loss).backward()
    with pytest.raises(
        ValueError,
        match=r"2 parameters were added to the optimizer after it was prepared.*Add them with optimizer.add_param_group",
    ):
        scaler.unscale_(optimizer)


def test_parameters_that_an_optimizer_got_later_are_trained_once_both_are_prepared_anew():
    model, added = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = ZeroEngine(model, [optimizer], {"stage": 2})
    later = nn.Linear(2, 2)
    model.add_module("later", later)
    model.register_parameter("added", added)
    optimizer.add_param_group({"params": list(later.parameters())})
    optimizer.param_groups[0]["params"].append(added)
    engine.close()
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
    ZeroEngine(model, [optimizer], {"stage": 2})
    (later(model(torch.ones(2))).sum() + added.sum()).backward()
    optimizer.step()
    assert torch.equal(added, torch.full((3,), 0.5))


def scaled_in_groups(rank: int, world_size: int, cells: list[tuple]) -> tuple[list[bytes], list[float]]:
    """The weights at the end of each run, and its scales."""
    found, scales, groups = [], [], {"shard_group_size": 2, "node_size": 2}
    for stage, settings, autocast in cells:
        runs = []
        for comm in ({}, groups, groups | {"gradients": "int8"}):
            config = {"stage": stage, "bucket_bytes": "20KiB", **settings, "comm": comm}
            runs.append(train(rank, config, autocast=autocast, max_norm=1e3, steps=7))
            values = [values.numpy().tobytes() for _, values in sorted(runs[-1].tensors.items())]
            found.append(b"".join(values))
            scales += runs[-1].scales
        one, *several = runs
        assert one.skipped == [step in OVERFLOWS for step in range(7)]
        for run in several:
            assert (run.skipped, run.scales) == (one.skipped, one.scales)
            assert run.losses == pytest.approx(one.losses, rel=5e-3), (stage, run.losses, one.losses)
    return found, scales


@pytest.mark.slow
@pytest.mark.parametrize(
    "cells", [[(3, {"param_dtype": "float16"}, False)], [(2, {}, True)]], ids=["stage 3", "stage 2"]
)
def test_shard_groups_skip_together_and_stay_alike(cells):
    first, *others = run_on_ranks(scaled_in_groups, world_size=4, cells=cells)
    assert all(other == first for other in others)
