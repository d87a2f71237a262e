"""A subclass's methods are called as often as under stock Trainer, in saves, loads, pushes and evaluations, on each rank."""

import ast
import functools
import inspect
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import accelerate
import pytest
import torch
from cells import short_rows
from huggingface_hub import metadata_load
from shared_ranks import on_ranks, run_on_ranks
from trainer_job import as_launched, history, make_trainer
from transformers import Trainer
from transformers import trainer as trainer_module
from transformers.trainer import TRAINER_STATE_NAME

from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.integrations.state_io import ZERO_FOLDER
from hf_zero.versions import is_older

ENTRIES = ("train", "evaluate", "predict", "save_model", "push_to_hub", "create_model_card", "init_hf_repo")
QUESTIONS = {
    "is_world_process_zero", "is_local_process_zero", "get_sp_size", "get_cp_size", "get_tp_size", "get_total_train_batch_size",
}  # fmt: skip
"""They change nothing, and hf_zero asks them more often."""


def called_methods() -> set[str]:
    """The methods of Trainer that its own source calls, by any way from `ENTRIES`."""
    [tree] = ast.parse(inspect.getsource(Trainer)).body
    assert isinstance(tree, ast.ClassDef)
    called = {
        method.name: {
            node.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        for method in tree.body
        if isinstance(method, ast.FunctionDef)
    }
    found: set[str] = set()
    ahead = list(ENTRIES)
    while ahead:
        name = ahead.pop()
        if name not in found and inspect.isfunction(vars(Trainer).get(name)):
            found.add(name)
            ahead += called[name]
    return found


ROWS = "stage=3,checkpoint.layout=sharded"
PLACED = {"save_model", "_save", "_save_checkpoint", "_load_from_checkpoint"}
"""Without methods of these names, each rank writes and reads its own part of the weights."""


class NoRepository(Trainer):
    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        self.hub_model_id, self.push_in_progress = "me/model", None


def counting(names: set[str]) -> type[Trainer]:
    """A subclass that counts the calls of these methods, and that calls Trainer's own in each."""

    def counted(name: str) -> Any:
        stock = getattr(NoRepository, name)

        @functools.wraps(stock)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            kind.calls[name] += 1
            return getattr(super(kind, self), name)(*args, **kwargs)

        return method

    kind: Any = type("Counting", (NoRepository,), {"calls": Counter(), **{name: counted(name) for name in names}})
    return kind


def calls_of_a_run(rank: int, world_size: int, door: str, folder: str, left_out: set[str]) -> dict[str, int]:
    """Trains with evaluations, saves and pushes, loads the best model, resumes, predicts, saves and pushes."""
    as_launched(rank, world_size)
    kind: Any = counting(called_methods() - QUESTIONS - left_out)
    settings: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
        "save_total_limit": 1, "push_to_hub": True, "hub_always_push": True, "trainer_class": kind,
    }  # fmt: skip
    hub = "hf_zero.hub.trainer_push"
    with (
        patch.object(trainer_module, "hf_api", MagicMock(), create=True),
        patch.object(trainer_module, "upload_folder", MagicMock(), create=True),
        patch(f"{hub}.push_checkpoint"),
        patch(f"{hub}.push_output"),
    ):
        make_trainer(door, "gpt2", folder, max_steps=4, **settings).train()
        trainer = make_trainer(door, "gpt2", folder, max_steps=6, **settings)
        trainer.train(resume_from_checkpoint=True)
        trainer.predict(trainer.eval_dataset)
        trainer.save_model()
        trainer.push_to_hub()
    return dict(kind.calls)


@pytest.mark.skipif(
    is_older(accelerate.__version__, (1, 15)),
    reason="stock Trainer cannot resume on several CPU ranks with older releases of accelerate: torch knows no device cpu:0",
)
@pytest.mark.extra("hub")
@pytest.mark.parametrize(
    ("settings", "left_out"),
    short_rows(
        [(settings, left_out) for settings in ("stage=2", ROWS) for left_out in (set(), PLACED)],
        [("stage=2", set()), (ROWS, PLACED)],
    ),
)
def test_each_method_of_a_subclass_is_called_as_often_as_by_stock_trainer(settings, left_out, tmp_path):
    stock, ours = (
        run_on_ranks(calls_of_a_run, door=door, folder=str(tmp_path / door[:4]), left_out=left_out)
        for door in ("ddp", f"flag {settings}")
    )
    # As under FSDP, Trainer is told not to place the whole model on each device.
    unmoved = {"_move_model_to_device"} if "stage=3" in settings else set()
    for rank in range(2):
        differing = {
            name: (stock[rank].get(name, 0), ours[rank].get(name, 0))
            for name in stock[rank].keys() | ours[rank].keys()
            if name not in unmoved and stock[rank].get(name, 0) != ours[rank].get(name, 0)
        }
        assert differing == {}, f"rank {rank}: (stock, ours)"
    expected = {
        "_save_optimizer_and_scheduler",
        "_save_scaler",
        "_push_from_checkpoint",
        "create_model_card",
        "push_to_hub",
    }
    assert expected | {"_load_best_model", "_get_output_dir", "_finish_current_push"} <= ours[0].keys()


# ---- What a subclass writes and leaves out ----


class OwnState(Trainer):
    """Writes a state next to the optimizer's, and reads it."""

    counter = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.counter += 1
        return super().training_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            torch.save(self.counter, Path(output_dir, "own.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint:
            self.counter = torch.load(Path(checkpoint, "own.pt"), weights_only=True)


class OnTheFirstRank(OwnState):
    """Calls Trainer's method on the rank alone that writes under DDP."""

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.args.should_save:
            super()._save_optimizer_and_scheduler(output_dir)


class SavesByItself(OwnState):
    """Does as Trainer's method does, without calling it."""

    def _save_checkpoint(self, model, trial):
        folder = str(Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}"))
        self.save_model(folder, _internal_call=True)
        self._save_optimizer_and_scheduler(folder)
        self._save_rng_state(folder)
        if self.args.should_save:
            self.state.save_to_json(str(Path(folder, TRAINER_STATE_NAME)))


class NoState(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        pass


SAVING = {"save_strategy": "steps", "save_steps": 2, "dropout": 0.0}


@pytest.mark.parametrize("door", ["callback 2", pytest.param("callback 3", marks=pytest.mark.slow)])
@on_ranks(2)
def test_state_that_a_subclass_saves_is_in_each_checkpoint_and_resumes(rank, world_size, tmp_path, door):
    as_launched(rank, world_size)
    for kind in (OwnState, OnTheFirstRank, SavesByItself):
        folder = tmp_path / kind.__name__
        whole = make_trainer(door, "gpt2", folder, trainer_class=kind, max_steps=4, **SAVING)
        whole.train()
        assert (folder / "checkpoint-2" / "own.pt").is_file()
        resumed: Any = make_trainer(door, "gpt2", folder, trainer_class=kind, max_steps=4, **SAVING)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert resumed.counter == 4 and history(resumed) == history(whole), kind.__name__
        if kind is not SavesByItself:
            # The manifest vouches for the subclass's file, too.
            assert "own.pt" in Manifest.read(folder / "checkpoint-2" / ZERO_FOLDER).files


@on_ranks(2)
def test_a_subclass_that_saves_no_state_saves_none(rank, world_size, tmp_path):
    as_launched(rank, world_size)
    trainer = make_trainer("callback 2", "gpt2", tmp_path, trainer_class=NoState, max_steps=2, **SAVING)
    trainer._save_scaler = lambda output_dir: Path(output_dir, f"scaler of {rank}").touch()  # type: ignore[method-assign]
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    assert not Manifest.read(checkpoint / ZERO_FOLDER).optimizers and not (checkpoint / "scheduler.pt").exists()
    assert all((checkpoint / f"scaler of {each}").is_file() for each in range(2))
    again = make_trainer("callback 2", "gpt2", tmp_path, trainer_class=NoState, max_steps=3, **SAVING)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == 3


# ---- The model card, and a push's arguments ----


class OwnCard(NoRepository):
    """Takes other arguments than Trainer's methods, as TRL's trainers do."""

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        Path(self.args.output_dir, "README.md").write_text(f"{model_name} on {dataset_name}: {tags}")

    def push_to_hub(self, commit_message="Mine", **kwargs):
        return super().push_to_hub(commit_message, **kwargs)


@pytest.mark.extra("hub")
@on_ranks(2)
def test_a_subclass_gets_the_arguments_of_a_push_as_they_are(rank, world_size, tmp_path):
    as_launched(rank, world_size)
    folder = tmp_path / "run"
    trainer = make_trainer("callback 3", "gpt2", folder, trainer_class=OwnCard, max_steps=1)
    trainer.train()
    trainer.model.model_tags = ["of the model"]
    with patch("hf_zero.hub.trainer_push.push_output") as push:
        trainer.push_to_hub(dataset_name="texts", tags="mine")
    if rank == 0:
        assert (folder / "README.md").read_text() == "run on texts: ['mine', 'of the model']"
        assert push.call_args.kwargs["message"] == "Mine"
    assert push.call_count == (rank == 0)


@pytest.mark.extra("hub")
@on_ranks(1)
def test_the_card_of_an_adapter_has_all_arguments_and_the_fields_of_peft(rank, world_size, tmp_path):
    peft = pytest.importorskip("peft")
    as_launched(rank, world_size)

    def adapted(model: torch.nn.Module) -> torch.nn.Module:
        model.config._name_or_path = model.name_or_path = "me/base"
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))

    trainer = make_trainer("callback 1", "gpt2", tmp_path, adapt=adapted, max_steps=1, trainer_class=NoRepository)
    trainer.train()
    trainer.save_model()
    assert "Model Card for Model ID" in (tmp_path / "README.md").read_text()
    said = {"license": "mit", "language": "en", "dataset": "my data", "dataset_args": "first half", "tags": ["mine"]}
    for make in (trainer.create_model_card, trainer.push_to_hub):
        with patch("hf_zero.hub.trainer_push.push_output"):
            make(**said)
        card = (tmp_path / "README.md").read_text()
        fields = metadata_load(tmp_path / "README.md")
        assert {
            "license": "mit",
            "language": "en",
            "base_model": "me/base",
            "library_name": "peft",
        }.items() <= fields.items()
        assert {"mine", "lora", "base_model:adapter:me/base", "hf-zero", "generated_from_trainer"} <= set(
            fields["tags"]
        )
        assert "on the data set my data." in card and "| dataset arguments | first half |" in card
        assert "Model Card for Model ID" not in card and "| peft |" in card


@pytest.mark.extra("hub")
@on_ranks(1)
def test_ones_own_card_keeps_its_text_and_gets_the_arguments(rank, world_size, tmp_path):
    as_launched(rank, world_size)
    trainer = make_trainer("callback 1", "gpt2", tmp_path, max_steps=1)
    trainer.train()
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\ntags:\n- first\n---\n# Mine\n\nText.\n")
    trainer.create_model_card(model_name="name")
    assert card.read_text().startswith("---\nlicense: mit\ntags:\n- first\n---\n# Mine")
    warned: list[str] = []
    with patch("hf_zero.hub.trainer_push.logger.warning", warned.append):
        trainer.create_model_card(license="gpl", dataset="my data", tags="second")
    assert card.read_text().endswith("# Mine\n\nText.\n")
    assert metadata_load(card) == {"license": "gpl", "tags": ["first", "second", "generated_from_trainer"]}
    assert len(warned) == 1 and "did not add dataset" in warned[0]
    card.write_text("---\nlicense: [\n---\n# Mine\n")
    with pytest.raises(CheckpointError, match=r"front matter of .* cannot be read"):
        trainer.create_model_card(license="gpl")
