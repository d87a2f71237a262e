"""The documents, held to what they say: examples run, paths exist, tables agree with the code."""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from hub_server import HubServer
from launching import ROOT
from layers import LAYER
from pictures import bytes_of_stage
from readme_walk import (
    EXAMPLES,
    INSTALLS,
    LINES,
    MEASURES,
    NOTEBOOKS,
    PAGES,
    README,
    RECIPE,
    RUNS_THE_TESTS,
    SAVED_FIRST,
    SECONDS,
    Folder,
    Launch,
    Line,
    Walk,
    blocks_of,
)
from typer.testing import CliRunner
from write_docs import MADE, settings

import hf_zero
from hf_zero import ZeroConfig
from hf_zero.cli.app import app

DOCUMENTS = [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "scripts/bench/RESULTS.md"]
MOST_LINES = 200
"""Of the README: what is longer belongs to a page of its own."""


def table_under(text: str, first_heading: str) -> list[list[str]]:
    """The body rows of the table whose first column has this heading, cells stripped of backticks."""
    lines = text[text.index(f"| {first_heading} |") :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


TYPED = [(name, line) for name, lines in LINES.items() for line in lines if line.hindrance or not line.takes_minutes]
"""All but those of test_docs_in_minutes.py."""


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def walk_of(tmp_path_factory) -> Iterator[Callable[[str], Walk]]:
    """A page as it is typed, in a folder that all pages share."""
    with HubServer() as hub:
        folder = Folder(tmp_path_factory.mktemp("walk"), hub, SAVED_FIRST)
        yield cache(lambda page: Walk(PAGES[page], folder))


# Examples and commands


def test_the_ways_in_are_there():
    text = "".join(block.text for block in SAVED_FIRST)
    for name in ("ZeroTrainingArguments", "ZeroCallback(2)", "parallelism_config=ZeroPlugin(stage=2)", "ZeroEngine("):
        assert name in text
    assert "hf-zero run --zero 2 train.py" in {line.command for line in LINES["README.md"]}


def test_the_readme_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_every_python_example_has_a_file_name_and_a_launch():
    names = [example.name for examples in EXAMPLES.values() for example in examples]
    assert all(re.fullmatch(r"\w+\.py", name) for name in names) and len(set(names)) == len(names)
    for page, examples in EXAMPLES.items():
        for example in examples:
            assert any(f" {example.name}" in line.command for line in LINES[page]), example.name


def test_every_block_is_of_a_kind_that_is_run_or_compared():
    for page, text in PAGES.items():
        fences = re.findall(r"^ *```(.*)$", text, flags=re.MULTILINE)
        kinds = {fence.split()[0] if fence else "" for fence in fences[::2]}
        assert kinds <= {"python", "bash", "yaml", "json", "text", "diff"}, page
        assert len(blocks_of(text)) == len(fences) / 2, page


def _marks(line: Line) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.slow] if line.is_slow else []
    return [*marks, pytest.mark.skip(reason=line.hindrance)] if line.hindrance else marks


@pytest.mark.timeout(len(TYPED) * SECONDS)
@pytest.mark.parametrize(
    ("page", "line"),
    [pytest.param(page, line, marks=_marks(line), id=f"{page}: {line.command}") for page, line in TYPED],
)
def test_line_runs_as_it_is_typed_after_those_before_it(walk_of, page, line):
    outcome = walk_of(page).run(line)
    assert outcome.status == 0, outcome.said[-4000:]
    launch = Launch.of(line.command)
    # Without Hugging Face, the engine prints no plan.
    if launch is not None and launch.processes == 2 and launch.script != "plain.py":
        assert "state over 2 of 2 ranks" in outcome.said


def test_only_lines_with_a_visible_reason_are_not_run():
    left = {line.command for _, line in TYPED if line.hindrance and not re.match(r"\d+ GPUs", line.comment)}
    unnamed = {command for command in left if not (command.startswith(INSTALLS) or RECIPE.match(command))}
    assert unnamed == {RUNS_THE_TESTS, MEASURES}


NEEDED = {
    "--png ": "matplotlib",
    "--picture ": "dev",
    "--lora ": "peft",
    r"recipes/(sft|dpo|grpo|lora)\.py": "trl",
    r"recipes/(embedder|reranker)\.py": "sentence-transformers",
    r"recipes/lora\.py": "peft",
}
"""Part of a command line → the package or extra that it needs, which `pip install .` does not install."""


def test_a_page_installs_what_its_lines_need_before_they_are_typed():
    found = set()
    for page, lines in LINES.items():
        installed = ""
        for line in lines:
            installed += line.command if line.command.startswith("pip install ") else ""
            for part, package in NEEDED.items():
                if re.search(part, line.command):
                    found.add(part)
                    assert re.search(rf"\b{package}\b", installed), f"{page}: {line.command} needs {package}"
    assert found == set(NEEDED)


@pytest.mark.timeout(len(TYPED) * SECONDS)
def test_a_checkpoint_holds_what_is_listed(walk_of):
    page = "docs/checkpoints-and-hub.md"
    [listing] = [block for block in blocks_of(PAGES[page], "text") if "manifest.json" in block.text]
    place, *lines = listing.text.splitlines()
    walk = walk_of(page)
    walk.run(next(line for line in LINES[page] if f"--output_dir {Path(place).parent}" in line.command))
    names = re.findall(r"[\w/.-]+\.(?:safetensors|json|pt|pth|bin)\b", "\n".join(lines))
    assert len(names) > 4
    for name in names:
        assert (walk.folder.path / place / name).is_file(), name
    assert not (walk.folder.path / place / "optimizer.pt").exists()


def test_yaml_examples_are_configs():
    found = [block for text in PAGES.values() for block in blocks_of(text, "yaml")]
    assert found
    for block in found:
        ZeroConfig.from_dict(yaml.safe_load(block.text))


def test_a_deepspeed_config_migrates_with_the_words_that_are_shown(tmp_path, monkeypatch):
    page = PAGES["docs/coming-from.md"]
    [config], [shown, *_] = blocks_of(page, "json"), blocks_of(page, "text")
    (tmp_path / "ds_config.json").write_text(config.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command, _, said = shown.text.partition("\n")
    result = CliRunner().invoke(app, command.removeprefix("$ hf-zero ").split())
    assert result.stdout.strip() == said.strip()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_outputs_of_a_run_in_order_with_a_picture(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)


# What the text names


def strings_of(path: Path) -> Iterator[str]:
    """The text constants of a file; in those that are formatted, `…` for each value."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_of_the_troubleshooting_page_are_those_of_the_code():
    said = [text for path in (ROOT / "hf_zero").rglob("*.py") for text in strings_of(path)]
    page = PAGES["docs/troubleshooting.md"]
    quoted = re.findall(r"^### `(.*)`$", page, flags=re.MULTILINE)
    assert len(quoted) > 40 and len(quoted) == page.count("\n### ")
    assert [fragment for fragment in quoted if not any(fragment in text for text in said)] == []


def test_names_on_the_two_walks_are_those_of_the_code():
    text = read("CONTRIBUTING.md").partition("## Two walks")[2].partition("\n## ")[0]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_zero").rglob("*.py"))
    defined = set(re.findall(r"^ *(?:class|def) (\w+)", code, flags=re.MULTILINE))
    named = re.findall(r"`([A-Za-z]\w*)\.(\w+)`|`([A-Z]\w+|[a-z]+_[a-z_]+|begin|seal|commit|together)`", text)
    names = {name for pair in named for name in pair if name} - {"p", "grad", "_parameters"}
    folders = {path.name for path in (ROOT / "hf_zero").iterdir()}
    assert len(names) > 30 and names - defined - folders == set()


def test_every_public_name_is_explained():
    for name in set(hf_zero.__all__) - {"__version__"}:
        mentioned = any(re.search(rf"\b{name}\b", text) for text in PAGES.values())
        assert mentioned or inspect.getdoc(getattr(hf_zero, name)), f"{name}: on no page and without a docstring"


def test_settings_that_are_named_exist():
    known = {setting.name for setting in settings()} | {"comm.outer"}
    prefixes = "|".join(sorted({name.split(".")[0] for name in known if "." in name}))
    for page, text in PAGES.items():
        named = set(re.findall(rf"`((?:{prefixes})\.[a-z_0-9.]*[a-z_0-9])\b(?!\()", text))
        assert named <= known, page


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_paths_exist(document):
    text = read(document)
    paths = set(re.findall(r"(?<![\w/.-])(?:scripts|configs|tests|hf_zero)/[\w/.-]*\w", text))
    paths |= set(re.findall(r"`([A-Z]+\.md)`", text))
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def anchors_of(text: str) -> set[str]:
    """What `#...` may be in a link to this text: its headings as GitHub writes them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings_that_exist(document):
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", read(document)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = folder / name if name else ROOT / document
        assert file.is_file(), target
        assert not anchor or anchor in anchors_of(file.read_text(encoding="utf-8")), target


def test_every_page_is_in_the_list_of_pages():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", PAGES["docs/README.md"]))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_every_script_that_is_run_is_a_file():
    for document in DOCUMENTS:
        for block in blocks_of(read(document), "bash"):
            for script in re.findall(r"^(?:bash|python) (\S+)", block.text, flags=re.MULTILINE):
                known = (*SAVED_FIRST, *EXAMPLES[document]) if document in EXAMPLES else ()
                if script not in {example.name for example in known}:
                    assert (ROOT / script).is_file(), f"{document}: {script}"


# What is made from the code


@pytest.mark.parametrize("name", MADE)
def test_made_file_is_what_the_code_makes_now(name):
    assert read(name) == MADE[name](), "run `python scripts/write_docs.py`"


def test_every_picture_is_made_and_shown():
    kept = {f"docs/pictures/{path.name}" for path in (ROOT / "docs" / "pictures").iterdir()}
    assert kept == {name for name in MADE if name.startswith("docs/pictures/")}, "run `python scripts/write_docs.py`"
    shown = {
        str(((ROOT / document).parent / target).resolve().relative_to(ROOT))
        for document in DOCUMENTS
        for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", read(document))
    }
    # Photographs of what a run showed are kept as they were taken, and plots of measured figures as they were drawn.
    docs = ROOT / "docs"
    taken = {str(path.relative_to(ROOT)) for path in (*docs.rglob("*.png"), *(docs / "figures").iterdir())}
    assert kept | taken == shown, "a picture that no page shows, or one that is shown and not made"


def test_the_page_of_settings_has_all_of_them_with_their_defaults():
    assert {setting.name: setting.default for setting in settings()} == by_key(ZeroConfig().to_dict())


def test_bytes_of_the_example_model_are_those_of_the_layout():
    said = " ".join(PAGES["docs/memory-and-traffic.md"].split())
    sums = [f"{sum(bytes_of_stage(stage).values()) / 1e9:.2f} GB" for stage in range(4)]
    assert "{} of state at stage 0, {} at stage 1, {} at stage 2 and {} at stage 3".format(*sums) in said


# Tables


def by_key(settings: dict[str, object]) -> dict[str, object]:
    """Nested settings side by side, as `offload.params`."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        inner = by_key(value) if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{leaf}".rstrip("."): default for leaf, default in inner.items()}
    return found


def test_the_log_table_lists_every_figure_of_the_log():
    said = {
        name
        for row in table_under(PAGES["docs/gradients-and-reports.md"], "in Trainer's log")
        for name in re.findall(r"zero/\w+", row[0])
    }
    folder = ROOT / "hf_zero" / "integrations"
    logged = (re.findall(r'"(zero/\w+)"\] =', path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
    assert said == {name for names in logged for name in names} | {"zero/peak_mib"}


def test_the_rooms_are_those_whose_imports_are_checked():
    rows = table_under(read("CONTRIBUTING.md"), "layer")
    assert {row[1]: int(row[0]) for row in rows} == LAYER


def test_the_files_that_compare_tiers_are_those_that_the_guide_names():
    package = ROOT / "hf_zero"
    compare = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if '"nvme"' in path.read_text("utf-8")
    }
    _, _, text = read("CONTRIBUTING.md").partition("- **Another tier**")
    paragraph = " ".join(text.partition("- **Another wire format**")[0].split())
    named = set(re.findall(r"`(?:hf_zero/)?([a-z_/]+\.py)`", paragraph))
    assert named == compare and f"{len(compare) - 2} more files" in paragraph.replace("Nine", "9")


def test_the_status_is_that_of_the_kept_results():
    """Rewrite the README's first lines when a result from several GPUs is kept."""
    kept = [json.loads(path.read_text()) for path in (ROOT / "scripts" / "bench" / "results").glob("*.json")]
    runs = [result.get("machine", result.get("run", result)) for result in kept]
    gpus = {run["device"] for run in runs if not run["torch"].endswith("+cpu") and run.get("device", "cpu") != "cpu"}
    assert gpus == {"NVIDIA H100 80GB HBM3"}
    said = " ".join(README.split())
    assert "**One H100 has run**" in said and "**Several GPUs have not.**" in said
