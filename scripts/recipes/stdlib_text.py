"""Text that every machine with Python has: the standard library, as a classification and a language-modelling set.

Nothing is downloaded, and two machines with the same Python see the same rows in the same order.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""Well documented, of one subject each, and part of every Python since 3.10."""

SHORTEST_DOCSTRING = 20
ONE_IN = 8
"""Every eighth text, by hash, is for validation."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def docstrings() -> DatasetDict:
    """Docstrings (`text`) of functions and classes, labelled by the package they come from (`label`)."""
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
    """Shuffle and split by a hash of the text, which is the same on every rank, machine and run."""
    digest = {row["text"]: hashlib.sha256(row["text"].encode()).digest() for row in rows}
    rows = sorted(rows, key=lambda row: digest[row["text"]])
    for_validation = [digest[row["text"]][-1] % ONE_IN == 0 for row in rows]
    return DatasetDict(
        train=Dataset.from_list([row for row, held_out in zip(rows, for_validation) if not held_out], features),
        validation=Dataset.from_list([row for row, held_out in zip(rows, for_validation) if held_out], features),
    )
