"""fp16: an overflow on any rank skips the step on all, and scale and trajectory are those of DDP with torch's scaler."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from cells import examples, short_of
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from scaled_runs import OVERFLOWS, SCALE, muon_and_adamw, train
from torch import nn
from trainer_job import as_launched, make_trainer
from training import adamw_in_two_groups, gpt2, gpt2_batch

from hf_zero import GradScaler, ZeroPlugin
from hf_zero.comm.transport import Agreement
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.nonfinite import NonFiniteCheck
from hf_zero.optimizer.loss_scale import scale_over_shards

pytestmark = pytest.mark.timeout(180)

STAGES = [{"stage": stage, "bucket_bytes": "20KiB"} for stage in (0, 1, 2, 3)]


EARLY = {**STAGES[2], "offload": {"optimizer": "cpu", "speculate_bytes": "1GiB"}}
SOME = [({}, STAGES[::3]), ({"max_norm": 1e3}, [EARLY])]
EVERY = [
    ({}, [*STAGES, EARLY]),
    ({"max_norm": 1e3}, [STAGES[3], EARLY]),
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
    first, second = run_ranks(follow_ddp, world_size=2, time_limit_s=170, keyword_arguments={"cells": cells})
    assert first == second


def in_float16(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """float16 parameters through fp32 masters: one trajectory for all stages; its losses and those of fp32."""
    config = {"param_dtype": "float16", "grad_accumulation": "local", "bucket_bytes": "20KiB"}
    runs = [
        train(rank, {**config, **more}, autocast=False, max_norm=1e3)
        for more in ({"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 2, "offload": {"optimizer": "cpu"}})
    ]
    assert all(run.equals(runs[0]) for run in runs[1:])
    assert sum(runs[0].skipped) == len([r for r in OVERFLOWS.values() if r < world_size])
    exact = train(rank, STAGES[2], autocast=False)
    return runs[0].losses, exact.losses


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_float16_parameters_train_through_fp32_masters(world_size):
    for losses, exact in run_ranks(in_float16, world_size=world_size, time_limit_s=170):
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
    expected = run_ranks(plain_losses, world_size=2, time_limit_s=60)
    assert run_ranks(through_accelerate, world_size=2, time_limit_s=100, keyword_arguments=fp16) == expected
    ours = {
        "folder": str(tmp_path / "float16"),
        "config": {"stage": 2, "param_dtype": "float16"},
        "mixed_precision": "no",
    }
    for losses, near in zip(
        run_ranks(through_accelerate, world_size=2, time_limit_s=100, keyword_arguments=ours), expected, strict=True
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
        arguments = {"door": door, "folder": str(tmp_path / door), **more}
        return run_ranks(with_trainer, world_size=2, time_limit_s=80, keyword_arguments=arguments)[0]

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
        self.engine.nonfinite = NonFiniteCheck(self.engine.config, Agreement(self))

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


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_own_scaler_is_refused_and_works_again_without_the_engine(fused):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    engine = ZeroEngine(model, [optimizer], {"stage": 2})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"comes from torch\.amp\.GradScaler.*Use hf_zero\.GradScaler"):
        scaler.step(optimizer)
    engine.close()
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused
    scaler = torch.amp.GradScaler("cpu")
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)


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
    with pytest.raises(RuntimeError, match=r"float16 parameters without loss scaling.*hf_zero\.GradScaler"):
        optimizer.step()


def test_parameters_that_an_optimizer_got_later_are_named_when_it_unscales():
    model, later = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ZeroEngine(model, [optimizer], {"stage": 2})
    optimizer.add_param_group({"params": list(later.parameters())})
    scaler = GradScaler("cpu", init_scale=2.0)
    loss = model(torch.ones(2)).sum() + later(torch.ones(2, dtype=torch.float16)).sum()
    scaler.scale(loss).backward()
    with pytest.raises(
        ValueError, match=r"2 parameters were added to the optimizer after it was prepared.*prepare model and"
    ):
        scaler.unscale_(optimizer)
