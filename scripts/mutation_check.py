"""Breaks the engine on purpose, one line at a time, and shows which test of the short suite fails.

    python scripts/mutation_check.py                  # all breaks: some seven minutes on two cores
    python scripts/mutation_check.py wrong-divisor    # only these

`breaks.yaml` next to this script lists the breaks. Each is made in a copy of the tree, in which its tests run until the first
failure. A break without a failing test is printed as NOT CAUGHT, and the exit status is 1. After tests are merged or cut, they
still have to catch all breaks.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path

import yaml
from warm_pytest import WarmPytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hf_zero"
COPIED = (PACKAGE, "tests", "scripts", "configs", "docs", "pyproject.toml", "README.md", "LICENSE")
SECONDS_A_BREAK = 240

# pytest's exit statuses.
PASSED, FAILED = 0, 1


@dataclass(frozen=True, kw_only=True)
class Break:
    """One fault. breaks.yaml explains the fields."""

    name: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""


BREAKS = tuple(
    Break(**fault | {"tests": tuple(fault["tests"])})
    for fault in yaml.safe_load((ROOT / "scripts" / "breaks.yaml").read_text())
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of breaks; all of them without a name")
    chosen = parser.parse_args(argv).names
    unknown = set(chosen) - {each.name for each in BREAKS}
    if unknown:
        parser.error(f"no break is named {', '.join(sorted(unknown))}")
    missed = []
    by_name = {each.name: each for each in BREAKS}
    with BrokenTree() as tree:
        for each in [by_name[name] for name in chosen] or BREAKS:
            began_s = time.monotonic()
            caught_by = tree.run(each)
            print(f"{each.name:42} {time.monotonic() - began_s:4.0f} s  {caught_by or 'NOT CAUGHT'}", flush=True)
            if caught_by is None:
                missed.append(each.name)
    return 1 if missed else 0


class BrokenTree:
    """A copy of the tree, for the time of the `with` block. Breaks are made and undone in it one after the other."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._stack = ExitStack()

    def __enter__(self) -> BrokenTree:
        with ExitStack() as stack:
            self._tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="break-")))
            copy_tree(self._root, self._tree)
            self._warm = stack.enter_context(WarmPytest())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, fault: Break) -> str | None:
        """Returns the first test that fails because of a break, or None."""
        path, text = broken(fault, self._tree)
        whole = path.read_text(encoding="utf-8")
        try:
            self._write(path, text)
            done = self._warm.run(self._tree, self._arguments(fault), time_limit_s=SECONDS_A_BREAK)
        finally:
            self._write(path, whole)
        if done.status is None:
            return f"the time limit of {SECONDS_A_BREAK} s"
        if done.status == PASSED:
            return None
        failed = [line for line in done.said.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if done.status != FAILED or not failed:
            raise RuntimeError(f"{fault.name}: its tests did not run:\n{done.said[-8000:]}")
        return failed[0].split(" - ")[0]

    def _arguments(self, fault: Break) -> list[str]:
        files = [str(path) for name in fault.tests for path in sorted((self._tree / "tests").rglob(name))]
        only = ["-k", fault.only] if fault.only else []
        return ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-m", "not slow", *files, *only]

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Writes a module, and deletes its compiled code: Python would reuse code of the same second and length."""
        path.write_text(text, encoding="utf-8")
        Path(cache_from_source(path)).unlink(missing_ok=True)


def copy_tree(root: Path, tree: Path) -> None:
    """Copies the parts of the repository needed by tests."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, tree / name)


def broken(fault: Break, tree: Path) -> tuple[Path, str]:
    """Returns the file of the break's function, and its content with the break.

    Raises:
        LookupError: there is not exactly one such function, or the text is not exactly once in it.
    """
    found = [
        (path, text.replace(body, body.replace(fault.old, fault.new)))
        for path, text in sources(tree).items()
        for body in functions_named(text, fault.place)
        if body.count(fault.old) == 1
    ]
    if len(found) != 1:
        raise LookupError(
            f"the break {fault.name!r} fits {len(found)} functions {fault.place!r} with {fault.old!r}; give it the name and text "
            "that the engine has now"
        )
    return found[0]


@cache
def sources(tree: Path) -> dict[Path, str]:
    """Returns path → text of the package in a tree, as read at the first call."""
    return {path: path.read_text(encoding="utf-8") for path in sorted((tree / PACKAGE).rglob("*.py"))}


def functions_named(text: str, place: str) -> list[str]:
    """Returns the source of each function with this qualified name in a file."""
    *owners, name = place.split(".")
    if f"def {name}(" not in text:
        return []
    nodes = [ast.parse(text)]
    for owner in owners:
        nodes = [
            child for node in nodes for child in node.body if isinstance(child, ast.ClassDef) and child.name == owner
        ]
    bodies = [
        child for node in nodes for child in node.body if isinstance(child, ast.FunctionDef) and child.name == name
    ]
    lines = text.splitlines(keepends=True)
    return ["".join(lines[body.lineno - 1 : body.end_lineno]) for body in bodies]


if __name__ == "__main__":
    raise SystemExit(main())
