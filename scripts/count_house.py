"""Counts what a reader of hf_zero has before them, beside what it was counted as last, the aim, and FSDP2.

    python scripts/count_house.py
    python scripts/count_house.py --files 2      # which files a step at stage 2 passes, and which functions of each

The rows of a step, a layer and a checkpoint count the files (and classes) whose functions two ranks call there, in the steady
state. `tests/repository/test_floors.py` fails if a row of `LAST` grows by more than `SLACK`. Numbers of files and lines are shown
and not bounded: an idea may move into its own file.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import sys
import tempfile
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

AIMS = {
    "files of a step, stage 2": 25,
    "classes of a step, stage 2": 35,
    "files of a layer's forward, stage 3": 10,
    "classes of a layer's forward, stage 3": 14,
    "files of a save by Trainer": 30,
    "files of a resume by Trainer": 60,
    "core: lines": 26_000,
    "core: files": 95,
    "core: lines to a line of comment": 20,
    "extras: lines": 10_500,
    "extras: files": 50,
    "levels of folders": 2,
    "interfaces (ABC, Protocol)": 16,
    "settings": 40,
    "private names of others": 70,
    "scripts: lines": 5_000,
    "scripts: files": 40,
    "tests: lines": 29_000,
    "tests: files": 130,
}

LAST = {
    "core: lines to a line of comment": 18,
    "levels of folders": 2,
    "interfaces (ABC, Protocol)": 10,
    "settings": 40,
    "private names of others": 85,
}
"""What each row was when it was counted last. Lower a number when a row has fallen; raise one only with a reason."""


def count_files() -> dict[str, int]:
    """The rows that are read in the files."""
    from hf_zero.config import ZeroConfig
    from hf_zero.extras import EXTRAS
    from hf_zero.integrations.seams import SEAMS

    sources = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    extras = [path for name, path in sources.items() if name.split("/")[0] in EXTRAS]
    core = [path for name, path in sources.items() if name.split("/")[0] not in EXTRAS]
    scripts, tests = (sorted((ROOT / folder).rglob("*.py")) for folder in ("scripts", "tests"))
    counts = {"levels of folders": 1 + max(name.count("/") for name in sources)}
    for name, paths in (("core", core), ("extras", extras), ("scripts", scripts), ("tests", tests)):
        counts |= {f"{name}: lines": lines_of(paths), f"{name}: files": len(paths)}
    return counts | {
        "core: lines to a line of comment": lines_to_a_comment(core),
        "interfaces (ABC, Protocol)": interfaces_of(list(sources.values())),
        "settings": _settings_of(ZeroConfig()),
        "private names of others": sum(len(seam.names) for seam in SEAMS),
    }


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def lines_to_a_comment(paths: list[Path]) -> int:
    """Lines for each line that is a comment and no docstring, rounded up."""
    comments = sum(line.lstrip().startswith("#") for path in paths for line in path.read_text().splitlines())
    return -(-lines_of(paths) // comments)


def interfaces_of(paths: list[Path]) -> int:
    """Classes whose own bases are ABC or Protocol."""
    classes = [
        node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    bases = re.compile(r"(abc\.|typing\.)?(ABC|Protocol)\b")
    return sum(any(bases.match(ast.unparse(base)) for base in each.bases) for each in classes)


def _settings_of(config: Any) -> int:
    values = [getattr(config, field.name) for field in fields(config)]
    return sum(_settings_of(value) if is_dataclass(value) else 1 for value in values)


class Walk:
    """Which functions below a folder are called while `begin` has been called, and `end` not yet."""

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

    def counts(self) -> tuple[int, int]:
        """Files and classes; before Python 3.11, where code does not name its class, no classes."""
        methods = [(file, name) for file, name in self._found if "." in name and "<locals>" not in name]
        return len({file for file, _ in self._found}), len({(file, name.rsplit(".", 1)[0]) for file, name in methods})

    def functions(self) -> dict[str, list[str]]:
        """By file."""
        found: dict[str, list[str]] = {}
        for file, name in sorted(self._found):
            found.setdefault(file.removeprefix(self._folder), []).append(name)
        return found


class Layers(nn.Module):
    """Six layers and a head, `[rows, 64]` → `[rows, 10]`; `walk`, where it is set, goes through the fourth layer's forward."""

    _no_split_modules = ("Sequential",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(6))
        self.head = nn.Linear(64, 10)
        self.walk: Walk | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.walk is not None and number == 3:
                self.walk.begin()
            values = layer(values)
            if self.walk is not None:
                self.walk.end()
        return self.head(values)


def walk_a_step(rank: int, world_size: int, engine: str) -> tuple[Walk, Walk]:
    """Walks through a steady step, and through a layer's forward in it.

    Args:
        engine: a stage, or `fsdp2`.
    """
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if engine == "fsdp2":
        folder = Path(inspect.getfile(fsdp)).parent
        for layer in model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        clip: Any = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    else:
        from hf_zero import ZeroEngine

        folder = PACKAGE
        # Each layer a unit of its own, as large ones are.
        settings = {"stage": 3, "unit_bytes": 0} if engine == "3" else int(engine)
        clip = ZeroEngine(model, [optimizer], settings).clip_grad_norm_

    def step() -> None:
        model(torch.randn(8, 64)).pow(2).mean().backward()
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    whole = Walk(folder)
    whole.begin()
    step()
    whole.end()
    model.walk = Walk(folder)
    step()
    return whole, model.walk


def walk_trainer(rank: int, world_size: int, output_dir: str) -> tuple[int, int]:
    """Files of a save by Trainer at stage 2, and of a resume from it, up to the first step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hf_zero import ZeroCallback

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true")
    save, resume = Walk(PACKAGE), Walk(PACKAGE)

    class Walks(TrainerCallback):
        def on_train_begin(self, *_arguments: Any, **_named: Any) -> None:
            resume.end()

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_named: Any) -> None:
            if state.global_step == 2:
                save.begin()

        def on_save(self, *_arguments: Any, **_named: Any) -> None:
            save.end()

    for steps, start in ((2, None), (3, str(Path(output_dir, "checkpoint-2")))):
        arguments = TrainingArguments(
            output_dir, max_steps=steps, save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=100
        )
        generator = torch.Generator().manual_seed(0)
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(100, (64, 8), generator=generator)]
        callbacks = [ZeroCallback(2), Walks()]
        trainer = Trainer(gpt2(), arguments, train_dataset=rows, callbacks=callbacks)
        if start is not None:
            resume.begin()
        trainer.train(resume_from_checkpoint=start)
    return save.counts()[0], resume.counts()[0]


def gpt2() -> nn.Module:
    """A GPT-2 of two layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=16))


def count_walks() -> dict[str, int]:
    """The rows of two ranks that train, save and resume."""
    step = run_ranks(walk_a_step, world_size=2, time_limit_s=60, keyword_arguments={"engine": "2"})[0][0].counts()
    layer = run_ranks(walk_a_step, world_size=2, time_limit_s=60, keyword_arguments={"engine": "3"})[0][1].counts()
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(walk_trainer, world_size=2, time_limit_s=120, keyword_arguments={"output_dir": folder})[0]
    return {
        "files of a step, stage 2": step[0],
        "classes of a step, stage 2": step[1],
        "files of a layer's forward, stage 3": layer[0],
        "classes of a layer's forward, stage 3": layer[1],
        "files of a save by Trainer": saved[0],
        "files of a resume by Trainer": saved[1],
    }


def count_fsdp2() -> dict[str, int]:
    """The rows that FSDP2 has, too."""
    paths = sorted(Path(inspect.getfile(fsdp)).parent.joinpath("_fully_shard").rglob("*.py"))
    walked = run_ranks(walk_a_step, world_size=2, time_limit_s=60, keyword_arguments={"engine": "fsdp2"})[0]
    return {
        **dict(zip(AIMS, (*walked[0].counts(), *walked[1].counts()))),
        "core: lines": lines_of(paths),
        "core: files": len(paths),
        "core: lines to a line of comment": lines_to_a_comment(paths),
        "levels of folders": 2,
        "interfaces (ABC, Protocol)": interfaces_of(paths),
    }


def show_files(stage: str) -> None:
    """Prints the files of a step, and of a layer's forward in it, with the functions that are called there."""
    for title, walk in zip(
        ("a step", "of it, a layer's forward"),
        run_ranks(walk_a_step, world_size=2, time_limit_s=60, keyword_arguments={"engine": stage})[0],
        strict=True,
    ):
        files, classes = walk.counts()
        if files:
            print(f"{title} at stage {stage}: {files} files, {classes} classes")
        for file, functions in walk.functions().items():
            print(f"  {file}: {', '.join(functions)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", metavar="STAGE", choices=["0", "1", "2", "3"])
    stage = parser.parse_args().files
    if stage is not None:
        show_files(stage)
        return
    counts = count_walks() | count_files()
    fsdp2 = count_fsdp2()
    print("| row | last | now | aim | FSDP2 |\n|---|---|---|---|---|")
    for row, aim in AIMS.items():
        cells = (LAST.get(row, "-"), counts[row], aim, fsdp2.get(row, "-"))
        print(f"| {row} | {' | '.join(f'{cell:,}' if isinstance(cell, int) else cell for cell in cells)} |")


if __name__ == "__main__":
    main()
