"""Trainer's doors, its subclasses and callbacks: losses of stock DDP, resumes bit for bit, ordinary folders at the end."""

import gc
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from accelerate_job import TextsModel
from cells import short_of, short_rows, slow
from safetensors.torch import load_file
from shared_ranks import on_ranks, run_on_ranks
from torch.nn.parallel import DistributedDataParallel
from trainer_job import CHECKPOINTING, MODELS, as_launched, history, make_trainer
from trainer_job import run as run_trainer
from transformers import (
    AutoModelForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero import ZeroCallback, ZeroPlugin, ZeroTrainingArguments, engine_of, gathered
from hf_zero.buckets.unread_weights import is_loaded
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.verify import checkpoint_faults

pytestmark = pytest.mark.timeout(180)
FIGURES = {"zero/peak_mib", "zero/samples_per_s"}
FIGURES_OF_A_REPORT = {f"zero/{name}" for name in ("sent_mib", "wait_s", "steps_per_s")}
"""What a log of two ranks has that plain Trainer's has not."""


def run(rank: int, world_size: int, door: str, model: str, output_dir: str, **overrides) -> dict:
    """Six steps, unless it is said otherwise: five of warm-up and one behind it."""
    return run_trainer(rank, world_size, door, model, output_dir, **{"max_steps": 6, **overrides})


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """Stock DDP's outcome for a model and overrides, run once."""
    known: dict[str, dict] = {}

    def outcome(model: str, **overrides) -> dict:
        key = json.dumps([model, overrides])
        if key not in known:
            folder = str(tmp_path_factory.mktemp("ddp"))
            known[key] = run_on_ranks(run, door="ddp", model=model, output_dir=folder, **overrides)[0]
        return known[key]

    return outcome


# Each door with each model in the long run; each door, each stage and both models in the short one.
DOORS = [
    "flag 0",
    "flag 1",
    "flag 2",
    "flag 3",
    "callback 2",
    "both 1",
    "seq2seq 3",
    "callback 3",
    "both 3",
    "seq2seq 2",
]
SHORT = {("flag 0", "bert"), ("flag 3", "bert"), ("callback 2", "bert"), ("both 1", "bert"), ("seq2seq 3", "gpt2")}


@pytest.mark.short_cells("callback 2-bert")
@pytest.mark.parametrize(
    ("door", "model"),
    [
        pytest.param(door, model, marks=[] if (door, model) in SHORT else pytest.mark.slow)
        for model in ("bert", "gpt2")
        for door in DOORS
    ],
)
def test_every_door_has_ddps_losses_with_dropout_and_warmup(door, model, ddp, tmp_path):
    expected = ddp(model)
    for outcome in run_on_ranks(run, door=door, model=model, output_dir=str(tmp_path), forecasts=True):
        assert len(outcome["losses"]) == 6
        assert outcome["losses"] == expected["losses"]
        assert np.allclose(outcome["norms"], expected["norms"], rtol=1e-6, atol=0)
        assert outcome["state"] == expected["state"]
    assert outcome["classes"][1] == "ZeroAcceleratorMixin"
    assert set(outcome["log"]) - set(expected["log"]) == FIGURES
    reloaded = type(MODELS[model][0]()).from_pretrained(tmp_path).state_dict()
    assert {name: value.tolist() for name, value in reloaded.items()} == outcome["state"]


@pytest.mark.extra("report")
def test_a_line_of_the_log_has_two_figures_and_with_a_report_all_of_a_step(tmp_path):
    steps = {"max_steps": 4, "model": "gpt2", "output_dir": str(tmp_path)}
    plain, reported = (run_on_ranks(run, door=f"flag {config}", **steps)[0] for config in (2, "stage=3,report=true"))
    zero = [{name for name in entry if name.startswith("zero/")} for entry in (*plain["logged"], *reported["logged"])]
    assert zero == [FIGURES] * 4 + [FIGURES | FIGURES_OF_A_REPORT] * 4
    # A step's, and not the sum of all; stage 3 gathers a little more in its first.
    sent = [entry["zero/sent_mib"] for entry in reported["logged"]]
    assert max(sent) <= 1.2 * min(sent) and max(sent[1:]) <= 1.01 * min(sent[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "door", [slow("flag 1"), "flag stage=2,grad_accumulation=local", slow("flag stage=3,grad_accumulation=local")]
)
def test_local_accumulation_through_trainer_is_bitwise(door, ddp, tmp_path):
    overrides = {"gradient_accumulation_steps": 2, "max_steps": 4}
    outcome = run_on_ranks(run, door=door, model="gpt2", output_dir=str(tmp_path), **overrides)[0]
    assert outcome["losses"] == ddp("gpt2", **overrides)["losses"]


@pytest.mark.short_cells("{'max_grad_norm': 0.3}-3")
@pytest.mark.parametrize(
    ("overrides", "stage"),
    [
        ({"max_grad_norm": 0.3}, 3),
        ({"gradient_accumulation_steps": 4, "max_steps": 3}, 2),
        slow({"max_grad_norm": 0.3}, 2),
        slow({"gradient_accumulation_steps": 4, "max_steps": 3}, 3),
    ],
    ids=str,
)
def test_clipping_and_sharded_accumulation_are_close(overrides, stage, ddp, tmp_path):
    outcome = run_on_ranks(run, door=f"flag {stage}", model="bert", output_dir=str(tmp_path), **overrides)[0]
    expected = ddp("bert", **overrides)
    assert np.allclose(outcome["losses"], expected["losses"], rtol=1e-5, atol=0)
    assert np.allclose(outcome["norms"], expected["norms"], rtol=1e-6, atol=0)


@pytest.mark.short_cells("stage=3,param_dtype=float32-1e-05")
@pytest.mark.parametrize(
    ("zero", "error"),
    # Stage 3 gathers bfloat16, and so normalizes, too, with rounded weights.
    [slow("2", 1e-5), ("stage=3,param_dtype=float32", 1e-5), ("3", 1e-2)],
)
def test_bf16_autocast_is_close(zero, error, ddp, tmp_path):
    overrides = {"bf16": True}
    outcome = run_on_ranks(run, door=f"flag {zero}", model="bert", output_dir=str(tmp_path), **overrides)[0]
    assert np.allclose(outcome["losses"], ddp("bert", **overrides)["losses"], rtol=error, atol=0)


SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}


@pytest.fixture(scope="module")
def saved_at(tmp_path_factory) -> Callable[[int], tuple[Path, list[dict]]]:
    """By stage, the folder of a run of two ranks with checkpoints at steps 4 and 6, and its ranks' outcomes."""

    @cache
    def outcomes(stage: int) -> tuple[Path, list[dict]]:
        folder = tmp_path_factory.mktemp("saved")
        return folder, run_on_ranks(run, door=f"flag {stage}", model="bert", output_dir=str(folder), **SAVING)

    return outcomes


@pytest.mark.short_cells("3")
@pytest.mark.parametrize("stage", short_of([0, 1, 2, 3], [0, 3]))
def test_resumed_run_continues_bit_for_bit(stage, saved_at, tmp_path):
    door = f"flag {stage}"
    folder, whole = saved_at(stage)
    kept = sorted(p.name for p in folder.glob("checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-6"]
    checkpoint = folder / "checkpoint-4"
    files = {p.name for p in (checkpoint / "zero").iterdir()}
    writers = 1 if stage == 0 else 2
    assert files == {"manifest.json", *(f"rank-{r:05d}-of-00002.safetensors" for r in range(writers))} | (
        {"rank-00001-of-00002.safetensors"} if stage == 0 else set()
    )
    assert not (checkpoint / "optimizer.pt").exists()
    # A fresh process with another model seed: everything that counts comes from the checkpoint.
    resumed = run_on_ranks(
        run, door=door, model="bert", output_dir=str(tmp_path / "resumed"), resume=str(checkpoint), seed=77, **SAVING
    )
    for a, b in zip(whole, resumed):
        assert b["losses"][-2:] == a["losses"][-2:]
        assert b["state"] == a["state"]
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "resumed" / "checkpoint-6").state_dict()
    assert {name: value.tolist() for name, value in reloaded.items()} == whole[0]["state"]


def warnings_of(rank: int, world_size: int, door: str, output_dir: str) -> list[str]:
    """All warnings of a run with activation checkpointing, autocast, evaluations and saves, and of its resumed run."""
    as_launched(rank, world_size, forecasts=True)
    checkpointing = {CHECKPOINTING: True}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for steps in (2, 4):
            trainer = make_trainer(
                door, "bert", output_dir, max_steps=steps, bf16=True, eval_strategy="steps", **SAVING, **checkpointing
            )
            trainer.train(resume_from_checkpoint=steps > 2)
        trainer.evaluate()
        trainer.save_model()
    return [f"{each.category.__name__}: {each.message} ({each.filename}:{each.lineno})" for each in said]


@pytest.mark.parametrize("stage", short_of([0, 1, 2, 3], [3]))
def test_a_run_with_activation_checkpointing_warns_of_nothing(stage, tmp_path):
    assert run_on_ranks(warnings_of, door=f"flag {stage}", output_dir=str(tmp_path)) == [[], []]


def whole_and_resumed(rank: int, world_size: int, root: str, door: str) -> dict:
    whole = run(rank, world_size, door, "bert", f"{root}/whole", **SAVING)
    checkpoint = f"{root}/whole/checkpoint-4"
    resumed = run(rank, world_size, door, "bert", f"{root}/resumed", resume=checkpoint, seed=77, **SAVING)
    return {"whole": whole, "resumed": resumed}


@pytest.mark.extra("wire")
@pytest.mark.slow
@pytest.mark.parametrize("stage", short_of([2, 3], [3]))
def test_a_run_whose_gradients_and_weights_travel_quantized_resumes_bit_for_bit(stage, tmp_path):
    door = f"flag stage={stage},comm.gradients=int8,comm.weights=int8"
    for outcome in run_on_ranks(whole_and_resumed, root=str(tmp_path), door=door):
        whole, resumed = outcome["whole"], outcome["resumed"]
        assert resumed["losses"] == whole["losses"] and resumed["state"] == whole["state"]
        assert 0 < whole["log"]["zero/gradient_error"] < 0.1
    weights = [load_file(tmp_path / f / "checkpoint-6" / "model.safetensors") for f in ("whole", "resumed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # What is saved are the masters, not what is left of them after the wire: few values of a block are equal.
    assert len(weights[0]["bert.embeddings.word_embeddings.weight"].flatten()[256:512].unique()) > 250


@pytest.mark.extra("wire")
@pytest.mark.slow
def test_a_run_of_steps_apart_resumes_bit_for_bit_from_a_save_between_outer_steps(tmp_path):
    for outcome in run_on_ranks(whole_and_resumed, root=str(tmp_path), door="flag stage=1,comm.sync_every=3"):
        assert outcome["resumed"]["losses"] == outcome["whole"]["losses"]
        assert outcome["resumed"]["state"] == outcome["whole"]["state"]
    kinds = {row.kind for row in Manifest.read(tmp_path / "whole" / "checkpoint-4" / "zero").rows}
    moments = {"exp_avg", "exp_avg_sq"}
    assert kinds == {"outer.momentum_buffer", *moments, *(f"replica.1.{kind}" for kind in moments)}


@pytest.mark.parametrize("stage", short_of([1, 3], [3]))
def test_a_resume_leaves_the_weights_in_the_checkpoint_until_they_are_in_buckets(stage, tmp_path):
    make_trainer(f"flag {stage}", "gpt2", tmp_path, **SAVING, max_steps=2).train()
    trainer = make_trainer(f"flag {stage}", "gpt2", tmp_path, seed=77)
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert all(is_loaded(parameter) for parameter in trainer.model.parameters())
    expected = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    loaded = trainer.model.state_dict()
    assert expected and all(torch.equal(loaded[name], value) for name, value in expected.items())
    in_file = {parameter.data_ptr() for parameter in trainer.model.parameters()}
    trainer.model.transformer.wpe.weight.requires_grad_(False)
    trainer.accelerator.prepare(
        trainer.model, torch.optim.AdamW(p for p in trainer.model.parameters() if p.requires_grad)
    )
    assert not any(is_loaded(p) or p.data_ptr() in in_file for p in trainer.model.parameters())
    assert all(torch.equal(trainer.model.state_dict()[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", short_of([2, 3], [3]))
def test_resume_true_takes_the_newest(stage, tmp_path):
    door = f"flag {stage}"
    run_on_ranks(run, door=door, model="bert", output_dir=str(tmp_path), **SAVING, max_steps=4)
    outcome = run_on_ranks(run, door=door, model="bert", output_dir=str(tmp_path), resume=True, **SAVING)[0]
    assert len(outcome["losses"]) == 6


@pytest.mark.parametrize(("before", "after"), short_rows([(2, 1), (2, 3), (3, 1)], [(3, 1)]))
def test_another_world_size_and_stage_can_resume(before, after, saved_at, tmp_path):
    shutil.copytree(saved_at(before)[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    outcome = run_on_ranks(
        run,
        world_size=3,
        door=f"flag {after}",
        model="bert",
        output_dir=str(tmp_path),
        resume=True,
        **SAVING,
        max_steps=6,
    )[0]
    assert np.isfinite(outcome["losses"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), short_rows([(2, 3), (3, 2)], [(2, 3)]))
def test_a_run_goes_on_bit_for_bit_with_and_without_sharded_parameters(before, after, tmp_path):
    whole = run_on_ranks(run, door=f"flag {before}", model="bert", output_dir=str(tmp_path / "whole"), **SAVING)
    resumed = run_on_ranks(
        run,
        door=f"flag {after}",
        model="bert",
        output_dir=str(tmp_path / "resumed"),
        resume=str(tmp_path / "whole" / "checkpoint-4"),
        seed=77,
        **SAVING,
    )
    for a, b in zip(whole, resumed):
        assert b["losses"] == a["losses"]
        assert b["state"] == a["state"]


def rounded(prediction) -> dict[str, float]:
    return {"size": float(len(prediction.predictions))}


@pytest.mark.parametrize("stage", short_of([2, 3], [3]))
def test_load_best_model_at_end(stage, tmp_path):
    overrides = {
        **SAVING,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.05,
    }
    for outcome in run_on_ranks(
        run, door=f"flag {stage}", model="bert", output_dir=str(tmp_path), compute_metrics=rounded, **overrides
    ):
        best = AutoModelForSequenceClassification.from_pretrained(outcome["best"]).state_dict()
        assert all(np.array_equal(value.float().numpy(), outcome["state"][name]) for name, value in best.items())


def evaluate_train_twice(rank: int, world_size: int, stage: int, output_dir: str) -> list[float]:
    from trainer_job import as_launched, history

    as_launched(rank, world_size)
    trainer = make_trainer(f"flag {stage}", "bert", output_dir, max_steps=4, per_device_eval_batch_size=4)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    engine = engine_of(trainer)
    assert engine is engine_of(trainer.model) is engine_of(trainer.accelerator)
    trainer.train()
    assert engine_of(trainer) is engine
    after = trainer.evaluate()["eval_loss"]
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (24, 3)
    assert engine.memory_report().total_bytes > 0
    return [before, after, *history(trainer)["losses"]]


@pytest.mark.parametrize("stage", short_of([2, 3], [3]))
def test_evaluate_before_train_and_train_twice(stage, tmp_path):
    first, second = run_on_ranks(evaluate_train_twice, stage=stage, output_dir=str(tmp_path))
    assert first == second and np.isfinite(first).all()


def generated(stage: int | None, output_dir: str) -> tuple[list, float]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
    tokens = torch.randint(2, 97, (48, 16), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row[:10], "labels": row[10:]} for row in tokens]
    arguments = Seq2SeqTrainingArguments(
        output_dir=output_dir,
        per_device_eval_batch_size=3,
        max_steps=4,
        learning_rate=0.05,
        predict_with_generate=True,
        generation_max_length=9,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    callbacks = [] if stage is None else [ZeroCallback(stage)]
    trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    # 14 rows in batches of 3: the ranks' last ones differ.
    predicted = trainer.predict(rows[:14])
    return predicted.predictions.tolist(), predicted.metrics["test_loss"]


@pytest.mark.slow
@on_ranks(2)
def test_predict_with_generate_has_ddps_tokens_at_stage_3(rank, world_size, tmp_path):
    stages = [None, 3]
    output_dir = str(tmp_path)
    from trainer_job import as_launched

    as_launched(rank, world_size)
    expected, found = [generated(stage, output_dir) for stage in stages]
    assert found == expected


class ReadsParametersEachStep(TrainerCallback):
    """What an EMA callback does: reads parameters between the step and the next forward, through the module."""

    def __init__(self, gather: bool):
        self.sums: list[float] = []
        self._gather = gather

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with gathered(model) if self._gather else nullcontext():
            self.sums.append(sum(p.detach().double().abs().sum().item() for p in model.parameters()))


def sums_each_step(rank: int, world_size: int, door: str, output_dir: str, gather: bool = False) -> list[float]:
    from trainer_job import as_launched

    as_launched(rank, world_size)
    reader = ReadsParametersEachStep(gather)
    make_trainer(door, "gpt2", output_dir, callbacks=[reader], max_steps=6).train()
    return reader.sums


@pytest.mark.slow
def test_parameters_read_right_after_a_step_are_the_new_ones(tmp_path):
    expected = run_on_ranks(sums_each_step, door="ddp", output_dir=str(tmp_path))[0]
    for gather, door in ((False, "flag 2"), (True, "flag 2"), (True, "flag 3")):
        for sums in run_on_ranks(sums_each_step, door=door, output_dir=str(tmp_path), gather=gather):
            assert sums == expected, door


@on_ranks(1)
def test_arguments_are_saved_and_a_search_by_ray_is_refused(rank, world_size, tmp_path):
    output_dir = str(tmp_path)
    from trainer_job import as_launched

    as_launched(rank, world_size)
    trainer = make_trainer("flag 2", "bert", output_dir, max_steps=1)
    assert trainer.args.to_dict()["parallelism_config"]["stage"] == 2
    json.loads(trainer.args.to_json_string())
    trainer.train()
    trainer.save_model()
    assert (Path(output_dir) / "training_args.bin").is_file()
    revived = pickle.loads(pickle.dumps(trainer.args))
    assert isinstance(revived, ZeroTrainingArguments)
    assert isinstance(revived.parallelism_config, ZeroPlugin)
    with pytest.raises(NotImplementedError, match="backend='ray' is not built yet"):
        trainer.hyperparameter_search(backend="ray")


# ---- Searches over hyperparameters ----


class Trials(TrainerCallback):
    """Notes the losses of each trial at its end, and what the process holds then."""

    def __init__(self):
        self.losses: list[list[float]] = []
        self.held: list[tuple[int, int, int]] = []

    def on_train_end(self, args, state, control, **kwargs):
        # The last entry sums the run up; a pruned trial has none.
        self.losses.append([entry.get("loss", entry.get("eval_loss")) for entry in state.log_history])
        gc.collect()
        process = psutil.Process()
        self.held.append((process.memory_info().rss, process.num_fds(), process.num_threads()))


def search(rank: int, world_size: int, door: str, output_dir: str, n_trials: int = 3, stops=True, **overrides) -> dict:
    """Trains trials of three steps. With `stops`, the second trial is pruned after its first evaluation and ends the search."""
    import optuna

    class SecondTrial(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return stops and trial.number == 1

    def space(trial):
        if stops and rank == 0 and trial.number == 1:
            trial.study.stop()
        return {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
            "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
        }

    as_launched(rank, world_size)
    trials = Trials()
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1, "warmup_steps": 1}
    trainer = make_trainer(door, "bert", output_dir, callbacks=[trials], max_steps=3, **settings | overrides)
    # Each door makes its model with the seed that Trainer sets before it calls this.
    trainer.model_init = lambda: MODELS["bert"][0](dropout=0.1)
    sampler = optuna.samplers.RandomSampler(seed=1)
    best = trainer.hyperparameter_search(
        space, n_trials=n_trials, backend="optuna", sampler=sampler, pruner=SecondTrial()
    )
    # After a search, and after each trial, the Trainer can train again.
    trainer.train()
    return {
        "best": best and (best.run_id, best.objective, best.hyperparameters),
        "losses": trials.losses,
        "held": trials.held,
        "folders": sorted(str(path.relative_to(output_dir)) for path in Path(output_dir).glob("run-*/checkpoint-*")),
    }


@pytest.mark.parametrize("door", ["callback 3", slow("flag 2"), slow("flag 0")])
def test_a_search_trains_the_trials_of_ddp_in_one_launch(door, tmp_path):
    pytest.importorskip("optuna", reason="Optuna, of the extra `dev`, is not installed")
    # Stock ranks hang where rank 0 prunes a trial or ends a search, so that they train all of both trials here.
    expected = run_on_ranks(search, door="ddp", output_dir=str(tmp_path / "ddp"), n_trials=2, stops=False)
    found = run_on_ranks(search, door=door, output_dir=str(tmp_path / "own"), save_strategy="steps")
    for ours, theirs in zip(found, expected):
        first, second, last = ours["losses"]
        stock_first, stock_second, stock_last = theirs["losses"]
        assert (first, second, last) == (stock_first, stock_second[: len(second)], stock_last)
        # Of the second, two steps and the evaluation that the pruner judges.
        assert (len(first), len(second)) == (6, 3)
        assert ours["folders"] == ["run-0/checkpoint-3"]
    best, other_ranks = (outcome["best"] for outcome in found)
    assert best[0] == "0" and best[1] == found[0]["losses"][0][4] and other_ranks is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("door", ["flag 2", "callback 1", "callback 2", "callback 3", "files"])
def test_fifty_trials_leave_nothing_behind(door, tmp_path):
    pytest.importorskip("optuna", reason="Optuna, of the extra `dev`, is not installed")
    if door == "files":
        (tmp_path / "nvme").mkdir()
        door = f"flag stage=3,offload.optimizer=nvme,offload.params=nvme,offload.nvme_path={tmp_path}/nvme"
    settings = {"n_trials": 50, "stops": False, "save_strategy": "steps", "time_limit_s": 900}
    for outcome in run_on_ranks(search, door=door, output_dir=str(tmp_path / "run"), **settings):
        held = outcome["held"]
        assert len(held) == 51
        # Caches fill in the first trials.
        memory, files, threads = zip(*held[9:50])
        grown = (memory[-1] - memory[0]) / 2**20
        print(f"{door}: trials 10 to 50: memory {grown:+.1f} MiB, descriptors {set(files)}, threads {set(threads)}")
        assert max(files) == min(files) and max(threads) == min(threads), held
        assert memory[-1] - memory[0] < 16 * 2**20, held


@on_ranks(1)
def test_two_configs_for_one_trainer_are_refused(rank, world_size, tmp_path):
    output_dir = str(tmp_path)
    from trainer_job import as_launched

    as_launched(rank, world_size)
    with pytest.raises(ValueError, match="one Trainer got two different configs"):
        make_trainer("flag 2", "bert", output_dir, callbacks=[ZeroCallback(1)])
    make_trainer("flag 2", "bert", output_dir, callbacks=[ZeroCallback(2)])


def bad_resume(rank: int, world_size: int, output_dir: str, where: str, says: str) -> None:
    from trainer_job import as_launched

    as_launched(rank, world_size)
    trainer = make_trainer("flag 2", "bert", output_dir, max_steps=10)
    with pytest.raises(ValueError, match=says):
        trainer.train(resume_from_checkpoint=where)


def test_resume_from_what_is_no_checkpoint(tmp_path):
    run_on_ranks(
        run, door="ddp", model="bert", output_dir=str(tmp_path), save_strategy="steps", save_steps=2, max_steps=2
    )
    (tmp_path / "empty").mkdir()
    for where, says in [
        (str(tmp_path / "nowhere"), "there is no folder .*nowhere.*checkpoint-2"),
        (str(tmp_path / "empty"), "it holds no model weights"),
    ]:
        run_on_ranks(bad_resume, world_size=1, output_dir=str(tmp_path), where=where, says=says)


def test_damaged_state_is_refused_by_name(tmp_path):
    run_on_ranks(run, door="flag 2", model="bert", output_dir=str(tmp_path), **SAVING, max_steps=2)
    zero = tmp_path / "checkpoint-2" / "zero"
    text = (zero / "manifest.json").read_text()
    manifest = json.loads(text)
    check = partial(run_on_ranks, bad_resume, output_dir=str(tmp_path), where=str(tmp_path / "checkpoint-2"))
    (zero / "manifest.json").unlink()
    check(says="holds no manifest.json, so it is not a complete hf_zero checkpoint")
    (zero / "manifest.json").write_text(json.dumps({**manifest, "rows": manifest["rows"][1:]}))
    check(says="its own checksum does not match")
    (zero / "manifest.json").write_text(text)
    (zero / "rank-00001-of-00002.safetensors").write_bytes(b"\x00" * 64)
    check(says="rank-00001-of-00002.safetensors has 64 bytes instead of")


def planned(rank: int, world_size: int, door: str, output_dir: str) -> str:
    overrides = {"max_steps": 1, "gradient_accumulation_steps": 3}
    with redirect_stderr(StringIO()) as text:
        run(rank, world_size, door, "gpt2", output_dir, **overrides)
    return text.getvalue()


@pytest.mark.parametrize("door", ["flag 2", "callback 1"])
def test_the_plan_tells_the_rows_of_a_step(door, tmp_path):
    plan = run_on_ranks(planned, door=door, output_dir=str(tmp_path))[0]
    assert "4 a rank x 3 micro-batches x 2 ranks = 24" in plan


class NotesArguments(TrainerCallback):
    """Asks as trackers do."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.settings = args.to_dict()["parallelism_config"]


def tells_trackers(rank: int, world_size: int, output_dir: str, door: str) -> tuple[Any, bool]:
    as_launched(rank, world_size)
    tracker = NotesArguments()
    trainer = make_trainer(door, "gpt2", output_dir, callbacks=[tracker], max_steps=1)
    handler = trainer.callback_handler
    own = handler.on_train_begin = partial(handler.on_train_begin)
    trainer.train()
    assert vars(handler)["on_train_begin"] is own
    return tracker.settings, trainer.args.parallelism_config is None


@pytest.mark.parametrize(("door", "is_left"), [("callback 2", True), slow("flag 2", False)])
def test_trackers_are_told_the_settings_of_each_door(door, is_left, tmp_path):
    found = run_on_ranks(tells_trackers, output_dir=str(tmp_path), door=door)
    assert found == [({"stage": 2}, is_left)] * 2


SAVING_TWICE = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


# ---- subclasses and callbacks ----


class AddsToSaves(Trainer):
    """Writes a file of its own into each checkpoint."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            (folder / "own.json").write_text(json.dumps(sorted(os.listdir(folder))))


class ReadsSaves(TrainerCallback):
    """Reads each checkpoint as soon as it has been saved, and leaves a file in it."""

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        read = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        (folder / "seen.json").write_text(json.dumps([read["global_step"], checkpoint_faults(folder, "zero")]))


def saves(rank: int, world_size: int, output_dir: str, *, is_own: bool) -> None:
    as_launched(rank, world_size)
    # On one rank: what saves wait for is what any of them does.
    callbacks = [] if is_own or rank else [ReadsSaves()]
    kind = AddsToSaves if is_own else Trainer
    make_trainer("flag 3", "gpt2", output_dir, trainer_class=kind, callbacks=callbacks, **SAVING_TWICE).train()


@pytest.mark.parametrize("is_own", [True, False], ids=["a Trainer's own save", "a callback"])
def test_who_comes_behind_a_save_finds_the_checkpoint_and_may_add_to_it(is_own, tmp_path):
    run_on_ranks(saves, output_dir=str(tmp_path), is_own=is_own)
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        assert checkpoint_faults(folder, "zero") == []
        if is_own:
            assert {"model.safetensors", "zero", TRAINER_STATE_NAME} <= set(
                json.loads((folder / "own.json").read_text())
            )
        else:
            assert json.loads((folder / "seen.json").read_text()) == [step, []]


class LoadsByItself(Trainer):
    """Takes fewer arguments than Trainer's methods do, loads weights alone, and counts."""

    loads = 0

    def train(self, resume_from_checkpoint=None):
        return super().train(resume_from_checkpoint=resume_from_checkpoint)

    def _load_from_checkpoint(self, checkpoint_path):
        self.loads += 1
        super()._load_from_checkpoint(checkpoint_path)

    def _load_optimizer_and_scheduler(self, checkpoint):
        self.loads += 1


def resumes(rank: int, world_size: int, doors: list[str], folder: str) -> list[dict]:
    as_launched(rank, world_size)
    outcomes = []
    for door in doors:
        output_dir = f"{folder}/{door}"
        make_trainer(door, "gpt2", output_dir, **SAVING_TWICE).train()
        trainer = make_trainer(door, "gpt2", f"{output_dir} again", trainer_class=LoadsByItself, max_steps=4)
        trainer.train(resume_from_checkpoint=f"{output_dir}/checkpoint-2")
        outcomes.append({"losses": history(trainer)["losses"], "loads": trainer.loads})
    return outcomes


@pytest.mark.slow
def test_a_trainers_own_ways_to_train_and_to_load_are_taken(tmp_path):
    for plain, ours in run_on_ranks(resumes, doors=["ddp", "flag 3"], folder=str(tmp_path)):
        assert ours == plain and ours["loads"] == 2


class NeedsSmallBatches(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        if len(inputs["input_ids"]) > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate more than there is.")
        return super().compute_loss(model, inputs, *args, **kwargs)


def finds_its_batch(rank: int, world_size: int, doors: list[str], folder: str) -> list[list[float]]:
    as_launched(rank, world_size)
    losses = []
    for door in doors:
        trainer = make_trainer(
            door, "gpt2", f"{folder}/{door}", trainer_class=NeedsSmallBatches, auto_find_batch_size=True, **SAVING_TWICE
        )
        trainer.train()
        losses.append(history(trainer)["losses"])
    return losses


@pytest.mark.slow
def test_a_batch_that_is_found_has_ddps_losses_and_is_what_a_checkpoint_says(tmp_path):
    for plain, ours in run_on_ranks(finds_its_batch, doors=["ddp", "flag 2"], folder=str(tmp_path)):
        assert ours == plain
    position = json.loads((tmp_path / "flag 2" / "checkpoint-4" / "data_position.json").read_text())
    assert position == {"global_rows": 6, "epoch": 0, "rows": 24}


class SmallTexts(TextsModel):
    """Quickly compiled."""

    def forward(self, input_ids, labels):
        return {"loss": super().forward(input_ids, labels).loss}


def trains_compiled(rank: int, world_size: int, doors: list[str], folder: str) -> list[list[float]]:
    as_launched(rank, world_size)
    outcomes = []
    for door in doors:
        compiled = {"torch_compile": door != "ddp", "torch_compile_backend": None if door == "ddp" else "eager"}
        settings = {**SAVING_TWICE, "max_steps": 2, **compiled}
        torch._dynamo.reset()
        trainer = make_trainer(door, "gpt2", f"{folder}/{door}", adapt=lambda _: SmallTexts(1), **settings)
        if door != "ddp":
            # Behind an evaluation, Trainer itself trains without DDP: accelerate takes the model for prepared.
            trainer.evaluate()
        trainer.train()
        between = trainer.evaluate()["eval_loss"]
        trainer.train()
        outcomes.append([between, trainer.evaluate()["eval_loss"], *history(trainer)["losses"]])
    return outcomes


@pytest.mark.slow
def test_a_compiled_model_is_evaluated_first_and_trained_twice(tmp_path):
    doors = ["ddp", "flag 2", "flag 3"]
    for plain, *others in run_on_ranks(trains_compiled, doors=doors, folder=str(tmp_path)):
        assert others == [pytest.approx(plain, rel=1e-5)] * 2
    assert (tmp_path / "flag 2" / "checkpoint-2" / "zero" / "manifest.json").is_file()


def trains_again(rank: int, world_size: int, stage: int, folder: str) -> tuple[dict, dict]:
    as_launched(rank, world_size)
    first = make_trainer(f"flag {stage}", "gpt2", folder, **SAVING_TWICE)
    first.train()
    # The cell of a notebook once more.
    second = make_trainer(f"flag {stage}", "gpt2", folder, adapt=lambda _: first.model, **SAVING_TWICE)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    first.save_model(f"{folder}/model")
    return history(first), history(second)


@pytest.mark.short_cells("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_trainer_resumes_on_the_model_of_the_first_which_may_save_it(stage, tmp_path):
    for first, second in run_on_ranks(trains_again, stage=stage, folder=str(tmp_path)):
        assert second == first
    assert (tmp_path / "model" / "model.safetensors").is_file()


def follow_each_other(rank: int, world_size: int, folder: str) -> list[bool]:
    """Whether layers compute in bf16 by each of three Trainers of one model; the last is plain and has DDP."""
    as_launched(rank, world_size)
    kept = make_trainer("flag 2", "gpt2", folder).model
    seen: list[bool] = []
    kept.transformer.h[0].register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    for door, is_bf16 in (("flag 2", False), ("flag 2", True), ("ddp", True)):
        trainer = make_trainer(door, "gpt2", folder, adapt=lambda _: kept, bf16=is_bf16, max_steps=1)
        trainer.train()
        if is_bf16 and door != "ddp":
            engine_of(trainer).close()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return seen


def test_a_second_trainer_computes_in_the_precision_of_its_own_arguments_and_a_plain_one_has_ddp(tmp_path):
    assert run_on_ranks(follow_each_other, folder=str(tmp_path)) == [[False, True, True]] * 2


def taking_turns(door: str, folder: str, **settings) -> tuple[Trainer, Trainer]:
    """Two Trainers of one model."""
    settings |= {"max_steps": 2, "dropout": 0.0, "warmup_steps": 0}
    first = make_trainer(door, "gpt2", folder, **settings)
    return first, make_trainer(door, "gpt2", folder, adapt=lambda _: first.model, seed=1, **settings)


def take_turns(rank: int, world_size: int, doors: list[str], folder: str) -> list[list[list[float]]]:
    """Losses by each door where the first of two Trainers trains again after the second."""
    as_launched(rank, world_size)
    found = []
    for door in doors:
        first, second = taking_turns(door, f"{folder}/{door}")
        found.append([])
        for trainer in (first, second, first, second):
            trainer.train()
            found[-1].append(history(trainer)["losses"])
    return found


@pytest.mark.slow
def test_trainers_that_take_turns_on_one_model_keep_their_optimizers_state_as_under_ddp(tmp_path):
    doors = ["ddp", "flag 1", "flag 3", "flag stage=2,offload.optimizer=cpu"]
    for plain, *ours in run_on_ranks(take_turns, doors=doors, folder=str(tmp_path)):
        assert ours == [plain] * 3


@pytest.mark.slow
@on_ranks(2)
def test_a_trainer_whose_state_went_with_its_files_is_told_so_when_its_turn_comes_again(rank, world_size, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    offload = {"optimizer": "nvme", "nvme_path": folder}
    first, second = taking_turns("ddp", folder, callbacks=[ZeroCallback({"stage": 2, "offload": offload})])
    for trainer in (first, second):
        trainer.train()
    with pytest.raises(
        ValueError, match=r"AdamW trained this model earlier.*was in files that no longer exist\. Train with a new"
    ):
        first.train()
    make_trainer("flag 2", "gpt2", folder, adapt=lambda _: first.model, max_steps=1).train()


@on_ranks(2)
def test_arguments_that_differ_between_ranks_are_refused_before_training(rank, world_size, tmp_path):
    as_launched(rank, world_size)
    others = {
        "max_grad_norm: 100.0 on rank 0, 1.0 on rank 1": {"max_grad_norm": 1.0},
        "lr_scheduler_type: ": {"lr_scheduler_type": "constant"},
        "data_seed: None on rank 0, 5 on rank 1": {"data_seed": 5},
        "max_steps: 8 on rank 0, 9 on rank 1": {"max_steps": 9},
    }
    for says, other in others.items():
        trainer = make_trainer("flag 2", "gpt2", tmp_path, **(other if rank == 1 else {}))
        with pytest.raises(ValueError, match="do not train the same model with the same settings") as error:
            trainer.train()
        assert says in str(error.value)
    trainer = make_trainer("flag 2", "gpt2", tmp_path)
    trainer.train_dataset = trainer.train_dataset[rank:]
    with pytest.raises(ValueError, match="samples of train_dataset: 240 on rank 0, 239 on rank 1"):
        trainer.train()
