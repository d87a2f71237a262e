"""Trainers with methods and callbacks of a script's own: what they call Trainer for is the engine's, and what they do is done."""

import json
import os
from pathlib import Path

import pytest
import torch
from accelerate_job import TextsModel
from ranks import run_ranks
from shared_ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from trainer_job import as_launched, history, make_trainer
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero import ZeroCallback, engine_of
from hf_zero.integrations.verify import checkpoint_faults

pytestmark = pytest.mark.timeout(120)

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def run_on_ranks(target, world_size: int = 2, **arguments):
    return run_ranks(target, world_size=world_size, time_limit_s=120, keyword_arguments=arguments)


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
    make_trainer("flag 3", "gpt2", output_dir, trainer_class=kind, callbacks=callbacks, **SAVING).train()


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
        make_trainer(door, "gpt2", output_dir, **SAVING).train()
        trainer = make_trainer(door, "gpt2", f"{output_dir} again", trainer_class=LoadsByItself, max_steps=4)
        trainer.train(resume_from_checkpoint=f"{output_dir}/checkpoint-2")
        outcomes.append({"losses": history(trainer)["losses"], "loads": trainer.loads})
    return outcomes


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
            door, "gpt2", f"{folder}/{door}", trainer_class=NeedsSmallBatches, auto_find_batch_size=True, **SAVING
        )
        trainer.train()
        losses.append(history(trainer)["losses"])
    return losses


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
        settings = {**SAVING, "max_steps": 2, **compiled}
        trainer = make_trainer(door, "gpt2", f"{folder}/{door}", adapt=lambda _: SmallTexts(1), **settings)
        if door != "ddp":
            # Behind an evaluation, Trainer itself trains without DDP: accelerate takes the model for prepared.
            trainer.evaluate()
        trainer.train()
        between = trainer.evaluate()["eval_loss"]
        trainer.train()
        outcomes.append([between, trainer.evaluate()["eval_loss"], *history(trainer)["losses"]])
    return outcomes


def test_a_compiled_model_is_evaluated_first_and_trained_twice(tmp_path):
    for plain, ours in run_on_ranks(trains_compiled, doors=["ddp", "flag 2"], folder=str(tmp_path)):
        assert ours == pytest.approx(plain, rel=1e-5)
    assert (tmp_path / "flag 2" / "checkpoint-2" / "zero" / "manifest.json").is_file()


def trains_again(rank: int, world_size: int, stage: int, folder: str) -> tuple[dict, dict]:
    as_launched(rank, world_size)
    first = make_trainer(f"flag {stage}", "gpt2", folder, **SAVING)
    first.train()
    # The cell of a notebook once more.
    second = make_trainer(f"flag {stage}", "gpt2", folder, adapt=lambda _: first.model, **SAVING)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    first.save_model(f"{folder}/model")
    return history(first), history(second)


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


def test_trainers_that_take_turns_on_one_model_keep_their_optimizers_state_as_under_ddp(tmp_path):
    doors = ["ddp", "flag 1", "flag 3", "flag stage=2,offload.optimizer=cpu"]
    for plain, *ours in run_on_ranks(take_turns, doors=doors, folder=str(tmp_path)):
        assert ours == [plain] * 3


@on_ranks(2)
def test_a_trainer_whose_state_went_with_its_files_is_told_so_when_its_turn_comes_again(rank, world_size, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    offload = {"optimizer": "nvme", "nvme_path": folder}
    first, second = taking_turns("ddp", folder, callbacks=[ZeroCallback({"stage": 2, "offload": offload})])
    for trainer in (first, second):
        trainer.train()
    with pytest.raises(
        ValueError, match=r"AdamW has trained this model before.*its state lay in files\. Train with a new"
    ):
        first.train()
    make_trainer("flag 2", "gpt2", folder, adapt=lambda _: first.model, max_steps=1).train()
