"""What the fine-tuning scripts share: arguments, data, the model's start, and the report."""

import ast
import csv
import gc
import hashlib
import json
import os
import re
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

from hf_zero import ConfigError, ZeroEngine, engine_of


class RecipeError(ValueError):
    """A mistake of the user. The message names the fault, the value, the allowed values, and what to do."""


@contextmanager
def one_paragraph() -> Iterator[None]:
    """End the program with only the message of a mistaken request, without a traceback."""
    try:
        yield
    except (RecipeError, ConfigError) as error:
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            # Every rank finds the same mistake. The first rank of each machine prints it; the launcher then ends the others
            # during this wait.
            time.sleep(5)
        sys.exit(f"\n{error}\n")


# Names moved by the Hub: `--dataset_name glue/sst2` is short for `--dataset_name nyu-mll/glue --dataset_config_name sst2`.
COLLECTIONS = {"glue": "nyu-mll/glue", "super_glue": "aps/super_glue", "wikitext": "Salesforce/wikitext"}


@dataclass
class ModelArguments:
    """The model to train. By default, a small one, from scratch."""

    model_name_or_path: str | None = HfArg(default=None, help="Pretrained model to fine-tune. Unset: from scratch.")
    config_name: str | None = HfArg(
        default=None, help="Configuration of a model trained from scratch, if not the recipe's small one."
    )
    config_overrides: str | None = HfArg(
        default=None, help="Changes to the configuration from scratch, such as `hidden_size=256,num_hidden_layers=4`."
    )
    tokenizer_name: str | None = HfArg(
        default=None, help="Tokenizer, if not the model's own. A model from scratch has one trained on its text."
    )

    def __post_init__(self):
        if self.model_name_or_path and (self.config_name or self.config_overrides):
            raise RecipeError(
                f"--model_name_or_path {self.model_name_or_path} brings its own configuration. Drop --config_name and "
                "--config_overrides, or drop --model_name_or_path to train from scratch."
            )


@dataclass
class DataArguments:
    """The text to train on. By default, the text of Python's standard library, which every machine has."""

    dataset_name: str | None = HfArg(
        default=None, help="Dataset of the hub, such as `imdb`, or with its configuration: `glue/sst2`."
    )
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="Training data in a local file.")
    validation_file: str | None = HfArg(default=None, help="Validation data in a local file.")
    validation_split_percentage: int = HfArg(
        default=5, help="Share of the training data held out where there is no validation data."
    )
    text_column: str | None = HfArg(default=None, help="Column of the text. Unset: found by its name.")
    max_train_samples: int | None = HfArg(default=None, help="Train on so many samples at most.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on so many samples at most.")

    def __post_init__(self):
        if self.dataset_name and self.train_file:
            both = f"--dataset_name {self.dataset_name} and --train_file {self.train_file}"
            raise RecipeError(f"{both} both name training data. Give one of the two.")
        if self.validation_file and not self.train_file:
            raise RecipeError(
                f"--validation_file {self.validation_file} stands alone. Give its --train_file, too: labels and tokenizer "
                "come from the training data, also where only --do_eval is asked for."
            )
        for name in ("max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(
                    f"--{name} is {value}; allowed: a whole number from 1. Leave it out to use all samples."
                )
        if not 1 <= self.validation_split_percentage <= 50:
            said = f"--validation_split_percentage is {self.validation_split_percentage}; allowed: 1 to 50."
            raise RecipeError(f"{said} It is used where the data has no validation split of its own.")
        collection, _, configuration = (self.dataset_name or "").partition("/")
        if collection in COLLECTIONS and configuration and not self.dataset_config_name:
            self.dataset_name, self.dataset_config_name = COLLECTIONS[collection], configuration


def parse_arguments(
    *kinds: type, defaults: dict[str, Any], from_scratch: dict[str, Any], args: list[str] | None = None
) -> tuple:
    """Read the command line into one dataclass of each kind.

    `from_scratch` contains further defaults for a run without a pretrained model: random weights need a far larger learning
    rate than fine-tuning. A Trainer run without `do_train` and `do_eval` gets both.
    """
    parser = HfArgumentParser(kinds)
    parser.set_defaults(**defaults)
    given, _ = parser.parse_known_args(args)
    if given.model_name_or_path is None:
        parser.set_defaults(**from_scratch)
    if any(issubclass(kind, TrainingArguments) for kind in kinds):
        # Without an accelerator, pinned memory only causes a warning per loader.
        parser.set_defaults(dataloader_pin_memory=torch.accelerator.is_available())
        if not (given.do_train or given.do_eval):
            parser.set_defaults(do_train=True, do_eval=True)
    return parser.parse_args_into_dataclasses(args)


TABLES = {".tsv": "\t", ".csv": ","}
JSON = (".json", ".jsonl")
HEADERLESS_COLUMNS = ["sentence", "label"]
_LINES_LOOKED_AT = 1000


def load_files(train_file: str, validation_file: str | None, *, plain_text: bool = False) -> DatasetDict:
    """Load one or two files of the same kind as `train` and, if given, `validation`.

    Args:
        plain_text: also accept `.txt`, read line by line into a column `text`.
    """
    files = {"train": Path(train_file)}
    if validation_file is not None:
        files["validation"] = Path(validation_file)
    for path in files.values():
        _check(path, [*TABLES, *JSON, *([".txt"] if plain_text else [])])
    splits = DatasetDict({split: _load(path) for split, path in files.items()})
    for split, rows in splits.items():
        if len(rows) == 0:
            raise RecipeError(f"{files[split]} has no rows below its header line. Give a file with at least one row.")
    return splits


def _check(path: Path, extensions: list[str]) -> None:
    if not path.is_file():
        near = sorted(each.name for each in path.parent.glob("*") if each.suffix in extensions)
        found = f"that folder holds {', '.join(near[:10])}" if near else "there is no such data in that folder"
        raise RecipeError(
            f"There is no file {str(path)!r}; {found}. Check the path, which is relative to {Path.cwd()}."
        )
    if path.suffix.lower() not in extensions:
        raise RecipeError(
            f"{path} ends in {path.suffix!r}, which names no known format; allowed: {', '.join(extensions)}. Rename the "
            "file, or convert it."
        )
    with path.open("rb") as file:
        if not file.read(4096).strip():
            raise RecipeError(f"{path} is empty ({path.stat().st_size} bytes). Give a file with at least one row.")


def _load(path: Path):
    extension, files = path.suffix.lower(), {"data_files": {"train": str(path)}, "split": "train"}
    if extension == ".txt":
        return load_dataset("text", keep_linebreaks=True, **files)
    if extension in JSON:
        return load_dataset("json", **files)
    # Words such as "null" and "NA" are text here, and a quotation mark in a tsv is an ordinary character.
    quoting = csv.QUOTE_NONE if extension == ".tsv" else csv.QUOTE_MINIMAL
    names = None if _has_header(path, TABLES[extension], quoting) else HEADERLESS_COLUMNS
    read = {"sep": TABLES[extension], "quoting": quoting, "column_names": names, "keep_default_na": False}
    return load_dataset("csv", **files, **read)


def _has_header(path: Path, separator: str, quoting: int) -> bool:
    """Whether the first line names the columns.

    In a table of sentence and label without a header, the first line's label also appears in later lines, unlike the name of
    a column. Tables with a different number of columns need a header.
    """
    with path.open(encoding="utf-8", newline="") as file:
        first, *rows = islice(csv.reader(file, delimiter=separator, quoting=quoting), _LINES_LOOKED_AT)
    if len(first) == len(HEADERLESS_COLUMNS) and first[-1] in {row[-1] for row in rows if row}:
        return False
    if not rows:
        raise RecipeError(f"{path} has a header line and no rows. Give a file with at least one row of data below it.")
    return True


VALIDATION_NAMES = ("validation", "validation_matched", "dev")
_SPLIT_SEED = 0


def load_splits(data: DataArguments, *, plain_text: bool = False) -> DatasetDict:
    """Load `train` and `validation` from files or the Hub. Without a validation split, a part of `train` is held out."""
    if data.train_file:
        found = load_files(data.train_file, data.validation_file, plain_text=plain_text)
    else:
        found = load_dataset(data.dataset_name, data.dataset_config_name)
    if "train" not in found:
        has = f"The dataset {data.dataset_name} has no split `train`; it has: {', '.join(found)}."
        raise RecipeError(f"{has} Choose another dataset or configuration (--dataset_config_name).")
    validation = next((name for name in VALIDATION_NAMES if name in found), None)
    if validation is not None:
        return DatasetDict(train=found["train"], validation=found[validation])
    if len(found["train"]) < 2:
        raise RecipeError("The training data has a single row: give more rows, or a --validation_file.")
    parts = found["train"].train_test_split(data.validation_split_percentage / 100, seed=_SPLIT_SEED)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def at_most(rows: Dataset, samples: int | None, seed: int) -> Dataset:
    """Draw so many samples at random, or return all if there are fewer: data files are often sorted by label."""
    if samples is None or samples >= len(rows):
        return rows
    return rows.shuffle(seed=seed).select(range(samples))


TEXT_NAMES = ("text", "sentence", "content")
LABEL_NAMES = ("label", "labels")


def find_columns(splits: DatasetDict, option: str, asked: str | None, usual: tuple[str, ...]) -> list[str]:
    """Return the requested columns (several separated by commas), or the first of the usual names; each is in every split."""
    for split, rows in splits.items():
        columns = ", ".join(rows.column_names)
        if asked is None:
            asked = next((name for name in usual if name in rows.column_names), None)
        if asked is None:
            wanted = f"named {' or '.join(usual)}"
            raise RecipeError(f"The {split} data has no column {wanted}; it has: {columns}. Name one with {option}.")
        for name in asked.split(","):
            if name not in rows.column_names:
                raise RecipeError(
                    f"The {split} data has no column {name!r}; it has: {columns}. Name one of these with {option}. (Two "
                    "columns without a header line are called sentence and label.)"
                )
    return asked.split(",")


def encode_labels(splits: DatasetDict, column: str) -> DatasetDict:
    """Make the column `label` a `ClassLabel` with the names from the training data, in order."""
    if not isinstance(splits["train"].features[column], ClassLabel):
        names = sorted({str(label) for label in splits["train"][column]}, key=_number_then_name)
        _check_known(splits["validation"], column, names)
        ids = {name: number for number, name in enumerate(names)}
        splits = splits.map(lambda row: {"label": ids[str(row[column])]}, desc="Numbering the labels")
        splits = splits.cast_column("label", ClassLabel(names=names))
    elif column != "label":
        splits = splits.rename_column(column, "label")
    label = splits["train"].features["label"]
    if label.num_classes < 2:
        raise RecipeError(
            f"Every row of the training data has the same label ({label.names[0]!r} in the column {column!r}). Give data "
            "with two classes or more, or name another column with --label_column."
        )
    return splits


def _number_then_name(name: str) -> tuple[int, str]:
    """Sort "2" before "10", and numbers before words."""
    return (int(name), name) if name.isdecimal() else (2**63, name)


def _check_known(validation: Dataset, column: str, names: list[str]) -> None:
    unseen = sorted({str(label) for label in validation[column]} - set(names))
    if unseen:
        raise RecipeError(
            f"The validation data has the label {unseen[0]!r} in its column {column!r}, which no row of the training data "
            f"has; known labels: {', '.join(names[:20])}. Correct those rows, or add training rows with that label."
        )


PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""Well documented, each about one subject, and part of every Python since 3.10."""

SHORTEST_DOCSTRING = 20
ONE_IN = 8
"""Every eighth text, chosen by hash, is for validation."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def docstrings() -> DatasetDict:
    """Docstrings (`text`) of functions and classes, labeled by their package (`label`)."""
    package_of: dict[str, int] = {}
    for label, package in enumerate(PACKAGES):
        for _, source in _modules(package):
            for node in ast.walk(ast.parse(source)):
                docstring = ast.get_docstring(node) if isinstance(node, _DEFINITIONS) else None
                text = " ".join((docstring or "").split())
                if len(text) >= SHORTEST_DOCSTRING:
                    package_of.setdefault(text, label)
    features = Features(text=Value("string"), label=ClassLabel(names=list(PACKAGES)))
    rows = [{"text": text, "label": label} for text, label in package_of.items()]
    return _split(rows, features)


def sources() -> DatasetDict:
    """The source (`text`) of every module of the same packages."""
    rows = [{"text": source} for package in PACKAGES for _, source in _modules(package)]
    return _split(rows, Features(text=Value("string")))


def _modules(package: str) -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted((root / package).rglob("*.py")):
        if not {"test", "tests"} & set(path.relative_to(root).parts):
            yield path, path.read_text(encoding="utf-8")


def _split(rows: list[dict], features: Features) -> DatasetDict:
    """Shuffle and split by a hash of the text, equal on every rank, machine and run."""

    def digest(row: dict) -> bytes:
        return hashlib.sha256(row["text"].encode()).digest()

    parts: dict[str, list[dict]] = {"train": [], "validation": []}
    for row in sorted(rows, key=digest):
        parts["train" if digest(row)[-1] % ONE_IN else "validation"].append(row)
    return DatasetDict({split: Dataset.from_list(rows, features) for split, rows in parts.items()})


@dataclass
class ClassificationArguments(DataArguments):
    """The labeled text to train on. By default, docstrings labeled by their package."""

    text_column: str | None = HfArg(
        default=None, help="Column of the text, or two of a pair: `premise,hypothesis`. Unset: found by its name."
    )
    label_column: str | None = HfArg(default=None, help="Column of the label. Unset: found by its name.")
    max_seq_length: int = HfArg(default=128, help="Longer texts are cut to so many tokens.")


def load_classification(data: ClassificationArguments, seed: int) -> DatasetDict:
    """Load `train` and `validation`, with a column `text`, optionally `text_pair`, and a `label` with class names."""
    if not (data.dataset_name or data.train_file):
        splits = docstrings()
    else:
        splits = load_splits(data)
        texts = find_columns(splits, "--text_column", data.text_column, TEXT_NAMES)
        [label] = find_columns(splits, "--label_column", data.label_column, LABEL_NAMES)
        splits = splits.select_columns([*texts, label])
        splits = encode_labels(splits, label)
        renamed = dict(zip(texts, ("text", "text_pair")))
        splits = splits.rename_columns({old: new for old, new in renamed.items() if old != new})
    splits["train"] = at_most(splits["train"], data.max_train_samples, seed)
    splits["validation"] = at_most(splits["validation"], data.max_eval_samples, seed)
    return splits


def class_names(splits: DatasetDict) -> dict[str, dict]:
    """Make the two maps between numbers and class names for a model's configuration."""
    label: ClassLabel = splits["train"].features["label"]
    return {"id2label": dict(enumerate(label.names)), "label2id": {name: i for i, name in enumerate(label.names)}}


def tokenize(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> DatasetDict:
    """Convert text columns to model inputs, and rename the label to `labels`, as models expect."""
    texts = [name for name in ("text", "text_pair") if name in splits["train"].column_names]

    def encode(rows):
        inputs = tokenizer(*(rows[name] for name in texts), truncation=True, max_length=max_seq_length)
        return {**inputs, "labels": rows["label"]}

    return splits.map(encode, batched=True, remove_columns=splits["train"].column_names, desc="Tokenizing")


def pack(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase, block_size: int) -> DatasetDict:
    """Tokenize the column `text`, join the texts of a mapping batch, and cut them into blocks; an incomplete block is dropped."""

    def cut(rows):
        tokens = list(chain.from_iterable(tokenizer(rows["text"], verbose=False)["input_ids"]))
        whole = len(tokens) - len(tokens) % block_size
        blocks = [tokens[start : start + block_size] for start in range(0, whole, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    packed = splits.map(cut, batched=True, remove_columns=splits["train"].column_names, desc="Packing into blocks")
    for split, blocks in packed.items():
        if len(blocks) == 0:
            raise RecipeError(
                f"The {split} text is shorter than one block of {block_size} tokens. Give more text, or a smaller "
                "--block_size."
            )
    return packed


VOCABULARY = 4096


def load_or_train(
    model: ModelArguments,
    train: Callable[[Iterable[str]], PreTrainedTokenizerFast],
    texts: Iterable[str],
    output_dir: str,
    *,
    resuming: bool,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer named by the arguments, or train one on `texts` and store it in `output_dir` for a resumed run.

    The first rank trains and sends the result to the others. So no rank reads a file during its write, and all ranks have the
    same tokenizer even on machines without a shared folder. Call it on every rank.
    """
    named = model.tokenizer_name or model.model_name_or_path
    if named:
        return AutoTokenizer.from_pretrained(named)
    if resuming:
        return _trained_before(output_dir)
    trained = [None]
    if PartialState().is_main_process:
        trained = [train(texts)]
        trained[0].save_pretrained(output_dir)
    broadcast_object_list(trained)
    return trained[0]


def _trained_before(output_dir: str) -> PreTrainedTokenizerBase:
    if not (Path(output_dir) / "tokenizer.json").is_file():
        raise RecipeError(
            f"The run to resume trained a tokenizer, but the folder {output_dir!r} holds none (tokenizer.json). Set "
            "--output_dir to that run's folder, or --tokenizer_name."
        )
    return AutoTokenizer.from_pretrained(output_dir)


def train_for_classification(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer with BERT's special tokens: lower case, `[CLS] … [SEP]` around a text."""
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tokenizer = _train_byte_pairs(texts, [*special.values()], normalizers.BertNormalizer(lowercase=True))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokens = {f"{role}_token": token for role, token in special.items()}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **tokens)


def train_for_language_modeling(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer like GPT-2's: lossless for any text, with one special token."""
    end_of_text = "<|endoftext|>"
    tokenizer = _train_byte_pairs(texts, [end_of_text], normalizer=None)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end_of_text, eos_token=end_of_text)


def _train_byte_pairs(
    texts: Iterable[str], special_tokens: list[str], normalizer: normalizers.Normalizer | None
) -> Tokenizer:
    """Train byte-level BPE, also for BERT: a WordPiece vocabulary trained twice on one text has two different orders."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=normalizer is not None)
    tokenizer.decoder = decoders.ByteLevel()
    more = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special_tokens, **more)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def config_from_scratch(model: ModelArguments, small: PreTrainedConfig, **facts) -> PreTrainedConfig:
    """Return the named configuration or else the recipe's small one, changed by `--config_overrides`.

    `facts` result from data and tokenizer (vocabulary size, labels), so they have priority.
    """
    config = AutoConfig.from_pretrained(model.config_name) if model.config_name else small
    if model.config_overrides:
        try:
            config.update_from_string(model.config_overrides)
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"--config_overrides {model.config_overrides} does not fit {type(config).__name__}: {error}. Write "
                f"name=value pairs separated by commas; the names are: {', '.join(sorted(config.to_diff_dict()))}."
            ) from error
    config.update(facts)
    return config


def check_writable(output_dir: str) -> None:
    """Make the output folder and try to write there: otherwise a run could fail only at its end."""
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        said = f"The output folder {output_dir!r} cannot be written to ({error.strerror})."
        raise RecipeError(f"{said} Give another --output_dir, or change the rights of this one.") from error


def checkpoint_to_resume(asked: str | None, output_dir: str) -> str | bool | None:
    """Convert `--resume_from_checkpoint` for Trainer: a folder, True for the last one in the output folder, or "last-good"."""
    if asked is None or asked == "last-good":
        return asked
    here = sorted(path.name for path in Path(output_dir).glob("checkpoint-*"))
    choice = f"{output_dir} holds {', '.join(here) or 'no checkpoint'}"
    if asked.lower() == "true":
        if not here:
            raise RecipeError(
                f"--resume_from_checkpoint true asks for the last checkpoint of the output folder, but {choice}. Set "
                "--output_dir to the folder of the run to go on with, or leave the option out."
            )
        return True
    if not (Path(asked) / "trainer_state.json").is_file():
        problem = "has no trainer_state.json" if Path(asked).is_dir() else "does not exist"
        raise RecipeError(
            f"--resume_from_checkpoint {asked} is not a Trainer checkpoint: that folder {problem}; {choice}. Name a "
            "`checkpoint-…` folder, or give `true` for the last one."
        )
    return asked


def step_to_resume(asked: str | None) -> int:
    """Return the optimizer step of a folder `step_…`, saved by the plain accelerate loop; 0 to start from the beginning."""
    if asked is None:
        return 0
    step = re.fullmatch(r"step_(\d+)", Path(asked).name)
    if step is None or not Path(asked).is_dir():
        problem = "there is no such folder" if step else "its name is not `step_` and a number"
        raise RecipeError(
            f"--resume_from_checkpoint {asked} is not a checkpoint of this script: {problem}. Name a folder that "
            "--checkpointing_steps has made, such as outputs/accelerate/step_100."
        )
    return int(step[1])


@contextmanager
def ranks_together() -> Iterator[None]:
    """A context for a script's main function: its ranks connect first, and leave together at the end."""
    if "LOCAL_RANK" in os.environ and not torch.accelerator.is_available():
        # `accelerate launch` passes `use_cpu` only to a single process. Of several, each would silently train as a separate run.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    yield
    # Free a DDP wrapper before the process group is destroyed. Otherwise the wrapper would destroy it while holding the
    # interpreter lock, for which gloo's threads may be waiting, and the rank would never end.
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


class _LogLastStep(TrainerCallback):
    """Log after the last step, too. Trainer averages its loss over ranks when it logs; for steps after the last log,
    `training_loss` would only contain the first rank's loss."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps:
            control.should_log = True


def run_trainer(
    title: str,
    trainer: Trainer,
    checkpoint: str | bool | None,
    evaluated: Callable[[dict[str, float]], dict[str, float]],
    *,
    rate: str = "train_samples_per_second",
    rows: int = 1,
) -> None:
    """Run a Trainer as the arguments request, and report the results.

    Args:
        evaluated: selects the reported evaluation metrics.
        rate: the name of the speed, in which each sample counts as `rows`.
    """
    trainer.add_callback(_LogLastStep())
    args = trainer.args
    results = {"parameters": trainer.model.num_parameters(), "processes": args.world_size}
    if args.do_train:
        trained = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.save_state()
        speed = trained.metrics["train_samples_per_second"] * rows
        results |= {"train_loss": trained.training_loss, "train_seconds": trained.metrics["train_runtime"], rate: speed}
    if args.do_eval:
        results |= evaluated(trainer.evaluate())
    results["peak_memory_bytes"] = peak_memory_bytes()
    if trainer.is_world_process_zero():
        is_sharded = args.zero is not None and args.do_train
        report(title, results, args.output_dir, engine_of(trainer) if is_sharded else None)


def peak_memory_bytes() -> int:
    """Return the maximum over ranks: GPU memory allocated by torch, or on CPU the resident memory of the process.

    Call it on every rank.
    """
    device = PartialState().device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(gather(torch.tensor([peak], device=device)).max())


RESULTS_NAME = "results.json"


def report(title: str, results: dict[str, Any], output_dir: str, engine: ZeroEngine | None) -> None:
    """Print the results and, if an engine sharded the run, its memory and communication; write them to a file.

    Call it on the main process.
    """
    table = Table("figure", "value", title=title, title_justify="left")
    table.columns[1].justify = "right"
    for name, value in results.items():
        table.add_row(*_readable(name, value))
    Console().print(table)
    if engine is not None:
        memory, communication = engine.memory_report(), engine.comm_report()
        print(memory.table(), communication.table(), sep="\n")
        results |= {"state_bytes": memory.total_bytes, "ddp_state_bytes": memory.ddp_total_bytes}
        results["bytes_sent"] = communication.bytes_sent
    Path(output_dir, RESULTS_NAME).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _readable(name: str, value: float) -> tuple[str, str]:
    label = name.replace("_", " ")
    if name.endswith("_bytes"):
        return label.removesuffix(" bytes"), f"{value / 2**20:,.1f} MiB"
    return label, f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if value >= 100 else f"{value:.4f}"
