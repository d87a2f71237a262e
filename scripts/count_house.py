"""Counts how hard the code is to read, next to the last count, the goal, and FSDP2.

    python scripts/count_house.py
    python scripts/count_house.py --files 2      # the files of a step at stage 2, and the functions called there

The rows of a step count the functions called by one rank of two in a steady-state step, and their files.
`tests/repository/test_floors.py` fails if a row of `LAST` grows by more than `SLACK`. Numbers of files and lines are not bounded:
an idea may move into its own file.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "bench")]

from ranks import run_ranks  # noqa: E402

SLACK = 1.03
PACKAGE = ROOT / "hf_zero"
ENGINE = ("engine", "stage3", "step")
FSDP = Path(inspect.getfile(fsdp)).parent

AIMS = {
    "lines a step calls, stage 2": None,
    "lines of the files it passes, stage 2": 6_000,
    "share of the two, stage 2 (%)": 30,
    "lines a step calls, stage 3": None,
    "lines of the files it passes, stage 3": 7_500,
    "share of the two, stage 3 (%)": 30,
    "files with four or more titles": 0,
    "lines of these files": 0,
    "Callable parameters of the engine": 20,
    "attribute chains of four or more of the engine": 15,
    "first lines of docstrings with a pronoun (%)": 12,
    "comments with a pronoun (%)": 12,
    "core: lines": 33_000,
    "extras: lines": None,
    "levels of folders": 2,
    "interfaces (ABC, Protocol)": 16,
    "settings": 40,
    "private names of others": 70,
}
"""Row → its upper limit, or for a share its lower limit; None for rows that are only shown."""

LAST = {
    "files with four or more titles": 0,
    "Callable parameters of the engine": 20,
    "attribute chains of four or more of the engine": 9,
    "first lines of docstrings with a pronoun (%)": 6,
    "comments with a pronoun (%)": 10,
    "levels of folders": 2,
    "interfaces (ABC, Protocol)": 11,
    "settings": 41,
    "private names of others": 102,
}
"""The last count of each bounded row. Lower a number after a row has fallen; raise one only with a reason."""

TITLE = re.compile(r"^# ---- .+ ----$", re.MULTILINE)
PRONOUN = re.compile(r"\b(it|they|that|those|what|of which)\b", re.IGNORECASE)


def count_files() -> dict[str, int]:
    """Counts the rows based on the files' text."""
    from hf_zero.config import ZeroConfig
    from hf_zero.extras import EXTRAS
    from hf_zero.integrations.seams import SEAMS

    sources = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    core = [path for name, path in sources.items() if name.split("/")[0] not in EXTRAS]
    titled = [path for path in sources.values() if len(TITLE.findall(path.read_text())) >= 4]
    return {
        "files with four or more titles": len(titled),
        "lines of these files": lines_of(titled),
        **count_flow([path for name, path in sources.items() if name.split("/")[0] in ENGINE]),
        **count_pronouns(list(sources.values())),
        "core: lines": lines_of(core),
        "extras: lines": lines_of(list(sources.values())) - lines_of(core),
        "levels of folders": 1 + max(name.count("/") for name in sources),
        "interfaces (ABC, Protocol)": interfaces_of(list(sources.values())),
        "settings": _settings_of(ZeroConfig()),
        "private names of others": sum(len(seam.names) for seam in SEAMS),
    }


def count_flow(paths: list[Path]) -> dict[str, int]:
    """Counts code that go-to-definition cannot follow: parameters and fields of type Callable, and chains such as `a.b.c.d.e`."""
    trees = [ast.parse(path.read_text()) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    annotations = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation]
    inner: set[ast.AST] = set()
    chains = 0
    for node in nodes:
        names = _names_of(node)
        chains += node not in inner and len(names) > 4
        inner.update(names)
    return {
        "Callable parameters of the engine": sum("Callable" in ast.unparse(each) for each in annotations),
        "attribute chains of four or more of the engine": chains,
    }


def _names_of(node: ast.AST) -> list[ast.AST]:
    """Returns the links of a chain of attributes ending in a name, from the outermost; empty for any other expression."""
    links: list[ast.AST] = []
    while isinstance(node, ast.Attribute):
        links.append(node)
        node = node.value
    return [*links, node] if links and isinstance(node, ast.Name) else []


def count_pronouns(paths: list[Path]) -> dict[str, int]:
    """Returns the shares of docstrings' first lines and of comments with a pronoun."""
    first_lines, comments = [], []
    for path in paths:
        text = path.read_text()
        comments += [line.strip() for line in text.splitlines() if re.match(r"\s*# (?!----|type:|noqa)", line)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                said = ast.get_docstring(node)
                first_lines += [said.splitlines()[0]] if said else []
    return {
        "first lines of docstrings with a pronoun (%)": _share(first_lines),
        "comments with a pronoun (%)": _share(comments),
    }


def _share(lines: list[str]) -> int:
    return round(100 * sum(bool(PRONOUN.search(line)) for line in lines) / max(1, len(lines)))


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def interfaces_of(paths: list[Path]) -> int:
    """Counts classes with ABC or Protocol among their direct bases."""
    classes = [
        node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    bases = re.compile(r"(abc\.|typing\.)?(ABC|Protocol)\b")
    return sum(any(bases.match(ast.unparse(base)) for base in each.bases) for each in classes)


def _settings_of(config: Any) -> int:
    values = [getattr(config, field.name) for field in fields(config)]
    return sum(_settings_of(value) if is_dataclass(value) else 1 for value in values)


class Walk:
    """Records the functions below a folder called between `begin` and `end`."""

    def __init__(self, folder: Path):
        self._folder = f"{folder}/"
        self._found: set[tuple[str, str]] = set()

    def begin(self) -> None:
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        # Bodies of modules and classes are not optimized, and run once.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(self._folder):
            self._found.add((code.co_filename, getattr(code, "co_qualname", code.co_name)))

    def lines(self, folder: Path) -> tuple[int, int]:
        """Returns the number of lines of the called functions, and of their files."""
        called = total = 0
        for file, names in self.functions().items():
            path = folder / file
            lines: set[int] = set()
            for name, first, last in _functions_in(ast.parse(path.read_text())):
                if name in names:
                    lines.update(range(first, last + 1))
            called += len(lines)
            total += lines_of([path])
        return called, total

    def functions(self) -> dict[str, list[str]]:
        """Returns the called functions by file."""
        found: dict[str, list[str]] = {}
        for file, name in sorted(self._found):
            found.setdefault(file.removeprefix(self._folder), []).append(name)
        return found


def _functions_in(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Yields (qualified name, first line, last line) for each function below a node."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function:
            yield (
                prefix + child.name,
                min([child.lineno, *(each.lineno for each in child.decorator_list)]),
                child.end_lineno,
            )
        if is_function or isinstance(child, ast.ClassDef):
            yield from _functions_in(child, f"{prefix}{child.name}.{'<locals>.' if is_function else ''}")
        else:
            yield from _functions_in(child, prefix)


class Layers(nn.Module):
    """Six layers and a head, `[rows, 64]` → `[rows, 10]`."""

    _no_split_modules = ("Sequential",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(6)))
        self.head = nn.Linear(64, 10)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(values))


def walk_a_step(rank: int, world_size: int, engine: str) -> Walk:
    """Records a step after four others.

    Args:
        engine: a stage, or `fsdp2`.
    """
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if engine == "fsdp2":
        for layer in model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        clip: Any = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    else:
        from hf_zero import ZeroEngine

        # Make each layer a unit, as with large layers.
        settings = {"stage": 3, "unit_bytes": 0} if engine == "3" else int(engine)
        clip = ZeroEngine(model, [optimizer], settings).clip_grad_norm_

    def step() -> None:
        model(torch.randn(8, 64)).pow(2).mean().backward()
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    walk = Walk(FSDP if engine == "fsdp2" else PACKAGE)
    walk.begin()
    step()
    walk.end()
    return walk


def walk_of(engine: str) -> Walk:
    """Returns rank 0's record of a step on two ranks."""
    return run_ranks(walk_a_step, world_size=2, time_limit_s=60, keyword_arguments={"engine": engine})[0]


def count_step(engine: str, folder: Path, stage: str) -> dict[str, int]:
    """Returns the rows of a step, named by `stage`."""
    called, total = walk_of(engine).lines(folder)
    return {
        f"lines a step calls, stage {stage}": called,
        f"lines of the files it passes, stage {stage}": total,
        f"share of the two, stage {stage} (%)": round(100 * called / total),
    }


def count_fsdp2() -> dict[str, int]:
    """Returns the rows which also exist for FSDP2."""
    paths = sorted(FSDP.joinpath("_fully_shard").rglob("*.py"))
    return {
        **count_step("fsdp2", FSDP, "3"),
        **count_pronouns(paths),
        "files with four or more titles": 0,
        "Callable parameters of the engine": count_flow(paths)["Callable parameters of the engine"],
        "attribute chains of four or more of the engine": count_flow(paths)[
            "attribute chains of four or more of the engine"
        ],
        "core: lines": lines_of(paths),
        "levels of folders": 2,
        "interfaces (ABC, Protocol)": interfaces_of(paths),
    }


def show_files(stage: str) -> None:
    """Prints the files of a step with the functions called there."""
    walk = walk_of(stage)
    print("a step at stage {}: {} of {} lines".format(stage, *walk.lines(PACKAGE)))
    for file, functions in walk.functions().items():
        print(f"  {file}: {', '.join(functions)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", metavar="STAGE", choices=["0", "1", "2", "3"])
    stage = parser.parse_args().files
    if stage is not None:
        show_files(stage)
        return
    counts = count_step("2", PACKAGE, "2") | count_step("3", PACKAGE, "3") | count_files()
    fsdp2 = count_fsdp2()
    print("| row | last | now | aim | FSDP2 |\n|---|---|---|---|---|")
    for row, aim in AIMS.items():
        cells = (LAST.get(row), counts[row], aim, fsdp2.get(row))
        print(f"| {row} | {' | '.join('-' if cell is None else f'{cell:,}' for cell in cells)} |")


if __name__ == "__main__":
    main()
