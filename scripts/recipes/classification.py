"""Data of a text classification task, whatever it comes from, in one shape."""

from dataclasses import dataclass, field

from datasets import ClassLabel, DatasetDict
from transformers import PreTrainedTokenizerBase

from .arguments import DataArguments
from .columns import LABEL_NAMES, TEXT_NAMES, find_columns
from .labels import encode_labels
from .splits import at_most, load_splits
from .stdlib_text import docstrings


@dataclass
class ClassificationArguments(DataArguments):
    """Which labelled text is learned. Without any of these: docstrings, and the package each comes from."""

    text_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of the text, or two columns of a pair: `premise,hypothesis`. Unset: found by its name."
        },
    )
    label_column: str | None = field(default=None, metadata={"help": "Column of the label. Unset: found by its name."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut to so many tokens."})


def load_classification(data: ClassificationArguments, seed: int) -> DatasetDict:
    """`train` and `validation`, with a column `text`, perhaps a `text_pair`, and a `label` that has class names."""
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
    """The two maps between numbers and class names that a model's configuration keeps."""
    label: ClassLabel = splits["train"].features["label"]
    return {"id2label": dict(enumerate(label.names)), "label2id": {name: i for i, name in enumerate(label.names)}}


def tokenize(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> DatasetDict:
    """Text columns → model inputs; the label moves to `labels`, where models look for it."""
    texts = [name for name in ("text", "text_pair") if name in splits["train"].column_names]

    def encode(rows):
        inputs = tokenizer(*(rows[name] for name in texts), truncation=True, max_length=max_seq_length)
        return {**inputs, "labels": rows["label"]}

    return splits.map(encode, batched=True, remove_columns=splits["train"].column_names, desc="Tokenizing")
