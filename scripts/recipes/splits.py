"""Training and validation splits of whatever the data arguments name."""

from datasets import Dataset, DatasetDict, load_dataset

from .arguments import DataArguments
from .errors import RecipeError
from .files import load_files

VALIDATION_NAMES = ("validation", "validation_matched", "dev")
_SPLIT_SEED = 0


def load_splits(data: DataArguments, *, plain_text: bool = False) -> DatasetDict:
    """`train` and `validation`, from files or the hub. What has no validation split has a part of `train` held out."""
    if data.train_file:
        found = load_files(data.train_file, data.validation_file, plain_text=plain_text)
    else:
        found = load_dataset(data.dataset_name, data.dataset_config_name)
    if "train" not in found:
        raise RecipeError(
            f"The dataset {data.dataset_name} has no split `train`; it has: {', '.join(found)}. Choose another dataset "
            "or configuration (--dataset_config_name)."
        )
    validation = next((name for name in VALIDATION_NAMES if name in found), None)
    if validation is not None:
        return DatasetDict(train=found["train"], validation=found[validation])
    if len(found["train"]) < 2:
        raise RecipeError(
            "The training data has a single row, of which nothing can be held out for validation. Give more rows, or a "
            "--validation_file."
        )
    parts = found["train"].train_test_split(data.validation_split_percentage / 100, seed=_SPLIT_SEED)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def at_most(rows: Dataset, samples: int | None, seed: int) -> Dataset:
    """So many rows drawn at random, or all where there are no more: data files are often sorted by label."""
    if samples is None or samples >= len(rows):
        return rows
    return rows.shuffle(seed=seed).select(range(samples))
