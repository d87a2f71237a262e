"""Runs a page of the documentation as its reader would: example after example, line after line, in one folder.

A Python example is saved under the name in its first line. A line of a bash block is run unchanged, unless its comment marks it
as impossible on this machine (`# 8 GPUs`) or as slow. Slow lines, and some others, only run in tests marked slow.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hub_server import CLIENT_SETTINGS, TOKEN, HubServer, talk_to
from huggingface_hub import constants
from launching import ROOT, run_forked
from typer.testing import CliRunner

from hf_zero.cli.app import app

SECONDS = 120
"""Time limit of a fast line, on a machine with other work."""

MINUTES = 20
"""Time limit of a slow line."""

LONG_RUN_ONLY = (
    "hf-zero plan outputs/shaped --nodes 256 ",
    "hf-zero plan outputs/shaped --gpus 8 --gpu-memory 24GB ",
    "ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 flag.py --output_dir outputs/int8 ",
    "ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 long.py",
    "ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 4 split.py",
    "hf-zero consolidate outputs/split ",
)
"""Beginnings of lines left out in the short run: no other line depends on them, and other tests cover the same."""

RUNS_THE_TESTS = "bash scripts/test.sh"
INSTALLS = ("git clone ", "pip install ")
MEASURES = "bash scripts/bench/all.sh --quick"
RECIPE = re.compile(r"hf-zero (run --zero \d|plan) scripts/recipes/")
"""Lines of the recipes' pages that this machine can run."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    language: str
    text: str

    @property
    def name(self) -> str:
        """Names the file for a Python example."""
        return self.text.splitlines()[0].removeprefix("# ")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A command of a bash block."""

    command: str
    comment: str = ""

    @property
    def takes_minutes(self) -> bool:
        return "minutes" in self.comment

    @property
    def is_slow(self) -> bool:
        return self.takes_minutes or any(self.command.startswith(words) for words in LONG_RUN_ONLY)

    @property
    def hindrance(self) -> str | None:
        """Returns the reason not to run the line here; None without one."""
        if self.command == RUNS_THE_TESTS:
            return "would run this very test"
        if self.command.startswith(INSTALLS):
            return "fetches or installs; a test of the wheel installs the package"
        if self.command == MEASURES:
            return "is run by test_bench.py, which looks at its figures"
        if RECIPE.match(self.command) and not self.comment:
            return "is run by test_recipes.py, which compares it with DDP, or with the page"
        gpus = re.match(r"(\d+) GPUs?\b", self.comment)
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus is not None and there < int(gpus[1]):
            return f"needs {gpus[0]}, and there are {there}"
        return None


class Outcome(NamedTuple):
    status: int
    said: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A line which starts a Python script, on one rank or on several of this machine."""

    launcher: str
    settings: dict[str, str]
    processes: int
    script: str
    arguments: tuple[str, ...]

    @staticmethod
    def of(command: str) -> "Launch | None":
        """Parses a command; None if the command starts no script."""
        found = re.fullmatch(
            r"(?P<settings>(?:[A-Z_]+=\S+ )*)"
            r"(?P<launcher>python|hf-zero run|torchrun --standalone --nproc_per_node (?P<ranks>\d)"
            r"|accelerate launch (?:--config_file \S+/cpu2\.yaml|--multi_gpu --num_processes 2))"
            r" (?P<script>\S+\.py|-m hf_zero\.run|(?=--zero ))(?P<arguments>.*)",
            command,
        )
        if found is None or "--json" in command or any(sign in command for sign in "|&;<>$"):
            return None
        launcher = found["launcher"].split()[0]
        settings = dict(setting.split("=", 1) for setting in found["settings"].split())
        return Launch(
            launcher=launcher,
            # The command itself sets this variable for ranks on the CPU.
            settings=settings | ({"ACCELERATE_USE_CPU": "true"} if launcher == "hf-zero" else {}),
            processes=1 if launcher == "python" else int(found["ranks"] or 2),
            script=found["script"] if found["script"].endswith(".py") else "hf_zero.run",
            arguments=tuple(shlex.split(found["arguments"])),
        )

    def forked(self, folder: Path, inherited: dict[str, str]) -> Outcome:
        where = {"environment": inherited | self.settings, "processes": self.processes, "folder": folder}
        script = Path(self.script) if self.script.endswith(".py") else self.script
        done = run_forked(script, self.arguments, **where)
        return Outcome(status=done.returncode, said=done.stdout + done.stderr)


def blocks_of(text: str, language: str = r"\w+") -> list[Block]:
    found = re.findall(rf"^```({language})\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(language=name, text=body) for name, body in found]


def steps_of(text: str) -> Iterator[Block | Line]:
    """Yields a reader's actions in order: an example to save, or a line to type."""
    for block in blocks_of(text):
        if block.language == "python":
            yield block
        elif block.language == "bash":
            for line in block.text.splitlines():
                command, _, comment = line.partition(" # ")
                yield Line(command=command.strip(), comment=comment.strip())


README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "recipes").glob("*.md")),
    ]
}
"""Pages for users. All of their code is run."""

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))

EXAMPLES = {name: blocks_of(text, "python") for name, text in PAGES.items()}
SAVED_FIRST = (*EXAMPLES["README.md"], *EXAMPLES["docs/ways-in.md"])
"""Examples launched by lines of other pages."""

LINES = {name: [step for step in steps_of(text) if isinstance(step, Line)] for name, text in PAGES.items()}


class Folder:
    """A reader's folder: the parts of a fresh copy of the repository named by lines, and the files made by typed lines.

    For each of `launchers`, the first of its lines really uses the launcher. All other scripts run in forked ranks, because a
    launcher and its ranks need a quarter of a minute of CPU time to import torch.

    Args:
        hub: replaces the Hub for `hf-zero push`.
        examples: of any page, for the lines of all pages.
        launchers: "accelerate", "torchrun" or "python".
    """

    def __init__(self, path: Path, hub: HubServer, examples: Iterable[Block], launchers: Iterable[str] = ()):
        self.path = path
        self.hub = hub
        self.outcomes: dict[Line, Outcome] = {}
        self.launchers_left = set(launchers)
        shutil.copy(ROOT / "pyproject.toml", path)
        # The simulated clock of `offload.py --timeline` is in the tests' folder.
        for name in ("configs", "scripts", "tests/support"):
            # Skip compiled modules: another process may be renaming a listed file before it is copied.
            shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
        for block in examples:
            self.save(block)

    def save(self, block: Block) -> None:
        """Saves an example."""
        (self.path / block.name).write_text(block.text, encoding="utf-8")


class Walk:
    """One page's lines in order. Each runs once in a folder, after the page's earlier fast lines."""

    def __init__(self, text: str, folder: Folder):
        self.folder = folder
        self.steps = list(steps_of(text))
        self._at = 0

    def run(self, line: Line) -> Outcome:
        """Returns the outcome of a line, run in a folder after all earlier lines."""
        last = self.steps.index(line)
        for step in self.steps[self._at : last]:
            self._do(step)
        self._at = max(self._at, last)
        if line not in self.folder.outcomes:
            self.folder.outcomes[line] = self._typed(line)
        return self.folder.outcomes[line]

    def _do(self, step: Block | Line) -> None:
        if isinstance(step, Block):
            self.folder.save(step)
        elif not (step.hindrance or step.is_slow or step in self.folder.outcomes):
            self.folder.outcomes[step] = self._typed(step)

    def _typed(self, line: Line) -> Outcome:
        launch = Launch.of(line.command)
        if launch is None and line.command.startswith("hf-zero "):
            return self._in_this_process(line)
        # Leave out caches and settings of the user who runs the tests.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "HF_ZERO_"))}
        # A benchmark forks its own ranks, which a forked process may not do.
        if launch is not None and not line.is_slow:
            if launch.launcher not in self.folder.launchers_left:
                return launch.forked(self.folder.path, inherited)
            self.folder.launchers_left.remove(launch.launcher)
        caches, venv = str(self.folder.path / "caches"), str(self._environment())
        own = {"HF_HOME": caches, "HF_HUB_OFFLINE": "1", "HF_ZERO_VENV": venv}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        limit_s = 60 * MINUTES if line.is_slow else SECONDS
        where = {"cwd": self.folder.path, "env": inherited | own, "timeout": limit_s}
        done = subprocess.run(["bash", "-c", line.command], **where, **streams)
        return Outcome(status=done.returncode, said=done.stdout)

    def _in_this_process(self, line: Line) -> Outcome:
        """Runs the command hf-zero without a new interpreter, which would take seconds to import torch."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder.path)
            patch.setenv("HF_TOKEN", TOKEN)
            for name in CLIENT_SETTINGS:
                patch.setattr(constants, name, getattr(constants, name))
            talk_to(self.folder.hub.url)
            result = CliRunner().invoke(app, shlex.split(line.command)[1:])
        return Outcome(status=result.exit_code, said=result.output)

    def _environment(self) -> Path:
        """Makes an environment with everything installed for `scripts/venv.sh`: this one."""
        venv = self.folder.path / ".venv"
        if not venv.exists():
            (venv / "bin").mkdir(parents=True)
            (venv / "bin" / "python").symlink_to(sys.executable)
            (venv / "bin" / "activate").write_text("", encoding="utf-8")
            (venv / ".hf_zero_installed").touch()
        return venv
