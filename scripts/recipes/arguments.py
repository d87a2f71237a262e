"""The command line: what every recipe asks about model and data, and the defaults of a run that is told nothing."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments

from .errors import RecipeError

# Names the hub has moved: `--dataset_name glue/sst2` is short for `--dataset_name nyu-mll/glue --dataset_config_name sst2`.
COLLECTIONS = {"glue": "nyu-mll/glue", "super_glue": "aps/super_glue", "wikitext": "Salesforce/wikitext"}


@dataclass
class ModelArguments:
    """Which model is trained. Without any of these: a small one, from scratch."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pretrained model to fine-tune. Unset: train from scratch."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Configuration of a model trained from scratch, if not the recipe's small one."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Changes to the configuration from scratch, such as `hidden_size=256,num_hidden_layers=4`."},
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "Tokenizer, if not the model's own. A model from scratch has one trained on its text."},
    )

    def __post_init__(self):
        if self.model_name_or_path and (self.config_name or self.config_overrides):
            raise RecipeError(
                f"--model_name_or_path {self.model_name_or_path} brings its own configuration, so --config_name and "
                "--config_overrides have nothing to set. Drop them, or drop --model_name_or_path to train from scratch."
            )


@dataclass
class DataArguments:
    """Which text is learned. Without any of these: that of Python's standard library, which every machine has."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset of the hub, such as `imdb`, or with its configuration: `glue/sst2`."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of that dataset."})
    train_file: str | None = field(default=None, metadata={"help": "Training data in a local file."})
    validation_file: str | None = field(default=None, metadata={"help": "Validation data in a local file."})
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Share of the training data held out where there is no validation data."}
    )
    text_column: str | None = field(default=None, metadata={"help": "Column of the text. Unset: found by its name."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many samples at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many samples at most."})

    def __post_init__(self):
        if self.dataset_name and self.train_file:
            raise RecipeError(
                f"--dataset_name {self.dataset_name} and --train_file {self.train_file} both name training data. "
                "Give one of the two."
            )
        if self.validation_file and not self.train_file:
            raise RecipeError(
                f"--validation_file {self.validation_file} stands alone. Give the --train_file it belongs to: labels "
                "and tokenizer come from the training data, also where only --do_eval is asked for."
            )
        for name in ("max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(
                    f"--{name} is {value}; allowed: a whole number from 1. Leave it out to use all samples."
                )
        if not 1 <= self.validation_split_percentage <= 50:
            raise RecipeError(
                f"--validation_split_percentage is {self.validation_split_percentage}; allowed: 1 to 50. It is only "
                "used where the data has no validation split of its own."
            )
        collection, _, configuration = (self.dataset_name or "").partition("/")
        if collection in COLLECTIONS and configuration and not self.dataset_config_name:
            self.dataset_name, self.dataset_config_name = COLLECTIONS[collection], configuration


def parse_arguments(
    *kinds: type, defaults: dict[str, Any], from_scratch: dict[str, Any], args: list[str] | None = None
) -> tuple:
    """Read the command line into one dataclass of each kind.

    `from_scratch` are further defaults for a run without a pretrained model: random weights want a far larger learning
    rate than the one that suits fine-tuning. A Trainer's run that asks for neither training nor evaluation gets both.
    """
    parser = HfArgumentParser(kinds)
    parser.set_defaults(**defaults)
    given, _ = parser.parse_known_args(args)
    if given.model_name_or_path is None:
        parser.set_defaults(**from_scratch)
    if any(issubclass(kind, TrainingArguments) for kind in kinds):
        # Where there is no accelerator to copy to, asking for pinned memory only brings a warning per loader.
        parser.set_defaults(dataloader_pin_memory=torch.accelerator.is_available())
        if not (given.do_train or given.do_eval):
            parser.set_defaults(do_train=True, do_eval=True)
    return parser.parse_args_into_dataclasses(args)
