"""Lines of the documents that take minutes, those that a launcher really starts, and the notebooks."""

import os
import sys
from pathlib import Path

import pytest
from hub_server import HubServer
from launching import ROOT
from readme_walk import LINES, MINUTES, NOTEBOOKS, PAGES, SAVED_FIRST, SECONDS, Folder, Line, Walk

pytestmark = pytest.mark.slow

IN_MINUTES = [
    pytest.param(page, line, id=f"{page}: {line.command}")
    for page, lines in LINES.items()
    for line in lines
    if line.takes_minutes and not line.hindrance
]


def test_there_are_some():
    assert len(IN_MINUTES) >= 2


@pytest.mark.timeout(60 * MINUTES + 2 * SECONDS)
@pytest.mark.parametrize(("page", "line"), IN_MINUTES)
def test_line_runs_as_it_is_typed(page: str, line: Line, tmp_path: Path):
    with HubServer() as hub:
        outcome = Walk(PAGES[page], Folder(tmp_path, hub, SAVED_FIRST)).run(line)
    assert outcome.status == 0, outcome.said[-4000:]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("launcher", "page", "started"),
    [
        ("hf-zero", "README.md", "hf-zero run"),
        ("torchrun", "docs/ways-in.md", "torchrun"),
        ("accelerate", "docs/unmodified-scripts.md", "-m hf_zero.run"),
        ("python", "docs/parity.md", "python "),
    ],
)
def test_the_launcher_itself_starts_a_line(launcher, page, started, tmp_path):
    line = next(line for line in LINES[page] if started in line.command and not line.hindrance)
    with HubServer() as hub:
        folder = Folder(tmp_path, hub, SAVED_FIRST, launchers=[launcher])
        outcome = Walk(PAGES[page], folder).run(line)
    assert outcome.status == 0, outcome.said[-4000:]
    assert launcher == "python" or "state over 2 of 2 ranks" in outcome.said
    assert not folder.launchers_left


@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_offline(path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="notebooks run with the extra `docs`: pip install -e '.[docs]'")
    nbclient = pytest.importorskip("nbclient", reason="notebooks run with the extra `docs`: pip install -e '.[docs]'")
    pytest.importorskip("ipykernel", reason="notebooks run with the extra `docs`: pip install -e '.[docs]'")
    if path.stem == "qlora":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes, of the extra `dev`, is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    done = nbclient.NotebookClient(notebook, timeout=60 * MINUTES, kernel_name="python3", resources=where).execute()
    cells = [cell for cell in done.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
