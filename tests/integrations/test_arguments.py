"""`--zero` on any class of training arguments: parsed, saved, pickled and trained with like the class itself."""

import copy
import json
import os
import pickle
import pydoc
import sys
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from launching import run_forked
from shared_ranks import run_on_ranks
from trainer_job import MODELS, as_launched, history, make_trainer
from transformers import (
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_zero import ConfigError, ZeroCallback, ZeroPlugin, ZeroTrainingArguments, engine_of, with_zero
from hf_zero.integrations.arguments import ZeroArguments
from hf_zero.integrations.unmodified import main as run_main

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
    assert json.loads(arguments.to_json_string())["parallelism_config"] == {"stage": 1, "comm.timeout_s": 60}
    saved = tmp_path / "training_args.bin"
    torch.save(arguments, saved)
    # Trainer writes whole objects. Those of its own, of accelerate and of ours are all that the file asks for.
    names = torch.serialization.get_unsafe_globals_in_checkpoint(saved)
    # Python 3.11.0 to 3.11.3 writes a member of an enumeration with `getattr`.
    others = {name.partition(".")[0] for name in names if name != "builtins.getattr"}
    assert others <= {"accelerate", "hf_zero", "transformers", "torch", __name__}
    with torch.serialization.safe_globals([kind, *map(pydoc.locate, names)]):
        loaded = torch.load(saved, weights_only=True)
    for again in (pickle.loads(pickle.dumps(arguments)), copy.deepcopy(arguments), loaded):
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
    with pytest.raises(ConfigError, match=r"`--zero` is 'two'; allowed: a stage .* For stage 2, write 2"):
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


@pytest.mark.slow
def test_seq2seq_arguments_with_the_flag_train_like_ddp(tmp_path):
    runs = {}
    for stage in (None, "2", "3"):
        runs[stage] = run_on_ranks(trained, stage=stage, folder=str(tmp_path))
    assert np.isfinite(runs[None][0]).all() and runs["2"] == runs["3"] == runs[None]


MISTAKEN = {
    "flag": "hf_zero.ZeroTrainingArguments(output_dir='x', zero='stge=2')",
    "plugin": "hf_zero.ZeroPlugin(stge=2)",
    "callback": "hf_zero.ZeroCallback({'stge': 2})",
    "engine": "hf_zero.ZeroEngine(torch.nn.Linear(1, 1), [], 'stge=2')",
    "init": "hf_zero.init('stge=2').__enter__()",
    "file": "hf_zero.ZeroPlugin('nowhere.yaml')",
    "broken file": "hf_zero.ZeroPlugin('broken.yaml')",
}


@pytest.mark.parametrize("door", MISTAKEN)
def test_a_mistaken_setting_is_one_clear_message_and_the_launcher_has_it(door, tmp_path):
    script, told = tmp_path / "script.py", tmp_path / "error.json"
    (tmp_path / "broken.yaml").write_text("stage: [2")
    script.write_text(f"import hf_zero, torch\n\n\ndef main():\n    {MISTAKEN[door]}\n\n\nmain()\n")
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(told), "ACCELERATE_USE_CPU": "true"}
    ended = run_forked(script, environment=environment, processes=2, folder=tmp_path)
    message = json.loads(told.read_text())["message"]
    assert ended.returncode == 1
    assert message["extraInfo"]["py_callstack"].startswith("hf_zero config: ")
    assert message["extraInfo"]["py_callstack"] in message["message"]
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    # One rank's, if it has come so far before the other has taken it down: where, what, and no frame of a library.
    assert len(lines) <= 5 and ended.stderr.count("hf_zero config: ") <= 1
    if lines:
        assert 'script.py", line 5, in main' in ended.stderr and MISTAKEN[door] in ended.stderr


def test_a_mistaken_setting_of_a_run_is_told_to_the_launcher(tmp_path, monkeypatch, capsys):
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    monkeypatch.setattr(sys, "argv", ["hf_zero.run", "--zero", "stge=2", __file__])
    with pytest.raises(SystemExit, match="unknown key `stge`; the most similar known key is `stage`"):
        run_main()
    assert "`stge`" in json.loads(told.read_text())["message"]["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(("said", "is_resumed"), [("True", True), ("true", True), ("False", False)])
def test_a_command_lines_true_resumes_from_the_newest_checkpoint(said, is_resumed, tmp_path):
    ranks = run_on_ranks(resumes_as_said, world_size=1, said=said, folder=tmp_path)
    assert ranks == [2 if is_resumed else 0]


def resumes_as_said(rank: int, world_size: int, said: str, folder: Path) -> int:
    """The step at which training goes on."""
    as_launched(rank, world_size)
    for steps in (2, 3):
        trainer = make_trainer("flag 2", "gpt2", folder, max_steps=steps, save_strategy="steps", save_steps=2)
        at: list[int] = []
        trainer.add_callback(First(at))
        trainer.train(resume_from_checkpoint=said if steps == 3 else None)
    return at[0]


class First(TrainerCallback):
    """Notes the step before the first."""

    def __init__(self, at: list[int]):
        self._at = at

    def on_step_begin(self, args, state, control, **kwargs):
        self._at.append(state.global_step)


def test_the_callback_takes_settings_by_name_as_the_plugin_does():
    assert (
        ZeroCallback(stage=1, comm={"late_s": 5.0})._plugin.config == ZeroPlugin(stage=1, comm={"late_s": 5.0}).config
    )
    with pytest.raises(ConfigError, match="pass only one of the two"):
        ZeroCallback(2, stage=1)


def test_a_plugin_that_is_a_class_is_named():
    with pytest.raises(ConfigError, match=r"is the class ZeroPlugin. Pass an object: ZeroPlugin\(stage=2\)"):
        Accelerator(cpu=True, parallelism_config=ZeroPlugin)
