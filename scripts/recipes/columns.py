"""Which column of a dataset holds what."""

from datasets import DatasetDict

from .errors import RecipeError

TEXT_NAMES = ("text", "sentence", "content")
LABEL_NAMES = ("label", "labels")


def find_columns(splits: DatasetDict, option: str, asked: str | None, usual: tuple[str, ...]) -> list[str]:
    """The asked-for columns (several separated by commas), or the first of the usual names; each is in every split."""
    for split, rows in splits.items():
        columns = ", ".join(rows.column_names)
        if asked is None:
            asked = next((name for name in usual if name in rows.column_names), None)
        if asked is None:
            raise RecipeError(
                f"The {split} data has no column named {' or '.join(usual)}; it has: {columns}. Name the one to use with "
                f"{option}."
            )
        for name in asked.split(","):
            if name not in rows.column_names:
                raise RecipeError(
                    f"The {split} data has no column {name!r}; it has: {columns}. Name one of these with {option}. (A "
                    "two-column file without a header line has the columns sentence and label.)"
                )
    return asked.split(",")
