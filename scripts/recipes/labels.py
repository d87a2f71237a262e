"""Class labels as a dataset writes them → numbers with names."""

from datasets import ClassLabel, Dataset, DatasetDict

from .errors import RecipeError


def encode_labels(splits: DatasetDict, column: str) -> DatasetDict:
    """Make the column `label` a `ClassLabel` whose names are those of the training data, in order."""
    if not isinstance(splits["train"].features[column], ClassLabel):
        names = sorted({str(label) for label in splits["train"][column]}, key=_number_then_name)
        _check_known(splits["validation"], column, names)
        ids = {name: number for number, name in enumerate(names)}
        splits = splits.map(lambda row: {"label": ids[str(row[column])]}, desc="Numbering the labels")
        splits = splits.cast_column("label", ClassLabel(names=names))
    elif column != "label":
        splits = splits.rename_column(column, "label")
    if splits["train"].features["label"].num_classes < 2:
        raise RecipeError(
            f"Every row of the training data has the same label ({splits['train'].features['label'].names[0]!r} in the "
            f"column {column!r}), so there is nothing to tell apart. Give data with two classes or more, or name another "
            "column with --label_column."
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
