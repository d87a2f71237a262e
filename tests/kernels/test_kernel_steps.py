"""Kernels in place of torch's steps and norms: the same training to the last digits, the same state under the same names.

Here they run as their torch references (`kernels: always`) and in Triton's interpreter; test_gpu.py has the compiled ones.
"""

import contextlib
import copy
import io
import itertools
import json
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import engine_interpreted
import pytest
import torch
from cells import examples, slow
from hypothesis import given
from hypothesis import strategies as st
from launching import run_forked
from plain_lion import Lion, PlainLion
from ranks import run_ranks
from shared_ranks import on_ranks
from torch import nn
from training import (
    Job,
    Small,
    Unruly,
    compare_with_ddp,
    fused_adamw,
    gpt2,
    gpt2_batch,
    save_engine,
    small,
    steps,
    train,
)

from hf_zero import ConfigError
from hf_zero.arithmetic.flat import has_triton, runs_triton, uses_kernels
from hf_zero.buckets.gradients import laid_gradients_of
from hf_zero.buckets.rows import MASTER
from hf_zero.buckets.runs import runs_of
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.loss_scale import GradScaler
from hf_zero.integrations.state_io import load_engine
from hf_zero.kernels import statistics
from hf_zero.kernels.bucket_steps import KernelStep, form_of
from hf_zero.step.nonfinite import NonFiniteGradientError

pytestmark = pytest.mark.timeout(180)

BUCKETS = "7KiB"


def adam(model: nn.Module, **more) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, **more)


def sgd(model: nn.Module, **more) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, **more)


def lion(model: nn.Module, **more) -> torch.optim.Optimizer:
    return Lion(model.parameters(), lr=1e-3, weight_decay=0.1, **more)


def unruly_batch(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    return gpt2_batch(generator, size + 2)


CLIPPED = Job(max_norm=0.5)
JOBS = {
    "AdamW, two groups": (CLIPPED, [0, 1, 2, 3]),
    "Adam": (replace(CLIPPED, make_optimizer=adam), [2]),
    "SGD": (replace(CLIPPED, make_optimizer=partial(sgd, dampening=0.2)), [0, 3]),
    "SGD, Nesterov": (replace(CLIPPED, make_optimizer=partial(sgd, nesterov=True)), [1]),
    "SGD, no momentum": (replace(CLIPPED, make_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), [2]),
    "gradients that do not always come": (
        Job(steps=4, make_model=Unruly, make_batch=unruly_batch, model_arguments={"sleeping": "even steps"}),
        [0, 2],
    ),
}


def settings_for(stage: int, **more) -> dict:
    return {"stage": stage, "bucket_bytes": BUCKETS, **more}


def worst_errors(rank: int, world_size: int) -> dict[str, float]:
    """Of each job, the largest relative error of a loss against torch's own steps."""
    found = {}
    for name, (job, stages) in JOBS.items():
        # One rank has nothing to shard: its stages differ in stage 3 alone.
        for stage in stages if world_size > 1 else stages[-1:]:
            by_torch, by_kernels = (
                train(rank, world_size, replace(job, settings=settings_for(stage, kernels=kernels)))
                for kernels in ("never", "always")
            )
            assert not by_kernels.equals(by_torch), f"{name}: no kernel has stepped"
            found[f"{name}, stage {stage}"] = by_kernels.loss_error(by_torch)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_losses_are_those_of_torchs_steps(world_size):
    for errors in run_ranks(worst_errors, world_size=world_size, time_limit_s=170):
        assert {name: error for name, error in errors.items() if error > 1e-6} == {}


def lions_beside_ddp(rank: int, world_size: int) -> list[tuple[float, float]]:
    """(worst error of a loss, of a weight) against DDP, which steps by the Lion's own arithmetic."""
    found = []
    for more in ({}, {"decoupled_weight_decay": True, "betas": (0.95, 0.98)}):
        job = replace(CLIPPED, make_optimizer=partial(lion, **more))
        pairs = compare_with_ddp(rank, world_size, job, [settings_for(stage, kernels="always") for stage in (1, 3)])
        for ddp, mine in pairs:
            weights = [abs(mine.tensors[name] - ddp.tensors[name]).max() for name in ddp.tensors]
            found.append((mine.loss_error(ddp), float(max(weights))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_lion_follows_ddp(world_size):
    for errors in run_ranks(lions_beside_ddp, world_size=world_size, time_limit_s=120):
        # Steps have one size, 1e-3: a sign that another last digit turned would show.
        assert errors and all(loss < 1e-6 and weight < 1e-6 for loss, weight in errors), errors


def test_lions_of_the_package_are_stepped_by_the_kernel():
    """Under the state's own name, and by nobody else's Lion."""
    for make_optimizer, taken in ((lion, 1), (lambda model: PlainLion(model.parameters()), 0)):
        model, optimizer, engine = small(make_optimizer=make_optimizer)
        small_steps(model, optimizer, 2)
        assert engine.memory_report().kernels.buckets == taken
        assert {row.kind for row in engine.state.rows()} == {"exp_avg"}
        assert [set(state) for state in optimizer.state.values()] == [{"exp_avg"}] * len(optimizer.state)


@pytest.mark.parametrize("module", ["lion_pytorch", "lion_pytorch.foreach"])
@pytest.mark.parametrize("is_decoupled", [False, True])
def test_the_plain_lion_is_that_of_lion_pytorch(module, is_decoupled):
    package = pytest.importorskip(module, reason="lion-pytorch, of the extra `dev`, is not installed")
    ends = []
    for kind in (PlainLion, package.Lion):
        model = Small()
        optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=is_decoupled)
        assert (form_of(optimizer) is None) == (kind is PlainLion)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())])
    for plain, theirs in zip(*ends, strict=True):
        # Its foreach form adds by `lerp`.
        torch.testing.assert_close(plain, theirs, rtol=1e-5 if "foreach" in module else 0, atol=0)


def of_all_layouts(rank: int, world_size: int) -> list[float]:
    """The losses, which are the same bits at every stage; of bfloat16 parameters, which are their masters rounded."""
    runs = []
    for stage in (0, 1, 2, 3):
        model, optimizer, engine = prepared(stage, param_dtype="bfloat16", grad_accumulation="local")
        runs.append(steps(model, optimizer, [0] * 3))
        assert engine.memory_report().kernels.hindrances == ()
        weights = {name: value.clone() for name, value in engine.whole_state_dict(wanted=True).items()}
        masters = [row for row in engine.state.rows() if row.kind == MASTER]
        assert masters
        for row in masters:
            part = weights[row.name].reshape(-1)[row.interval.start : row.interval.stop]
            assert torch.equal(part, row.tensor.bfloat16())
    assert runs == [runs[0]] * len(runs)
    return runs[0]


def test_bits_do_not_depend_on_the_layout_and_the_copy_is_the_master_rounded():
    found = {world_size: run_ranks(of_all_layouts, world_size=world_size, time_limit_s=120) for world_size in (1, 2)}
    assert found[2][0] == found[2][1] == found[1][0]
    assert found[1][0][-1] < found[1][0][0]


def prepared(stage: int, *, make_optimizer=fused_adamw, **more) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = make_optimizer(model)
    return model, optimizer, ZeroEngine(model, [optimizer], settings_for(stage, **{"kernels": "always", **more}))


EVERY_READER = (("never", 1), ("always", 3), ("always", 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cells",
    [
        [(fused_adamw, EVERY_READER[:2]), (lion, EVERY_READER[1:2])],
        slow([(make, EVERY_READER) for make in (fused_adamw, sgd, lion)]),
    ],
    ids=["some", "every"],
)
@on_ranks(2)
def test_checkpoints_go_from_each_to_each(rank, world_size, cells, tmp_path):
    """A checkpoint of either way of stepping is gone on with by either, at another stage."""
    folder = str(tmp_path)
    for make_optimizer, readers in cells:
        made = partial(prepared, make_optimizer=make_optimizer)
        ends = []
        for writes in ("never", "always"):
            model, optimizer, engine = made(2, kernels=writes)
            steps(model, optimizer, range(2))
            root = f"{folder}/{writes}"
            save_engine(engine, root)
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            kinds = {row.kind: row.tensor.dtype for row in engine.state.rows()}
            scalars = {str(sorted(state.items())) for state in engine.state.scalars().values()}
            expected = steps(model, optimizer, range(2, 4))
            ends.append((kinds, scalars, expected))
            for reads, stage in readers:
                model, optimizer, engine = made(stage, kernels=reads)
                model.load_state_dict(weights)
                load_engine(engine, f"{root}/zero")
                found = steps(model, optimizer, range(2, 4))
                assert found == expected if reads == writes else found == pytest.approx(expected, rel=1e-6)
        (kinds, scalars, losses), (other_kinds, other_scalars, other_losses) = ends
        assert (kinds, scalars) == (other_kinds, other_scalars)
        assert other_losses == pytest.approx(losses, rel=1e-6)


def small_steps(model: Small, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_state_that_is_put_in_mid_run_is_stepped_on(tmp_path):
    model, optimizer, engine = small()
    first = small_steps(model, optimizer, 2)
    save_engine(engine, tmp_path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = small_steps(model, optimizer, 2)
    for _ in range(2):
        model.load_state_dict(weights)
        load_engine(engine, tmp_path / "zero")
        assert small_steps(model, optimizer, 2) == expected
    # The optimizer's own way of taking state in, and of losing it.
    model.load_state_dict(weights)
    load_engine(engine, tmp_path / "zero")
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert small_steps(model, optimizer, 2) == expected
    optimizer.state.clear()
    model.load_state_dict(Small().state_dict())
    assert small_steps(model, optimizer, 2) == first


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.booleans(), st.integers(0, 1)), min_size=1, max_size=8),
    st.sampled_from(["1KiB", "1MiB"]),
)
def test_runs_cover_each_gradient_once_in_order(parts, bucket_bytes):
    model, _, engine = small(tuple(size for size, _, _ in parts), bucket_bytes=bucket_bytes)
    model().backward()
    rows = [row for bucket in engine.buckets for row in bucket.rows]
    part_of = {model.parts[index]: part for index, part in enumerate(parts)}
    wanted = [row for row in rows if part_of[row.slot.parameter][1]]
    phase_of = {row: part_of[row.slot.parameter][2] for row in rows}
    runs = runs_of(reversed(wanted), phase_of)
    gradients = [row.tensor.grad for row in wanted]
    assert torch.equal(
        torch.cat([run.gradient for run in runs] or [torch.empty(0)]), torch.cat(gradients or [torch.empty(0)])
    )
    assert sum(run.interval.numel for run in runs) == sum(row.layout.in_shard.numel for row in wanted)
    starts = {(row.slot.bucket, row.layout.in_shard.start): row for row in wanted}
    for run in runs:
        inside = [r for r in wanted if any(r is starts.get((b, run.interval.start)) for b in engine.buckets)]
        assert any(phase_of[row] == run.phase for row in inside)


def rows_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Those that this rank steps."""
    return [row for group in optimizer.param_groups for row in group["params"] if row.grad is not None]


def replaces_gradients(optimizer: torch.optim.Optimizer) -> None:
    for row in rows_of(optimizer):
        row.grad = torch.ones_like(row)


def gives_gradients_other_memory(optimizer: torch.optim.Optimizer) -> None:
    for row in rows_of(optimizer):
        row.grad.data = torch.full_like(row.grad.data, 2.0)


def edits_gradients(optimizer: torch.optim.Optimizer) -> None:
    for row in rows_of(optimizer):
        row.grad.mul_(3.0)


def drops_some_gradients(optimizer: torch.optim.Optimizer) -> None:
    for row in rows_of(optimizer)[:1]:
        row.grad = None


def changes_settings(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0].update(lr=0.3, betas=(0.5, 0.9))


def wants_what_no_kernel_does(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0].update(maximize=True)


def replaces_state(optimizer: torch.optim.Optimizer) -> None:
    for row in rows_of(optimizer):
        optimizer.state[row]["exp_avg"] = torch.full_like(row, 0.5)


def counts_other_steps(optimizer: torch.optim.Optimizer) -> None:
    for row in rows_of(optimizer):
        optimizer.state[row]["step"].fill_(9.0)


def counts_another_step_of_one_row(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[rows_of(optimizer)[-1]]["step"] += 1


def replaces_counts(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()


SCRIPTS = (
    replaces_gradients,
    gives_gradients_other_memory,
    edits_gradients,
    drops_some_gradients,
    changes_settings,
    wants_what_no_kernel_does,
    replaces_state,
    counts_other_steps,
    counts_another_step_of_one_row,
    replaces_counts,
)


@on_ranks(2)
def test_a_step_that_repeats_the_last_one_does_as_one_that_is_prepared_anew(rank, world_size, monkeypatch):
    repeat, repeated = KernelStep._repeat, [[]]

    def noted(self: KernelStep, *arguments: object) -> bool:
        repeated[-1].append(repeat(self, *arguments))
        return repeated[-1][-1]

    # A step that is prepared again also finds gradients by their addresses.
    ways = {noted: laid_gradients_of, lambda *_: False: lambda _: None}
    finders = [
        module
        for name, module in sys.modules.items()
        if name.startswith("hf_zero.") and hasattr(module, "laid_gradients_of")
    ]
    for script, clips in zip(SCRIPTS, itertools.cycle((True, False, True))):
        ends = []
        for way, finds in ways.items():
            monkeypatch.setattr(KernelStep, "_repeat", way)
            for module in finders:
                monkeypatch.setattr(module, "laid_gradients_of", finds)
            model, optimizer, engine = small((300, 5, 200), bucket_bytes=1024)
            for step in range(4):
                repeated.append([])
                (model() * (step + 1)).backward()
                if clips:
                    engine.clip_grad_norm_(0.5)
                if step == 2:
                    script(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            counts = [state["step"].clone() for state in optimizer.state.values()]
            ends.append([*(part.detach().clone() for part in model.parts), *counts])
            engine.close()
            if way is noted:
                # The first step has nothing to repeat; the second one repeats that of all buckets.
                first, second, *_ = repeated[-4:]
                assert not any(first) and len(first) > 2 and second == [True], script
        assert all(map(torch.equal, *ends)), (script, clips)


def test_one_launch_sweeps_a_bucket_without_padding():
    model, _, engine = small((32, 16, 48))
    model().backward()
    [bucket] = engine.buckets
    [run] = runs_of(bucket.rows)
    assert run.gradient.data_ptr() == bucket.rows[0].tensor.grad.data_ptr()
    bucket.rows[1].tensor.grad = torch.ones(16)
    assert len(runs_of(bucket.rows)) == 3


def test_found_inf_keeps_weights_and_state_as_they_are():
    for more in ({}, {"param_dtype": "bfloat16"}, {"param_dtype": "bfloat16", "rounding": "stochastic"}):
        model, optimizer, engine = small(**more)
        for found_inf, moves in ((0.0, True), (1.0, False), (0.0, True)):
            before = [(row.kind, row.name, row.tensor.clone()) for row in engine.state.rows()]
            values = [part.detach().clone() for part in model.parts]
            model().backward()
            engine.clip_grad_norm_(1.0)
            assert engine.bad_steps.found_inf == 0
            # As on an accelerator, whose host learns of it a step later.
            engine.bad_steps.found_inf.fill_(found_inf)
            optimizer.step()
            optimizer.zero_grad()
            assert any(not torch.equal(a, b) for a, b in zip(model.parts, values)) is moves
            after = [(row.kind, row.name, row.tensor) for row in engine.state.rows()]
            if not moves:
                assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(after, before, strict=True))


def test_a_gradient_that_is_not_finite_is_refused_by_name():
    model, optimizer, engine = small()
    before = [part.detach().clone() for part in model.parts]
    (model() * float("inf")).backward()
    with pytest.raises(NonFiniteGradientError, match=r"norm is (nan|inf).*parts\.0"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parts, before))
    model, optimizer, engine = small(nonfinite="ignore")
    (model() * float("inf")).backward()
    optimizer.step()
    assert engine.bad_steps.found_inf is None
    assert any(part.isnan().any() for part in model.parts)


def test_a_loss_scaler_skips_the_step():
    found = {}
    for kernels in ("never", "always"):
        model, optimizer, engine = small(kernels=kernels)
        scaler, losses = GradScaler("cpu", init_scale=2.0**10), []
        for step in range(6):
            loss = model()
            losses.append(loss.item())
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.unscale_(optimizer)
            engine.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        counts = {state["step"].item() for state in engine.state.scalars().values()}
        found[kernels] = losses, counts, scaler.get_scale()
    assert found["always"][0] == pytest.approx(found["never"][0], rel=1e-6)
    assert found["always"][1:] == found["never"][1:] == ({5.0}, 2.0**9)


@pytest.mark.parametrize(
    ("make_optimizer", "why"),
    [
        (partial(torch.optim.AdamW, amsgrad=True), "AdamW, `amsgrad` is True"),
        (partial(torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False), "AdamW, `lr` is a tensor"),
        (partial(torch.optim.Adam, weight_decay=0.1), "Adam, `weight_decay` is added to the gradient"),
        (partial(torch.optim.SGD, maximize=True), "SGD, `maximize` is True"),
        (torch.optim.RMSprop, "no kernel implements RMSprop"),
        (type("MyAdamW", (torch.optim.AdamW,), {}), "no kernel implements MyAdamW"),
    ],
)
def test_what_no_kernel_does_is_torchs_bit_for_bit_and_said(caplog, make_optimizer, why):
    ends = []
    for kernels in ("never", "always"):
        model = Small()
        optimizer = make_optimizer(model.parameters())
        with caplog.at_level(logging.INFO, "hf_zero"):
            engine = ZeroEngine(model, [optimizer], {"stage": 2, "kernels": kernels})
        for _ in range(3):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([part.detach().clone() for part in model.parts])
    assert all(torch.equal(a, b) for a, b in zip(*ends))
    report = engine.memory_report().kernels
    assert (report.buckets, report.all_buckets, report.hindrances) == (0, 1, (why,))
    assert caplog.text.count(why) == 1


def test_float64_parameters_are_left_to_torch():
    model = Small().double()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], {"stage": 2, "kernels": "always"})
    model().backward()
    assert engine.clip_grad_norm_(0.1) > 1
    optimizer.step()
    assert engine.memory_report().kernels.hindrances == ("AdamW, torch.float64 parameters",)


def test_a_setting_that_changes_to_one_without_a_kernel_is_followed_and_said_once(caplog):
    ends = []
    for kernels in ("never", "always"):
        model, optimizer, _ = small(kernels=kernels)
        for step in range(6):
            optimizer.param_groups[0].update(maximize=2 <= step < 4, lr=0.01 * (step + 1))
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([part.detach().clone() for part in model.parts])
    for found, expected in zip(*ends):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert caplog.text.count("AdamW is stepped by torch: `maximize` is True") == 1


def test_autograd_sees_that_a_step_has_written_parameters():
    model, optimizer, _ = small()
    stale = model()
    model().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.slow
@on_ranks(2)
def test_tiers_and_rounding_by_chance_go_together_with_kernels(rank, world_size):
    """What another tier steps is torch's; with a ratio, the rest is a kernel's."""
    job = Job(steps=2)
    offload = {"optimizer": "cpu"}
    by_torch, by_kernels, partly = (
        train(
            rank,
            world_size,
            replace(job, settings=settings_for(2, kernels=kernels, offload={**offload, "ratio": ratio})),
        )
        for kernels, ratio in (("never", 1.0), ("always", 1.0), ("always", 0.4))
    )
    assert by_kernels.equals(by_torch)
    assert not partly.equals(by_torch)
    assert partly.loss_error(by_torch) < 1e-6
    shards = {"offload": {"params": "cpu"}, "param_dtype": "bfloat16"}
    by_torch, by_kernels = (
        train(rank, world_size, replace(job, settings=settings_for(3, kernels=kernels, **shards)))
        for kernels in ("never", "always")
    )
    assert by_kernels.loss_error(by_torch) < 1e-4
    by_chance = {"param_dtype": "bfloat16", "rounding": "stochastic"}
    by_torch, by_kernels = (
        train(rank, world_size, replace(job, settings=settings_for(2, kernels=kernels, **by_chance)))
        for kernels in ("never", "always")
    )
    # Last digits are rounded away, but where they are what the throw of the dice hangs on.
    assert by_kernels.loss_error(by_torch) < 5e-3


def test_norms_by_kernels_are_torchs():
    model, _, engine = small()
    model().backward()
    gradient = torch.cat([row.tensor.grad for bucket in engine.buckets for row in bucket.rows])
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        expected = torch.linalg.vector_norm(gradient, norm_type)
        torch.testing.assert_close(engine.clip_grad_norm_(float("inf"), norm_type), expected, rtol=1e-6, atol=0)
    assert engine.clip_grad_norm_(0.25, parameters=[model.parts[1]]) == pytest.approx(4 * 2.5**0.5)
    torch.testing.assert_close(model.parts[1].grad.norm(), torch.tensor(0.25), rtol=1e-5, atol=0)


def test_auto_is_where_triton_runs(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [uses_kernels(wanted, cpu) for wanted in ("auto", "always", "never")] == [False, True, False]
    runs = runs_triton(gpu)
    assert runs is (has_triton() and torch.version.cuda is not None)
    assert [uses_kernels(wanted, gpu) for wanted in ("auto", "always", "never")] == [runs, True, False]


def where_a_rank_has_no_compiler(rank: int, world_size: int) -> str:
    """Trains on ranks that have triton's interpreter for a GPU, of which the last one's fails; returns what was printed."""
    os.environ["TRITON_INTERPRET"] = "1"

    def fails(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    if rank == world_size - 1:
        statistics.scalars_triton = fails
    with pytest.raises(ConfigError, match="`kernels: always`, but triton cannot launch a kernel on rank 1"):
        small()
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        model, optimizer, engine = small(kernels="auto")
    assert engine.config.kernels == "never" and engine.memory_report().kernels is None
    assert not runs_triton(torch.device("cpu"))
    model().backward()
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    return printed.getvalue()


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_auto_is_torch_on_all_ranks_where_one_cannot_launch_a_kernel():
    first, second = run_ranks(where_a_rank_has_no_compiler, world_size=2, time_limit_s=120)
    assert (
        "triton cannot launch a kernel on rank 1 (RuntimeError: Failed to find C compiler.); torch's operations"
        in first
    )
    assert second == ""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, list[float]]]:
    ran = run_forked(Path(engine_interpreted.__file__), environment=os.environ, processes=1, time_limit_s=150)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize("case", engine_interpreted.CASES)
def test_auto_takes_the_triton_forms_which_are_the_references_bit_for_bit(interpreted, case):
    found, expected = interpreted[case], engine_interpreted.trained(case, "always")
    assert found["sums"] == expected["sums"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    assert found["buckets"] == expected["buckets"] or "chance" in case
    torchs = engine_interpreted.trained(case, "never")
    assert found["sums"] != torchs["sums"] and torchs["buckets"] == []


def calls_of_a_step(layers: int, **settings) -> int:
    """Calls of Python and C functions in a clip and a step, once state is there."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model, [optimizer], {"stage": 2, "kernels": "always", **settings})
    count = 0

    def on_call(_frame, event, _argument):
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(3):
        model(torch.ones(2, 64).to(next(model.parameters()))).sum().backward()
        count = 0
        sys.setprofile(on_call)
        try:
            engine.clip_grad_norm_(0.1)
            optimizer.step()
        finally:
            sys.setprofile(None)
        optimizer.zero_grad()
    engine.close()
    return count


# On a GPU the host would otherwise be what a step waits for: with 200 calls a parameter, GPT-2's took half as long again.
@pytest.mark.parametrize(("param_dtype", "most"), [("auto", 40), ("bfloat16", 50)])
def test_a_parameter_costs_the_host_few_calls(param_dtype, most):
    few, many = (calls_of_a_step(layers, param_dtype=param_dtype) for layers in (8, 40))
    # A weight and a bias.
    assert (many - few) / (2 * 32) <= most


def test_small_parameters_beside_blocks_keep_their_moments_one_behind_the_other():
    model = nn.Sequential(*[nn.LayerNorm(64) for _ in range(4)], nn.Linear(64, 128), nn.LayerNorm(128))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], {"stage": 2, "kernels": "always", "moments": "8bit"})
    for _ in range(2):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = [row for row in engine.buckets[0].rows if row.slot.parameter.dim() == 1]
    moments = [optimizer.state[row.tensor]["exp_avg"] for row in rows]
    assert len({moment.untyped_storage().data_ptr() for moment in moments}) == 1
    ends = [moment.data_ptr() + moment.nbytes for moment in moments]
    assert [moment.data_ptr() for moment in moments[1:]] == ends[:-1]
    engine.close()
