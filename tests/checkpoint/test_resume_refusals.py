"""What a run cannot resume from, or cannot save to, is said before it trains: the thing, its value, and the way out."""

import errno
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate_job import make_accelerator
from cells import short_rows
from ranks import run_ranks
from trainer_job import as_launched, make_trainer
from training import bert
from transformers import TrainerState

from hf_zero.integrations.resume import state_faults

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}

pytestmark = pytest.mark.timeout(180)


def saves(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    make_trainer("flag 2", "bert", folder, **SAVING).train()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run's output_dir with `checkpoint-2` of two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(saves, world_size=2, time_limit_s=100, keyword_arguments={"folder": str(folder)})
    return folder


def refuses(rank: int, world_size: int, stage: int, folder: str, resume: str | None, model: str, hidden: int) -> str:
    """What ends a run before its first step."""
    as_launched(rank, world_size)

    def adapt(made):
        return made if model != "bert" or hidden == 24 else type(made)(_with_hidden_size(made.config, hidden))

    trainer = make_trainer(f"flag {stage}", model, folder, adapt=adapt, **{**SAVING, "max_steps": 4})
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ValueError as error:
        assert trainer.state.global_step in (0, 2)
        return str(error)
    return ""


def _with_hidden_size(config, hidden: int):
    config.hidden_size = hidden
    return config


def refusal(tmp_path: Path, **case: object) -> str:
    """All ranks' one message."""
    arguments = {"stage": 2, "folder": str(tmp_path), "resume": None, "model": "bert", "hidden": 24, **case}
    said = set(run_ranks(refuses, world_size=2, time_limit_s=100, keyword_arguments=arguments))
    assert len(said) == 1, said
    return said.pop()


def test_a_folder_of_checkpoints_is_refused_with_the_newest_that_is_inside(trained, tmp_path):
    said = refusal(tmp_path, resume=str(trained))
    assert f"cannot resume from '{trained}': it is a folder of checkpoints; checkpoint-2 is inside" in said
    assert f"so give '{trained}/checkpoint-2'" in said


@pytest.mark.parametrize(
    ("stage", "model", "hidden"),
    short_rows([(2, "bert", 60), (3, "bert", 60), (2, "gpt2", 48)], [(3, "bert", 60), (2, "gpt2", 48)]),
)
def test_a_checkpoint_of_another_model_is_refused_with_a_tensor_that_differs(stage, model, hidden, trained, tmp_path):
    said = refusal(tmp_path, stage=stage, model=model, hidden=hidden, resume=str(trained / "checkpoint-2"))
    assert said.startswith("hf_zero: ") and "checkpoint-2" in said
    assert re.search(r"bert\.embeddings|transformer\.", said), said
    assert re.search(r"[Rr]esume (with|from)|build the model", said), said


def on_a_read_only_disk(rank: int, world_size: int, folder: str) -> str:
    touch = Path.touch

    def refused(path: Path, *args: object, **kwargs: object) -> None:
        if str(path).startswith(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        touch(path, *args, **kwargs)

    with mock.patch.object(Path, "touch", refused):
        return refuses(rank, world_size, 2, folder, None, "bert", 24)


def test_an_output_dir_that_cannot_be_written_to_is_said_before_the_first_step(tmp_path):
    [said] = run_ranks(on_a_read_only_disk, world_size=1, time_limit_s=100, keyword_arguments={"folder": str(tmp_path)})
    assert said.startswith(f"hf_zero: rank 0 could not write to {tmp_path}: OSError: [Errno 30] Read-only file system")
    assert "Nothing was trained. Make the folder writable" in said and "save_strategy='no'" in said


def loads_the_parent(rank: int, world_size: int, folder: str) -> str:
    as_launched(rank, world_size)
    accelerator = make_accelerator("attach 2", cpu=True)
    model = bert()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError) as raised:
        accelerator.load_state(folder)
    return str(raised.value)


def test_load_state_of_a_parent_folder_names_the_state_inside(trained):
    [said] = run_ranks(loads_the_parent, world_size=1, time_limit_s=100, keyword_arguments={"folder": str(trained)})
    assert f"checkpoint-2 is inside: load_state('{trained}/checkpoint-2')." in said


def test_a_trainers_state_without_the_batch_size_that_it_calculates_with_is_a_fault(tmp_path):
    path = tmp_path / "trainer_state.json"
    TrainerState(train_batch_size=4).save_to_json(str(path))
    assert state_faults(tmp_path) == []
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"train_batch_size": None}))
    assert state_faults(tmp_path) == ["train_batch_size in trainer_state.json is None, which no Trainer writes"]
    del content["train_batch_size"]
    path.write_text(json.dumps(content))
    assert state_faults(tmp_path) == ["trainer_state.json lacks train_batch_size, which every Trainer writes"]
