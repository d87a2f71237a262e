"""accelerate's doors and an Accelerator's methods: DDP's losses, saves that others can read, resumes, and refusals by name."""

import copy
import logging
import os
import pickle
import re
import shlex
import sys
from collections import UserDict
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import numpy as np
import pytest
import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_job import Texts, make_accelerator, run
from cells import short_of, slow
from safetensors.torch import load_file
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from torch.distributed.run import get_args_parser
from torch.utils.data import DataLoader
from trainer_job import as_launched, make_trainer
from training import bert, bert_batch, gpt2, gpt2_batch
from transformers import Trainer, get_linear_schedule_with_warmup

from hf_zero import ConfigError, ZeroPlugin, engine_of
from hf_zero.comm.groups import _LAUNCHED_RANKS
from hf_zero.engine.engine import ZeroEngine
from hf_zero.hooks.mixins import mix_in
from hf_zero.hooks.tensors import tensors_in
from hf_zero.integrations.environment import _processes_on
from hf_zero.presence.error_hook import ERROR_FILE_VARIABLE
from hf_zero.versions import is_older

pytestmark = pytest.mark.timeout(180)


def launched(rank: int, world_size: int, forecasts: bool = False, **arguments) -> dict:
    as_launched(rank, world_size, forecasts=forecasts)
    return run(rank, world_size, **{"steps": 4, **arguments})


@pytest.fixture(scope="module")
def ddp():
    """Stock DDP's outcome a rank, run once for each set of arguments."""
    known: dict[str, list[dict]] = {}

    def outcome(**arguments) -> list[dict]:
        key = repr(sorted(arguments.items()))
        if key not in known:
            known[key] = run_on_ranks(launched, door="ddp", **arguments)
        return known[key]

    return outcome


def assert_same(outcomes: list[dict], expected: list[dict]) -> None:
    for mine, theirs in zip(outcomes, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert np.allclose(mine["norms"], theirs["norms"], rtol=1e-6, atol=0)
        if mine["door"].endswith("3") and mine is not outcomes[0]:
            assert mine["state"] == {}
        else:
            assert mine["state"] == {name.removeprefix("module."): value for name, value in theirs["state"].items()}
        assert mine["model"] == "GPT2LMHeadModel"


DOORS = ["plugin 0", "plugin 1", "plugin 2", "attach 2", "yaml 2", "variable 1"]
DOORS_TO_STAGE_3 = ["plugin 3", "attach 3", "yaml 3", "variable 3"]


@pytest.mark.short_cells("yaml 2", "variable 3")
@pytest.mark.parametrize("door", [*DOORS, *DOORS_TO_STAGE_3])
def test_every_door_has_ddps_losses(door, ddp):
    outcomes = run_on_ranks(launched, door=door, forecasts=door.startswith("plugin"))
    assert_same(outcomes, ddp())
    assert all(outcome["class"] == "ZeroAcceleratorMixin" and outcome["sent"] > 0 for outcome in outcomes)


@pytest.mark.parametrize(
    ("order", "stage"),
    [
        ("optimizer first", 2),
        ("one by one", 3),
        ("optimizer alone first", 2),
        ("by their methods", 1),
        *(
            pytest.param(order, stage, marks=pytest.mark.slow)
            for order, stage in (("optimizer first", 3), ("one by one", 2), ("optimizer alone first", 3))
        ),
    ],
)
def test_prepare_in_any_order(order, stage, ddp):
    assert_same(run_on_ranks(launched, door=f"plugin {stage}", order=order, steps=4), ddp(steps=4))


def test_accumulate_and_plain_backward(ddp):
    expected = ddp(accumulation=2, steps=4)
    assert_same(run_on_ranks(launched, door="plugin 1", accumulation=2, steps=4), expected)
    assert_same(run_on_ranks(launched, door="plugin 1", accumulation=2, steps=4, plain_backward=True), expected)


@pytest.mark.parametrize("stage", short_of([2, 3], [3]))
def test_gradients_that_are_summed_in_shards_are_close(stage, ddp):
    outcomes = run_on_ranks(launched, door=f"plugin {stage}", accumulation=2, steps=4)
    for mine, theirs in zip(outcomes, ddp(accumulation=2, steps=4), strict=True):
        assert np.allclose(mine["losses"], theirs["losses"], rtol=1e-5, atol=0)


class Encoder(nn.Sequential):
    """Returns a mapping that is no dict, as sentence-transformers' cross-encoders do."""

    def forward(self, rows: torch.Tensor) -> UserDict:
        return UserDict(embedding=super().forward(rows))


def replaying(rank: int, world_size: int, door: str) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of steps with a loss whose hook replays mini-batches, as GradCache does."""
    AcceleratorState._reset_state()
    accelerator = make_accelerator(door, cpu=True)
    torch.manual_seed(0)
    model = Encoder(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(2):
        parts = torch.randn(6, 6, generator=torch.Generator().manual_seed(10 * step + rank)).split(2)
        with torch.no_grad():
            outputs = [model(part) for part in parts]
            embeddings = [each["embedding"] for each in outputs]
        # The engine has to find the tensors in what a layer returns.
        assert list(map(id, tensors_in(outputs))) == list(map(id, embeddings))
        embeddings = [each.requires_grad_() for each in embeddings]
        inner = torch.cat(embeddings)
        inner = (inner @ inner.T).logsumexp(1).mean()
        inner.backward()

        def replay(gradient, parts=parts, embeddings=embeddings):
            for part, embedding in zip(parts, embeddings):
                is_last = part is parts[-1] or door != "ddp"
                with torch.enable_grad(), nullcontext() if is_last else model.no_sync():
                    ((model(part)["embedding"] * embedding.grad).sum() * gradient).backward()

        loss = inner.detach().requires_grad_()
        loss.register_hook(replay)
        # Trainers sum a loss of several parts.
        accelerator.backward(torch.stack([loss]).sum())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name.removeprefix("module."): value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    return losses, state


def with_uneven_forwards(rank: int, door: str) -> list[float]:
    """Losses of steps in which the second rank runs twice as many forwards before its backward."""
    AcceleratorState._reset_state()
    accelerator = make_accelerator(door, cpu=True)
    torch.manual_seed(0)
    model = gpt2(layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(2):
        batch = gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 1)
        loss = torch.stack([model(**batch).loss for _ in range(2 + 2 * rank)]).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


@on_ranks(2)
def test_ranks_may_run_different_numbers_of_forwards_before_a_backward(rank, world_size):
    as_launched(rank, world_size)
    assert with_uneven_forwards(rank, "plugin 3") == with_uneven_forwards(rank, "ddp")


@on_ranks(2)
def test_backwards_inside_a_backward_are_micro_batches_of_one_reduction(rank, world_size):
    as_launched(rank, world_size)
    losses, weights = replaying(rank, world_size, "ddp")
    for door in ("plugin 1", "plugin stage=3,grad_accumulation=local"):
        mine, state = replaying(rank, world_size, door)
        assert mine == losses, door
        # At stage 3, only the first rank gets the whole state.
        assert rank > 0 or all(torch.equal(state[name], weights[name]) for name in weights), door


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "model"), [(2, "texts"), *(pytest.param(stage, "gpt2", marks=pytest.mark.slow) for stage in (0, 2))]
)
def test_compiled_model_has_ddps_losses(stage, model, ddp):
    """GPT-2 is compiled for ten seconds on each rank."""
    small = {"steps": 4, "layers": 1, "model": model}
    for mine, theirs in zip(run_on_ranks(launched, door=f"plugin {stage}", compile_model=True, **small), ddp(**small)):
        assert np.allclose(mine["losses"], theirs["losses"], rtol=1e-6, atol=0)


@pytest.mark.short_cells("3")
@pytest.mark.parametrize("settings", short_of(["0", "1", "2", "3", "stage=2,comm.sync_every=3"], ["1", "3"]))
def test_save_state_and_load_state_continue_bit_for_bit(settings, tmp_path):
    door = f"plugin {settings}"
    whole = run_on_ranks(launched, door=door, steps=4, save_to=str(tmp_path / "state"))
    saved = load_file(tmp_path / "state" / "model.safetensors")
    assert len(saved) == len(whole[0]["state"]) - 1
    assert not list((tmp_path / "state").glob("optimizer*"))
    resumed = run_on_ranks(launched, door=door, steps=4, load_from=str(tmp_path / "state"))
    for a, b in zip(whole, resumed):
        assert b["losses"] == a["losses"][-2:]
        assert b["state"] == a["state"]


def trained_once(stage: int, **arguments) -> tuple[Accelerator, torch.nn.Module]:
    """An accelerator, and a tied model after one step."""
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=stage), **arguments)
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(**gpt2_batch(torch.Generator(), 2)).loss)
    optimizer.step()
    return accelerator, model


@pytest.mark.parametrize("stage", short_of([2, 3], [3]))
@on_ranks(2)
def test_save_model_writes_every_name(rank, world_size, stage, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    accelerator, model = trained_once(stage)
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    state = model.state_dict()
    saved = load_file(f"{folder}/model.safetensors")
    assert set(state) - set(saved) == {"lm_head.weight"} or set(state) - set(saved) == {"transformer.wte.weight"}
    assert all(torch.equal(saved[name], state[name]) for name in saved)


@pytest.mark.parametrize("stage", short_of([2, 3], [3]))
@on_ranks(2)
def test_save_pretrained_of_get_state_dict_reloads_to_the_live_model(rank, world_size, stage, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    accelerator, model = trained_once(stage)
    state = accelerator.get_state_dict(model)
    live = model.state_dict()
    if stage == 3 and rank > 0:
        assert state == {}
    else:
        assert list(state) == list(live) and all(torch.equal(state[name], live[name]) for name in live)
        assert all(value.device.type == "cpu" for value in state.values())
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=state)
    accelerator.wait_for_everyone()
    loaded = type(unwrapped).from_pretrained(folder).state_dict()
    assert set(loaded) == set(live) and all(torch.equal(loaded[name], live[name]) for name in live)


@on_ranks(2)
def test_save_model_on_each_node_writes_whole_models_at_stage_3(rank, world_size, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    # One rank a node, each with a folder of its own.
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    accelerator, model = trained_once(3, project_config=ProjectConfiguration(save_on_each_node=True))
    accelerator.save_model(model, f"{folder}/{rank}")
    saved, live = load_file(f"{folder}/{rank}/model.safetensors"), model.state_dict()
    assert len(saved) == len(live) - 1 and all(torch.equal(saved[name], live[name]) for name in saved)


# To compile takes nearly all of the time.
@pytest.mark.slow
@pytest.mark.parametrize("regional", [True, False], ids=["regional", "whole"])
@on_ranks(2)
def test_a_compiled_model_is_compiled_layer_by_layer_at_stage_3(rank, world_size, regional):
    as_launched(rank, world_size)
    compiler = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    losses = {}
    for door in ("ddp", "plugin 3"):
        torch._dynamo.reset()
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = make_accelerator(door, dynamo_plugin=compiler, cpu=True)
        torch.manual_seed(0)
        model = gpt2(layers=2)
        with redirect_stderr(StringIO()) as said:
            prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        data, losses[door] = torch.Generator().manual_seed(rank), []
        for _ in range(3):
            loss = prepared(**gpt2_batch(data, 2), use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[door].append(loss.item())
        if door != "ddp":
            state = model.state_dict()
            assert accelerator.get_state_dict(prepared).keys() == (state.keys() if rank == 0 else set())
        accelerator.free_memory()
    assert losses["plugin 3"] == losses["ddp"]
    planned = "2 layers, each separately, instead of the whole model" in said.getvalue()
    assert planned == (rank == 0 and not regional)


@pytest.mark.parametrize("door", [slow("ddp"), "plugin 2"])
@on_ranks(1)
def test_a_model_that_is_prepared_twice_is_compiled_both_times(rank, world_size, door):
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, dynamo_backend="eager", cpu=True)
    model = torch.nn.Linear(2, 2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for each in (prepared, accelerator.prepare(model)):
        assert isinstance(each, torch._dynamo.OptimizedModule) and accelerator.unwrap_model(each, False, False) is model
        before = model.weight.detach().clone()
        accelerator.backward(each(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(model.weight, before - 0.1)


@pytest.mark.skipif(
    is_older(accelerate.__version__, (1, 15)),
    reason="older releases of accelerate wrap the forward of a compiled model again",
)
@on_ranks(1)
def test_a_compiled_model_that_is_prepared_again_has_one_autocast(rank, world_size):
    as_launched(rank, world_size)
    accelerator = make_accelerator("plugin 2", dynamo_backend="eager", mixed_precision="bf16", cpu=True)
    model = torch.nn.Linear(2, 2)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = prepared.forward
    assert accelerator.prepare(prepared) is prepared and prepared.forward == before


def distilled(rank: int, world_size: int, door: str, order: str, folder: str) -> dict:
    """A student that learns from a frozen teacher; saves both in the middle, goes on, and does the rest once more."""
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True)
    torch.manual_seed(0)
    student, teacher = bert(), bert().requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    if order == "teacher first":
        teacher = accelerator.prepare(teacher)
    if order == "together":
        student, teacher, optimizer = accelerator.prepare(student, teacher, optimizer)
    else:
        student, optimizer = accelerator.prepare(student, optimizer)
    if order == "for evaluation":
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)

    def steps(seed: int) -> list[float]:
        generator, losses = torch.Generator().manual_seed(2 * seed + rank), []
        for _ in range(4):
            batch = bert_batch(generator, 2)
            with torch.no_grad():
                wanted = teacher(**batch).logits.softmax(-1)
            answer = student(**batch)
            loss = answer.loss + torch.nn.functional.cross_entropy(answer.logits, wanted)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(student.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = steps(0)
    accelerator.save_state(folder)
    second = steps(1)
    accelerator.load_state(folder)
    assert steps(1) == second
    state = accelerator.get_state_dict(teacher)
    rows = [] if door == "ddp" else engine_of(teacher).memory_report().rows
    return {
        "losses": first + second,
        "teacher": {name: value.tolist() for name, value in state.items()},
        "held": {row.kind: (row.bytes, row.ddp_bytes) for row in rows},
    }


@pytest.mark.slow
@pytest.mark.parametrize("order", short_of(["together", "teacher first", "for evaluation"], ["teacher first"]))
def test_a_frozen_teacher_is_sharded_and_its_student_trains_like_under_ddp(order, tmp_path):
    # DDP takes no model without gradients, so stock accelerate has this one way.
    expected = run_on_ranks(distilled, door="ddp", order="for evaluation", folder=str(tmp_path / "ddp"))
    outcomes = run_on_ranks(distilled, door="plugin 3", order=order, folder=str(tmp_path / "zero"))
    for mine, theirs in zip(outcomes, expected):
        assert mine["losses"] == theirs["losses"]
        held, ddp_held = mine["held"]["frozen parameters and buffers"]
        assert held < 0.6 * ddp_held
        assert mine["held"]["parameters"] == mine["held"]["optimizer state"] == (0, 0)
    assert outcomes[0]["teacher"] == expected[0]["teacher"]
    assert outcomes[1]["teacher"] == {}


@on_ranks(2)
def test_several_models_and_optimizers_in_one_accelerator(rank, world_size):
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    torch.manual_seed(rank)
    first, second, teacher = gpt2(), bert(), bert().requires_grad_(False)
    body = torch.optim.AdamW([p for n, p in second.named_parameters() if "classifier" not in n], lr=1e-3)
    head = torch.optim.SGD(second.classifier.parameters(), lr=0.1)
    opt = torch.optim.AdamW(first.parameters(), lr=1e-3)
    first, opt, second, body, head, teacher = accelerator.prepare(first, opt, second, body, head, teacher)
    with pytest.raises(ValueError, match="2: pass the model"):
        engine_of(accelerator)
    assert engine_of(first) is not engine_of(second)
    for seed in range(3):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        data = bert_batch(generator, 2)
        with torch.no_grad():
            teacher(**data)
        accelerator.backward(first(**gpt2_batch(generator, 2)).loss + second(**data).loss)
        accelerator.clip_grad_norm_(first.parameters(), 1.0)
        with pytest.raises(ValueError, match="parameters of several models"):
            accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
        for optimizer in (opt, body, head):
            optimizer.step()
            optimizer.zero_grad()
    assert engine_of(second).full_state(second.classifier.weight) == {}
    assert "exp_avg" in engine_of(second).full_state(second.bert.pooler.dense.weight)


@on_ranks(2)
def test_a_checkpoint_has_rank_0s_values_of_what_ddp_ignores(rank, world_size, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    own = torch.empty(0)
    for settings in ({"stage": 2}, {"stage": 3}, {"stage": 3, "checkpoint": {"layout": "sharded"}}):
        accelerator = ZeroPlugin(settings).attach(Accelerator())
        saved = f"{folder}/{settings}"
        for resumes in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False))
            model[1].weight.data.fill_(rank - 0.5)
            model._ddp_params_and_buffers_to_ignore = ["1.weight"]
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            if resumes:
                accelerator.load_state(saved)
                # Rank 0's on all ranks, and state for the shared parameters alone.
                assert torch.equal(model[1].weight, own[0].view(4, 4)) and model[1].weight not in optimizer.state
                assert sum(state["exp_avg"].numel() for state in optimizer.state.values()) == (20 if rank == 0 else 0)
            accelerator.backward(model(torch.ones(2, 4)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
            if not resumes:
                accelerator.save_state(saved)
                own = accelerator.gather(model[1].weight.detach().view(1, 16))
                assert not torch.equal(own[0], own[1])
            accelerator.free_memory()


@on_ranks(2)
def test_free_memory_and_a_new_optimizer(rank, world_size):
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    torch.manual_seed(0)
    model = gpt2()
    first = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared, first = accelerator.prepare(model, first)
    engine = engine_of(prepared)
    accelerator.backward(prepared(**gpt2_batch(torch.Generator(), 2)).loss)
    first.step()
    accelerator.free_memory()
    second = torch.optim.SGD(prepared.parameters(), lr=0.1)
    prepared, second = accelerator.prepare(prepared, second)
    assert engine_of(prepared) is not engine
    accelerator.backward(prepared(**gpt2_batch(torch.Generator(), 2)).loss)
    second.step()
    second.zero_grad()


@on_ranks(2)
def test_what_cannot_work_is_refused_by_name(rank, world_size):
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    model = gpt2()
    with pytest.raises(ValueError, match="cannot be stepped over shards"):
        accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    # The refusal leaves nothing behind: the next prepare is tried by itself.
    with pytest.raises(ValueError, match=r"holds none of the parameters of the prepared models"):
        accelerator.prepare(gpt2(), torch.optim.SGD(gpt2().parameters(), lr=0.1))
    replaced = [*list(model.parameters())[1:], nn.Parameter(torch.zeros(4))]
    with pytest.raises(ValueError, match=r"1 parameters that are not in the model.*Build the optimizer after resize"):
        accelerator.prepare(model, torch.optim.SGD(replaced, lr=0.1))
    accelerator.free_memory()
    with torch.device("meta"):
        empty = gpt2()
    with pytest.raises((ValueError, NotImplementedError), match="meta"):
        accelerator.prepare(empty, torch.optim.SGD(empty.parameters(), lr=0.1))
    accelerator.free_memory()
    frozen = gpt2().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train or shard"):
        accelerator.prepare(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))
    accelerator.free_memory()
    alone = accelerator.prepare(gpt2())
    with pytest.raises(RuntimeError, match="prepared without its optimizer"):
        alone(**gpt2_batch(torch.Generator(), 1))
    with torch.no_grad():
        alone(**gpt2_batch(torch.Generator(), 1))
    with pytest.raises(ValueError, match="is not a state saved with hf_zero"):
        good = gpt2()
        accelerator.prepare(good, torch.optim.SGD(good.parameters(), lr=0.1))
        accelerator.load_state("/")


@on_ranks(2)
def test_ranks_that_each_think_they_are_alone_are_refused(rank, world_size):
    as_launched(rank, world_size)
    accelerator = Accelerator(cpu=True)
    type(accelerator).num_processes = property(lambda self: 1)
    with pytest.raises(ConfigError, match="2 processes were requested, but accelerate counts 1"):
        ZeroPlugin(2).attach(accelerator)


STARTS = [
    (["-u", "-m", "hf_zero.run", "--zero", "2", "train.py", "--name", "a b"], None),
    (["-X", "dev", "-W", "ignore", "train.py", "--zero", "2"], ["train.py", "--zero", "2"]),
    (["-Xdev", "-m", "package.train"], ["-m", "package.train"]),
]


@pytest.mark.parametrize(("started", "expected"), STARTS)
def test_the_command_for_ranks_on_a_cpu_starts_what_was_started(monkeypatch, fresh_state, started, expected):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", *started])
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as error:
        ZeroPlugin(2).attach(accelerator)
    [command] = re.findall("`(.*)`", str(error.value))
    words = shlex.split(command)
    assert words[0] == "ACCELERATE_USE_CPU=true" and words[1] == "torchrun"
    launched = get_args_parser().parse_args(words[2:])
    assert launched.nproc_per_node == "2"
    given = [*(["-m"] if launched.module else []), launched.training_script, *launched.training_script_args]
    assert given == (expected or started[1:])


@pytest.mark.parametrize(
    ("started", "variables", "said"),
    [
        (
            ["-m", "ipykernel_launcher", "-f", "kernel.json"],
            {},
            r"set os.environ\['ACCELERATE_USE_CPU'\] = 'true' in a cell",
        ),
        (["-c", "spawned"], {"FORK_LAUNCHED": "1"}, r"set os.environ\['ACCELERATE_USE_CPU'\] = 'true' in a cell"),
        (
            ["-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"],
            {},
            "environment of the launcher",
        ),
        (["train.py"], {"LOCAL_WORLD_SIZE": "1"}, "environment of the launcher, on each host"),
    ],
)
def test_where_no_command_starts_ranks_the_setting_is_named(monkeypatch, fresh_state, started, variables, said):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", *started])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in ({"OMPI_COMM_WORLD_SIZE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said) as error:
        ZeroPlugin(2).attach(accelerator)
    assert "torchrun" not in str(error.value)


@on_ranks(2)
def test_loops_that_differ_between_ranks_are_refused(rank, world_size):
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(2))

    def prepare(rows: int = 8, batch_size: int = 2, steps: int = 10, accumulates: int = 1) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.gradient_accumulation_steps = accumulates
        loader = DataLoader(torch.ones(rows, 2), batch_size=batch_size)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, steps)
        accelerator.prepare(model, optimizer, loader, schedule)

    differences = {
        "samples of data loader 0: 8 on rank 0, 10 on rank 1": {"rows": 10},
        "batch size of data loader 0: 2 on rank 0, 4 on rank 1": {"batch_size": 4},
        "'num_training_steps': 20": {"steps": 20},
        "gradient_accumulation_steps: 1 on rank 0, 2 on rank 1": {"accumulates": 2},
    }
    for says, settings in differences.items():
        with pytest.raises(ValueError, match="do not train the same model with the same settings") as error:
            prepare(**settings if rank == 1 else {})
        assert says in str(error.value)
        accelerator.free_memory()
    prepare()


@pytest.mark.parametrize("variable", _LAUNCHED_RANKS)
def test_one_of_several_processes_without_a_process_group_is_refused(monkeypatch, fresh_state, variable):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    # Before the variable: accelerate itself connects the ranks of some launchers.
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv(variable, "2")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight
    with pytest.raises(ConfigError, match=f"{variable} is 2 and torch.distributed has no process group"):
        ZeroEngine(model, [optimizer], 2)
    assert model.weight is before is optimizer.param_groups[0]["params"][0]
    with pytest.raises(ConfigError, match="2 processes were requested, but accelerate counts 1"):
        ZeroPlugin(2).attach(accelerator)
    # Runs of one process each, as of a sweep that srun starts.
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ZeroEngine(model, [optimizer], 2).groups.world_size == 1


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("python /bin/accelerate launch --cpu --num_processes 2 script.py", 2),
        ("/bin/accelerate launch --num_processes=3 script.py", 3),
        ("python -m accelerate.commands.accelerate_cli launch script.py", None),
        ("python -m hf_zero.integrations.launcher launch --num_processes 2 script.py", 2),
        ("bash launch --num_processes 2", None),
        ("accelerate launch --num_processes", None),
    ],
)
def test_the_launchers_command_line_is_read(words, processes):
    assert _processes_on(words.split()) == processes


@pytest.fixture
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_one_process_without_a_group(fresh_state):
    outcome = run(0, 1, "plugin 2", steps=4)
    assert outcome["class"] == "ZeroAcceleratorMixin" and outcome["sent"] == 0
    assert len(outcome["losses"]) == 4


def in_a_notebook(folder: str) -> None:
    outcome = run(0, 1, "plugin 1", steps=2)
    Path(folder, outcome["class"]).touch()


def test_notebook_launcher(fresh_state, tmp_path):
    notebook_launcher(in_a_notebook, (str(tmp_path),), num_processes=1)
    assert (tmp_path / "ZeroAcceleratorMixin").exists()


def test_a_plugin_is_attached_before_prepare(fresh_state):
    accelerator = ZeroPlugin(2).attach(Accelerator(cpu=True))
    loader = accelerator.prepare(DataLoader(Texts(4)))
    assert next(iter(loader))["input_ids"].shape == (1, 16)
    plugin, other = ZeroPlugin(2), Accelerator(cpu=True)
    other.prepare(gpt2())
    with pytest.raises(ConfigError, match="was called after accelerator"):
        plugin.attach(other)


def test_a_plugin_takes_one_source_of_settings():
    with pytest.raises(ConfigError, match="pass only one of the two"):
        ZeroPlugin(2, stage=1)


def test_other_sharders_are_refused(fresh_state, monkeypatch):
    plugin = ZeroPlugin(2)
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "distributed_type", property(lambda self: DistributedType.FSDP))
    with pytest.raises(ConfigError, match="Two engines cannot own one model"):
        plugin.attach(accelerator)


def test_mixed_precision_has_one_owner(fresh_state):
    with pytest.raises(ConfigError, match="the cast is set twice"):
        Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=ZeroPlugin(param_dtype="float16"))


def refused_beside_a_group(rank: int, world_size: int, file: Path) -> tuple[str, bool]:
    as_launched(rank, world_size)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ConfigError) as raised:
        ZeroPlugin(param_dtype="float16").attach(accelerator)
    with patch.dict(os.environ, {ERROR_FILE_VARIABLE: str(file)}):
        sys.excepthook(raised.type, raised.value, raised.tb)
    return file.read_text(), type(accelerator) is Accelerator


def test_a_plugin_that_is_refused_leaves_its_error_to_the_launcher_and_the_accelerator_plain(tmp_path):
    [(told, is_plain)] = run_on_ranks(refused_beside_a_group, world_size=1, file=tmp_path / "error.json")
    assert "the cast is set twice" in told and is_plain


def planned_rows(rank: int, world_size: int, accumulation: int) -> list[str]:
    as_launched(rank, world_size)
    with redirect_stderr(StringIO()) as text:
        run(rank, world_size, "plugin 2", steps=1, accumulation=accumulation)
    return [
        line.partition("rows a step")[2].strip("│ ") for line in text.getvalue().splitlines() if "rows a step" in line
    ]


@pytest.mark.parametrize(
    ("ranks", "accumulation", "says"),
    [
        (1, 1, "4 a rank on one rank; N ranks take N times as many"),
        (1, 2, "4 a rank x 2 micro-batches on one rank; N ranks take N times as many"),
        (2, 2, "4 a rank x 2 micro-batches x 2 ranks = 16"),
    ],
)
def test_the_plan_tells_the_rows_of_a_step(ranks, accumulation, says):
    assert run_on_ranks(planned_rows, world_size=ranks, accumulation=accumulation)[0] == [says]


# ---- an Accelerator's other methods ----


def prepared(accelerator: Accelerator, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def clipped_at_each(rank: int, world_size: int, door: str) -> list[float]:
    """Clips micro-batches, too: parameters after three steps."""
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True, gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(5, 6, generator=generator)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
            accelerator.clip_grad_value_(model.parameters(), 0.002)
            optimizer.step()
            optimizer.zero_grad()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def test_micro_batches_that_are_clipped_before_they_are_reduced_are_clipped_as_under_ddp():
    found, expected = (run_on_ranks(clipped_at_each, door=door)[0] for door in ("plugin 1", "ddp"))
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-7)


def clips_amiss(rank: int, world_size: int) -> list[str]:
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(2), cpu=True, gradient_accumulation_steps=2)
    # Large enough that each rank has a part of it.
    model, optimizer = prepared(accelerator, nn.Linear(64, 64))
    said: list[str] = []
    logging.getLogger("hf_zero.integrations.accelerator").addFilter(lambda line: said.append(line.getMessage()))
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(5, 64)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"from optimizer\.param_groups.*Pass model\.parameters\(\)"):
        accelerator.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    return said


def test_clipping_micro_batches_that_are_reduced_is_told_once_and_clipping_rows_is_refused():
    main, other = run_on_ranks(clips_amiss)
    assert len(main) == 1 and "before the last micro-batch" in main[0] and "sync_gradients" in main[0]
    assert other == []


@on_ranks(2)
def test_clipping_scaled_micro_batches_is_refused(rank, world_size):
    as_launched(rank, world_size)
    accelerator = Accelerator(
        parallelism_config=ZeroPlugin(2), cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2
    )
    model, _ = prepared(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(5, 6)).sum())
        with pytest.raises(RuntimeError, match=r"unscaled only once.*sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)


def asked_of_ddp(rank: int, world_size: int) -> list[float]:
    as_launched(rank, world_size)
    asked = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(2), cpu=True, kwargs_handlers=[asked])
    model, optimizer = prepared(accelerator, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        accelerator.backward(model(torch.full((3, 4), float(rank))).sum())
        optimizer.step()
        optimizer.zero_grad()
    return model[1].running_mean.tolist()


def test_buffers_stay_apart_where_ddp_is_told_so():
    first, second = run_on_ranks(asked_of_ddp)
    assert first != second


class Ending(torch.autograd.Function):
    """Returns its input, whose gradient it leaves undefined."""

    @staticmethod
    def forward(_ctx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx, _gradient: torch.Tensor) -> None:
        return None


class Ended(nn.Module):
    def __init__(self):
        super().__init__()
        self.stays, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(inputs + Ending.apply(self.stays(inputs)))


def decayed(rank: int, world_size: int, asked: dict[str, bool], door: str) -> list[float]:
    as_launched(rank, world_size)
    plugin = ZeroPlugin(2) if door == "zero" else None
    handler = DistributedDataParallelKwargs(**asked)
    accelerator = Accelerator(parallelism_config=plugin, cpu=True, kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = Ended()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    for _ in range(3):
        accelerator.backward(prepared(torch.ones(3, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return model.stays.weight.flatten().tolist()


@pytest.mark.parametrize("asked", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_gradient_that_is_undefined_on_all_ranks_is_what_ddps_settings_make_of_it(asked):
    assert run_on_ranks(decayed, asked=asked, door="zero") == run_on_ranks(decayed, asked=asked, door="ddp")


def test_hooks_of_ddp_are_refused(fresh_state):
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    with pytest.raises(ConfigError, match=r"comm_hook=bf16.*`reduce_dtype: bfloat16`"):
        Accelerator(cpu=True, parallelism_config=ZeroPlugin(2), kwargs_handlers=[hook])


class SlowWeights(torch.optim.Optimizer):
    """Steps another optimizer, and sets nothing up for its own hooks."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, {}

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_around_another_is_refused(fresh_state):
    accelerator = Accelerator(cpu=True, parallelism_config=ZeroPlugin(2))
    first = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"SlowWeights contains another optimizer, SGD, .*Prepare only the SGD"):
        accelerator.prepare(first, SlowWeights(torch.optim.SGD(first.parameters(), lr=0.1)))


def with_optimizers_apart(rank: int, world_size: int, door: str) -> list[float]:
    """Losses of a model whose second optimizer is prepared later, and whose third takes the place of the first."""
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    of_the_first, of_the_second = list(model[0].parameters()), list(model[2].parameters())
    generator = torch.Generator().manual_seed(rank)
    losses = []

    def train(*optimizers: torch.optim.Optimizer) -> None:
        for _ in range(3):
            loss = prepared_model(torch.randn(5, 6, generator=generator)).square().mean()
            accelerator.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            losses.append(loss.item())

    prepared_model, first = accelerator.prepare(model, torch.optim.AdamW(of_the_first, lr=1e-2))
    second = torch.optim.AdamW(of_the_second, lr=1e-2)
    train(first)
    second = accelerator.prepare(second)
    train(first, second)
    third = accelerator.prepare(torch.optim.SGD(of_the_first, lr=1e-1))
    train(second, third)
    return losses


@pytest.mark.short_cells("plugin 3")
@pytest.mark.parametrize("door", ["plugin 1", "plugin 2", "plugin 3"])
def test_optimizers_that_are_prepared_one_after_the_other_train_together(door):
    found, expected = (run_on_ranks(with_optimizers_apart, door=each) for each in (door, "ddp"))
    assert found == expected


def test_a_parameter_of_two_optimizers_is_refused_by_name(fresh_state):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizers = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model[1].parameters())
    with pytest.raises(
        ValueError, match=r"'1.weight' is held by two optimizers, AdamW and SGD. Give each parameter to one"
    ):
        Accelerator(parallelism_config=ZeroPlugin(2), cpu=True).prepare(model, *optimizers)


def shown(thing: Any) -> list[str]:
    """How an object, its pickle and its copies show themselves; an error by its class."""
    found = []
    for again in (lambda: thing, lambda: pickle.loads(pickle.dumps(thing)), lambda: copy.deepcopy(thing)):
        try:
            kind = type(again())
            found.append(f"{kind.__module__}.{kind.__qualname__}.{kind.__name__}")
        except Exception as error:
            found.append(type(error).__name__)
    return found


OF_VALUES = ("read parameter", "text")


class OwnScaler(torch.amp.GradScaler):
    pass


class OwnTrainer(Trainer):
    pass


def shown_in_a_run(rank: int, world_size: int, door: str, folder: str) -> dict[str, list[str]]:
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True)
    found = {"accelerator": shown(accelerator)}
    accelerator.scaler = OwnScaler("cpu", init_scale=4.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    listed = list(model.parameters())
    optimizer = torch.optim.AdamW(listed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    found |= {type(each).__name__: shown(each) for each in (*prepared[1:], optimizer, scheduler)}
    found |= {"scaler": shown(accelerator.scaler), "prepared accelerator": shown(accelerator)}
    for _ in range(2):
        accelerator.backward(prepared[0](torch.ones(4, 64)).sum())
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found |= {"gradient of the optimizer's": shown(gradients[-1]), "its text": [repr(gradients[-1])[:7]]}
        prepared[1].step()
        # Taken beforehand, and on its way now.
        found["parameter"] = shown(listed[0])[:1]
        prepared[1].zero_grad()
    if not door.endswith("3"):
        found |= dict(zip(OF_VALUES, (shown(listed[0]), [repr(listed[0])[:20]])))
    shallow = copy.copy(accelerator)
    assert shallow._models == accelerator._models and shallow.__dict__.items() <= accelerator.__dict__.items()
    if door != "ddp":
        assert shallow.zero_engines == accelerator.zero_engines != []
        another = pickle.loads(pickle.dumps(accelerator))
        assert another.zero_engines == [] == another._models == another._optimizers == another._schedulers
        other = nn.Linear(64, 64)
        trained, stepping = another.prepare(other, torch.optim.SGD(other.parameters(), 0.1))
        another.backward(trained(torch.ones(4, 64)).sum())
        stepping.step()
        assert engine_of(other) in another.zero_engines and len(accelerator.zero_engines) == 1
    doors = {"ddp": "ddp"} | {f"plugin {stage}": f"callback {stage}" for stage in range(4)}
    for kind in (Trainer, OwnTrainer):
        trainer = make_trainer(doors[door], "gpt2", folder, trainer_class=kind)
        found[kind.__name__] = shown(trainer)
        assert copy.copy(trainer).__dict__ == trainer.__dict__
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_objects_whose_class_is_replaced_show_copy_and_pickle_themselves_as_before(stage, tmp_path):
    stock, ours = (run_on_ranks(shown_in_a_run, door=d, folder=str(tmp_path)) for d in ("ddp", f"plugin {stage}"))
    # At stage 3 the values of a parameter cannot be read outside of a forward.
    assert ours == [{name: each for name, each in rank.items() if stage < 3 or name not in OF_VALUES} for rank in stock]


def test_an_object_with_a_pickle_of_its_own_keeps_it():
    thing = ByArguments(3)
    mix_in(thing, Mixed)
    again = pickle.loads(pickle.dumps(thing))
    assert (again.number, again.made_by) == (3, "arguments") and isinstance(again, Mixed)


class Mixed:
    pass


class ByArguments:
    def __init__(self, number: int, made_by: str = "hand"):
        self.number, self.made_by = number, made_by

    def __reduce__(self):
        return type(self), (self.number, "arguments")


@pytest.mark.parametrize("reset_partial_state", [False, True])
def test_behind_a_reset_of_accelerates_state_its_own_explanation_comes(fresh_state, tmp_path, reset_partial_state):
    accelerator = Accelerator(cpu=True, parallelism_config=ZeroPlugin(2))
    prepared(accelerator)
    AcceleratorState._reset_state(reset_partial_state)
    for call in (
        lambda: accelerator.prepare(nn.Linear(1, 1)),
        lambda: accelerator.prepare_model(nn.Linear(1, 1)),
        lambda: accelerator.prepare_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)),
        lambda: accelerator.save_state(str(tmp_path)),
        lambda: accelerator.load_state(str(tmp_path)),
    ):
        with pytest.raises(AttributeError, match=r"This happens if `AcceleratorState._reset_state\(\)` was called"):
            call()


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_an_optimizer_that_was_built_after_prepare_is_named(rank, world_size, stage):
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage), cpu=True)
    model, first = prepared(accelerator, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    said = []
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor]
    for make in (*kinds, lambda parameters: torch.optim.AdamW(parameters, foreach=False)):
        accelerator.backward(model(torch.ones(5, 64)).sum())
        with pytest.raises(RuntimeError) as error:
            make(model.parameters()).step()
        said.append(str(error.value))
        first.zero_grad()
    # A hook of the prepared optimizer's own that reads a gradient is no step without the engine.
    norms = []
    first.optimizer.register_step_pre_hook(lambda *_: norms.append(model[0].weight.grad.norm()))
    accelerator.backward(model(torch.ones(5, 64)).sum())
    first.step()
    assert norms[0] > 0
    for name, told in zip(("AdamW", "SGD", "Adafactor", "AdamW"), said, strict=True):
        assert f"this {name} was not prepared" in told and "accelerator.prepare(model, optimizer)" in told
        assert len(told.split()) <= 35
