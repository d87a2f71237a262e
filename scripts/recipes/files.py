"""Local files of training data → datasets."""

import csv
from itertools import islice
from pathlib import Path

from datasets import DatasetDict, load_dataset

from .errors import RecipeError

TABLES = {".tsv": "\t", ".csv": ","}
JSON = (".json", ".jsonl")
HEADERLESS_COLUMNS = ["sentence", "label"]
_LINES_LOOKED_AT = 1000


def load_files(train_file: str, validation_file: str | None, *, plain_text: bool = False) -> DatasetDict:
    """The rows of one or two files of one kind, as `train` and, where given, `validation`.

    Args:
        plain_text: also take `.txt`, read line by line into a column `text`.
    """
    files = {"train": Path(train_file)}
    if validation_file is not None:
        files["validation"] = Path(validation_file)
    for path in files.values():
        _check(path, [*TABLES, *JSON, *([".txt"] if plain_text else [])])
    splits = DatasetDict({split: _load(path) for split, path in files.items()})
    for split, rows in splits.items():
        if len(rows) == 0:
            raise RecipeError(
                f"{files[split]} has no rows below its header line. Give a file with at least one row of data."
            )
    return splits


def _check(path: Path, extensions: list[str]) -> None:
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*") if p.suffix in extensions) if path.parent.is_dir() else []
        found = f"that folder holds {', '.join(near[:10])}" if near else "there is no such data in that folder"
        raise RecipeError(
            f"There is no file {str(path)!r}; {found}. Check the path, which is relative to {Path.cwd()}."
        )
    if path.suffix.lower() not in extensions:
        raise RecipeError(
            f"{path} ends in {path.suffix!r}, which tells nothing about its format; allowed: {', '.join(extensions)}. "
            "Rename the file, or convert it to one of these."
        )
    with path.open("rb") as file:
        if not file.read(4096).strip():
            raise RecipeError(
                f"{path} is empty ({path.stat().st_size} bytes). Give a file with at least one row of data."
            )


def _load(path: Path):
    extension, files = path.suffix.lower(), {"train": str(path)}
    if extension == ".txt":
        return load_dataset("text", data_files=files, keep_linebreaks=True, split="train")
    if extension in JSON:
        return load_dataset("json", data_files=files, split="train")
    # Words such as "null" and "NA" are text here, and a quotation mark in a tsv is just a character.
    quoting = csv.QUOTE_NONE if extension == ".tsv" else csv.QUOTE_MINIMAL
    names = None if _has_header(path, TABLES[extension], quoting) else HEADERLESS_COLUMNS
    return load_dataset(
        "csv",
        data_files=files,
        split="train",
        sep=TABLES[extension],
        quoting=quoting,
        column_names=names,
        keep_default_na=False,
    )


def _has_header(path: Path, separator: str, quoting: int) -> bool:
    """Whether the first line names the columns.

    A table of sentence and label without a header starts with a label, which comes again further down; the name of a
    column does not. Tables of any other width need a header.
    """
    with path.open(encoding="utf-8", newline="") as file:
        first, *rows = islice(csv.reader(file, delimiter=separator, quoting=quoting), _LINES_LOOKED_AT)
    if len(first) == len(HEADERLESS_COLUMNS) and first[-1] in {row[-1] for row in rows if row}:
        return False
    if not rows:
        raise RecipeError(f"{path} has a header line and no rows. Give a file with at least one row of data below it.")
    return True
