"""The documents, held to what they say: examples run, paths exist, tables agree with the code."""

import dataclasses
import inspect
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hub_server import HubServer
from launching import ROOT
from readme_walk import RUNS_THE_TESTS, SECONDS, Line, Walk, blocks_of, steps_of
from test_floors import FLOOR

import hf_zero
from hf_zero import ZeroConfig

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
ENGINE_NAMES = {
    "DDP": "ddp",
    "DDP + ZeroRedundancyOptimizer": "zero_optimizer",
    "FSDP2": "fsdp2",
    "hf_zero stage 0": "hf_zero0",
    "hf_zero stage 1": "hf_zero1",
    "hf_zero stage 2": "hf_zero2",
    "hf_zero stage 3": "hf_zero3",
}


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
LINES = [step for step in steps_of(README) if isinstance(step, Line)]


@pytest.fixture(scope="module")
def walk(tmp_path_factory) -> Iterator[Walk]:
    """A reader's folder, which the tests of single lines share."""
    with HubServer() as hub:
        yield Walk(README, tmp_path_factory.mktemp("walk"), hub)


# The README's examples and commands


def test_the_three_ways_in_are_there():
    text = "".join(block.text for block in EXAMPLES)
    for name in ("ZeroTrainingArguments", "ZeroCallback(2)", "parallelism_config=ZeroPlugin(stage=2)"):
        assert name in text


def test_every_python_example_has_a_file_name_and_a_launch():
    names = [example.name for example in EXAMPLES]
    assert all(re.fullmatch(r"\w+\.py", name) for name in names) and len(set(names)) == len(names)
    for name in names:
        assert any(f" {name}" in line.command for line in LINES), name


@pytest.mark.timeout(len(LINES) * SECONDS)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] if line.is_slow else [], id=line.command)
        for line in LINES
        if not line.is_for_others
    ],
)
def test_line_runs_as_it_is_typed_after_those_before_it(walk, line):
    outcome = walk.run(line)
    assert outcome.status == 0, outcome.said[-4000:]
    if "torchrun" in line.command or "accelerate launch" in line.command:
        assert "state over 2 of 2 ranks" in outcome.said


def test_only_lines_with_a_visible_reason_are_not_run():
    left = [line for line in LINES if line.is_for_others]
    assert {line.command for line in left if "GPU" not in line.comment} == {RUNS_THE_TESTS}


@pytest.mark.timeout(len(LINES) * SECONDS)
def test_a_checkpoint_holds_what_is_listed(walk):
    [listing] = [block for block in blocks_of(README, "text") if "manifest.json" in block.text]
    place, *lines = listing.text.splitlines()
    walk.run(next(line for line in LINES if f"--output_dir {Path(place).parent}" in line.command))
    names = re.findall(r"[\w/.-]+\.(?:safetensors|json|pt|pth|bin)\b", "\n".join(lines))
    assert len(names) > 4
    for name in names:
        assert (walk.folder / place / name).is_file(), name
    assert not (walk.folder / place / "optimizer.pt").exists()


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


def test_the_log_table_lists_every_figure_of_the_log():
    said = {name for row in table_under(README, "in Trainer's log") for name in re.findall(r"zero/\w+", row[0])}
    rooms = ROOT / "hf_zero" / "integrations"
    logged = (re.findall(r'"(zero/\w+)"\] =', path.read_text(encoding="utf-8")) for path in rooms.glob("*.py"))
    assert said == {name for names in logged for name in names} | {"zero/peak_mib"}


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
