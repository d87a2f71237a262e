"""`--zero` on any class of training arguments: parsed, saved, pickled and trained with like the class itself."""

import copy
import json
import os
import pickle
from dataclasses import dataclass, field, fields, is_dataclass

import numpy as np
import pytest
import torch
from launching import run_forked
from ranks import run_ranks
from trainer_job import MODELS, as_launched, history
from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from hf_zero import ConfigError, ZeroPlugin, ZeroTrainingArguments, engine_of, with_zero
from hf_zero.integrations.arguments import ZeroArguments

pytestmark = pytest.mark.timeout(180)


@dataclass
class RecipeArguments(TrainingArguments):
    """As TRL's configs are: other defaults, fields of its own, and settings that are made after parsing."""

    learning_rate: float = field(default=2e-5, metadata={"help": "The initial learning rate."})
    max_length: int | None = field(default=1024, metadata={"help": "Longer rows are cut."})

    def __post_init__(self):
        self.logging_steps = self.logging_steps or 10
        super().__post_init__()
        self.was_completed = True


@dataclass
class OwnArguments(with_zero(RecipeArguments)):
    """A user's class on top."""

    note: str = "none"


@dataclass
class MixedIn(ZeroArguments, RecipeArguments):
    """By the mixin alone, without with_zero."""


CLASSES = [
    with_zero(RecipeArguments),
    with_zero(Seq2SeqTrainingArguments),
    OwnArguments,
    MixedIn,
    ZeroTrainingArguments,
]


def parsed(kind: type, folder, *words: str) -> TrainingArguments:
    common = ["--output_dir", str(folder), "--use_cpu", "true", "--report_to", "none"]
    [arguments] = HfArgumentParser(kind).parse_args_into_dataclasses([*common, *words])
    return arguments


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_flag_is_parsed_saved_and_pickled(kind, tmp_path):
    arguments = parsed(kind, tmp_path, "--zero", "stage=1,comm.timeout_s=60")
    assert isinstance(arguments, kind) and arguments.parallelism_config.config.stage == 1
    assert parsed(kind, tmp_path).parallelism_config is None
    assert arguments.to_dict()["zero"] == "stage=1,comm.timeout_s=60"
    assert json.loads(arguments.to_json_string())["parallelism_config"]["comm"]["timeout_s"] == 60
    torch.save(arguments, tmp_path / "training_args.bin")
    for again in (
        pickle.loads(pickle.dumps(arguments)),
        copy.deepcopy(arguments),
        # What Trainer writes is whole objects, which only a full unpickling reads; this file is the test's own.
        torch.load(tmp_path / "training_args.bin", weights_only=False),
    ):
        assert type(again) is type(arguments) and isinstance(again.parallelism_config, ZeroPlugin)
        assert again.to_dict() == arguments.to_dict()


@pytest.mark.parametrize("base", [TrainingArguments, RecipeArguments, Seq2SeqTrainingArguments])
def test_a_class_with_the_flag_is_its_base_with_one_more_field(base):
    made = with_zero(base)
    names = [f.name for f in fields(base)]
    own = [f for f in fields(made) if f.name == "zero"]
    assert [f.name for f in fields(made) if f.name != "zero"] == names and len(own) == 1
    assert issubclass(made, base) and is_dataclass(made) and with_zero(base) is made is with_zero(made)
    assert {f.name: f.default for f in fields(base)}.items() <= {f.name: f.default for f in fields(made)}.items()


def test_what_the_class_does_after_parsing_is_done(tmp_path):
    arguments = parsed(with_zero(RecipeArguments), tmp_path, "--zero", "2", "--max_length", "7")
    assert arguments.was_completed and arguments.max_length == 7 and arguments.learning_rate == 2e-5
    assert parsed(OwnArguments, tmp_path, "--zero", "2", "--note", "kept").note == "kept"


def test_other_classes_are_refused():
    for other in (dict, ZeroPlugin(2), None):
        with pytest.raises(TypeError, match="with_zero takes a subclass of TrainingArguments"):
            with_zero(other)


def test_a_wrong_value_names_the_flag(tmp_path):
    with pytest.raises(ConfigError, match=r"`--zero` is 'two'; allowed: a stage .* For stage 2 say 2"):
        parsed(ZeroTrainingArguments, tmp_path, "--zero", "two")


LOADED = """
import sys, torch
arguments = torch.load(sys.argv[1], weights_only=False)
print(type(arguments).__name__, arguments.parallelism_config.config.stage, arguments.predict_with_generate)
"""


def test_a_saved_file_is_read_by_a_fresh_process(tmp_path):
    arguments = parsed(with_zero(Seq2SeqTrainingArguments), tmp_path, "--zero", "3", "--predict_with_generate", "true")
    torch.save(arguments, tmp_path / "training_args.bin")
    script = tmp_path / "loaded.py"
    script.write_text(LOADED)
    # Forked from one that has never made this class.
    ran = run_forked(script, [tmp_path / "training_args.bin"], environment=os.environ, processes=1)
    assert ran.stdout.split() == ["ZeroSeq2SeqTrainingArguments", "3", "True"], ran.stderr


def trained(rank: int, world_size: int, stage: str | None, folder: str) -> list[float]:
    as_launched(rank, world_size)
    make_model, make_batch = MODELS["gpt2"]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    rows = [{key: value[0] for key, value in make_batch(generator, 1).items()} for _ in range(48)]
    zero = [] if stage is None else ["--zero", stage]
    words = [
        "--max_steps",
        "4",
        "--logging_steps",
        "1",
        "--save_strategy",
        "no",
        "--disable_tqdm",
        "true",
        "--seed",
        "3",
        *zero,
    ]
    arguments = parsed(with_zero(Seq2SeqTrainingArguments), folder, *words)
    trainer = Seq2SeqTrainer(model=make_model(), args=arguments, train_dataset=rows)
    trainer.train()
    if stage is not None:
        assert engine_of(trainer).config.stage == int(stage)
        trainer.save_model()
    assert isinstance(trainer, Trainer)
    return history(trainer)["losses"]


def test_seq2seq_arguments_with_the_flag_train_like_ddp(tmp_path):
    runs = {}
    for stage in (None, "2", "3"):
        keywords = {"stage": stage, "folder": str(tmp_path)}
        runs[stage] = run_ranks(trained, world_size=2, time_limit_s=120, keyword_arguments=keywords)
    assert np.isfinite(runs[None][0]).all() and runs["2"] == runs["3"] == runs[None]
