"""The documents, held to what they say: examples run, paths exist, tables agree with the code."""

import dataclasses
import inspect
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from launching import ROOT
from test_floors import FLOOR

import hf_zero
from hf_zero import ZeroConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
SECONDS = 60
ENGINE_NAMES = {
    "DDP": "ddp",
    "DDP + ZeroRedundancyOptimizer": "zero_optimizer",
    "FSDP2": "fsdp2",
    "hf_zero stage 0": "hf_zero0",
    "hf_zero stage 1": "hf_zero1",
    "hf_zero stage 2": "hf_zero2",
    "hf_zero stage 3": "hf_zero3",
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. `words` follow the language in the fence: `launch` and the script's arguments."""

    language: str
    words: tuple[str, ...]
    text: str


def blocks_of(text: str, language: str) -> list[Block]:
    found = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [
        Block(language=name, words=tuple(words.split()), text=body) for name, words, body in found if name == language
    ]


def table_under(text: str, first_heading: str) -> list[list[str]]:
    """The body rows of the table whose first column has this heading, cells stripped of backticks."""
    lines = text[text.index(f"| {first_heading} |") :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


EXAMPLES = blocks_of(README, "python")
FLAG_EXAMPLE = next(index for index, block in enumerate(EXAMPLES) if "--zero" in block.words)


def launch_command(launcher: str, script: Path) -> tuple[dict[str, str], list[str]]:
    """The README's own command for two ranks on the CPU by this launcher: its variables and words, for this script."""
    commands = [line for block in blocks_of(README, "bash") for line in block.text.splitlines()]
    line = next(line for line in commands if launcher in line and "ACCELERATE_USE_CPU" in line)
    words = shlex.split(line.replace("configs/", f"{ROOT}/configs/"))
    variables = dict(word.split("=", 1) for word in words if re.fullmatch(r"[A-Z_]+=.*", word))
    return variables, [*words[len(variables) : words.index("train.py")], str(script)]


WAYS_IN = 3
"""The first examples: flag, callback, plugin."""


@pytest.fixture(scope="module")
def run_example(tmp_path_factory) -> Callable[[int], tuple[Path, subprocess.CompletedProcess]]:
    """Runs an example of the README once, as its reader would, and returns its folder and outcome."""
    outcomes: dict[int, tuple[Path, subprocess.CompletedProcess]] = {}

    def run(index: int) -> tuple[Path, subprocess.CompletedProcess]:
        if index not in outcomes:
            block, folder = EXAMPLES[index], tmp_path_factory.mktemp("example")
            script = folder / "train.py"
            script.write_text(block.text, encoding="utf-8")
            variables, command = {}, [sys.executable, str(script)]
            arguments = block.words
            if arguments[:1] == ("launch",):
                # The three ways in through accelerate launch; torchrun, which starts sooner, for the rest.
                launcher = "accelerate launch" if index < WAYS_IN else "torchrun"
                variables, command = launch_command(launcher, script)
                arguments = arguments[1:]
            # No caches and no settings of whoever runs the tests.
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "HF_ZERO_"))}
            outcomes[index] = (
                folder,
                subprocess.run(
                    [*command, *arguments],
                    cwd=folder,
                    env=environment | {"HF_HOME": str(folder / "caches"), "HF_HUB_OFFLINE": "1"} | variables,
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                ),
            )
        return outcomes[index]

    return run


# The README's examples


def test_the_three_ways_in_are_there():
    text = "".join(block.text for block in EXAMPLES)
    for name in ("ZeroTrainingArguments", "ZeroCallback(2)", "parallelism_config=ZeroPlugin(stage=2)"):
        assert name in text


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_python_example_runs(run_example, index):
    _, done = run_example(index)
    assert done.returncode == 0, done.stderr[-4000:]
    if "launch" in EXAMPLES[index].words:
        assert "state over 2 of 2 ranks" in done.stderr


@pytest.mark.timeout(2 * SECONDS)
def test_a_checkpoint_holds_what_is_listed(run_example):
    folder, done = run_example(FLAG_EXAMPLE)
    assert done.returncode == 0, done.stderr[-4000:]
    [listing] = blocks_of(README, "text")
    place, *lines = listing.text.splitlines()
    names = re.findall(r"[\w/.-]+\.(?:safetensors|json|pt|pth|bin)\b", "\n".join(lines))
    assert len(names) > 4
    for name in names:
        assert (folder / place / name).is_file(), name
    assert not (folder / place / "optimizer.pt").exists()


def test_yaml_examples_are_configs():
    found = blocks_of(README, "yaml")
    assert found
    for block in found:
        ZeroConfig.from_dict(yaml.safe_load(block.text))


# What the text names


def test_every_public_name_is_explained():
    for name in set(hf_zero.__all__) - {"__version__"}:
        mentioned = re.search(rf"\b{name}\b", README)
        assert mentioned or inspect.getdoc(getattr(hf_zero, name)), f"{name}: not in README.md and without a docstring"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_paths_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    paths = set(re.findall(r"(?<![\w/.-])(?:scripts|configs|tests|hf_zero)/[\w/.-]*\w", text))
    paths |= set(re.findall(r"`([A-Z]+\.md)`", text))
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_within_a_document_have_a_heading(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= anchors


def test_every_script_that_is_run_is_a_file():
    for document in DOCUMENTS:
        for block in blocks_of((ROOT / document).read_text(encoding="utf-8"), "bash"):
            for script in re.findall(r"^(?:bash|python) (\S+)", block.text, flags=re.MULTILINE):
                assert (ROOT / script).is_file(), f"{document}: {script}"


# Tables


def by_key(settings: dict[str, object]) -> dict[str, object]:
    """Nested settings side by side, as `offload.params`."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        inner = by_key(value) if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{leaf}".rstrip("."): default for leaf, default in inner.items()}
    return found


def test_the_key_table_lists_the_settings_with_their_defaults():
    listed = {row[0]: yaml.safe_load(row[1]) for row in table_under(README, "key")}
    assert listed == by_key(ZeroConfig().to_dict())
    assert {key.split(".")[0] for key in listed} == {field.name for field in dataclasses.fields(ZeroConfig)}


def test_the_rooms_are_those_whose_imports_are_checked():
    rows = table_under((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "floor")
    assert {row[1]: int(row[0]) for row in rows} == FLOOR


def test_measured_figures_are_those_of_the_named_run():
    [source] = re.findall(r"`(scripts/bench/results/step-\S+?\.json)`", README)
    measured = {engine["name"]: engine for engine in json.loads((ROOT / source).read_text())["engines"]}
    rows = table_under(README, "engine")
    assert [ENGINE_NAMES[row[0]] for row in rows] == list(measured)
    for name, cpu, wire, peak in rows:
        engine = measured[ENGINE_NAMES[name]]
        assert cpu == f"{engine['cpu_ratio']['median']:.2f}", name
        assert wire == f"{engine['sent_bytes'] / 1e6:.1f}", name
        assert peak == f"{engine['peak_bytes'] / 2**20:.0f}", name
        assert engine["loss_difference"] == 0.0, "the README says that all losses are bitwise equal"


def test_measured_figures_of_checkpoints_are_those_of_the_named_run():
    [source] = re.findall(r"`(scripts/bench/results/io-\S+?\.json)`", README)
    figures = json.loads((ROOT / source).read_text())
    said = " ".join(README.split("Checkpoints of GPT-2")[1].split("\n\n")[0].split())

    def seconds(table: str, name: str) -> str:
        found = figures[table][name]
        return f"{statistics.median(found['seconds'] if isinstance(found, dict) else found):.1f} s"

    def megabytes(name: str) -> str:
        return f"{max(figures['resumes'][name]['read_bytes']) / 1e6:.0f}"

    def merged(way: str) -> str:
        found = figures["merges"][way]
        return f"{found['seconds']:.1f} s and {found['peak_bytes'] / 2**20:.0f} MiB"

    assert f"takes {seconds('saves', 'stage 1: at once')} at stages 1 and 3" in said
    assert seconds("saves", "stage 1: at once") == seconds("saves", "stage 3: at once")
    assert f"torch.save of the same {seconds('saves', 'torch.save')}, DCP from FSDP2 {seconds('saves', 'DCP')}" in said
    assert max(statistics.median(figures["saves"][f"stage {stage}: stall"]) for stage in (1, 3)) < 0.065
    assert f"{seconds('resumes', 'stage 3')} at stage 3 and {seconds('resumes', 'stage 1')} at stage 1" in said
    assert f"plain Trainer's {seconds('resumes', 'DDP')}" in said
    assert f"{megabytes('stage 3')} MB at stage 3 and {megabytes('stage 1')} MB at stage 1" in said
    assert f"plain Trainer reads {megabytes('DDP')}" in said
    assert f"takes {merged('hf-zero consolidate')}" in said
    assert f"`accelerate merge-weights` {merged('accelerate merge-weights')}" in said
