"""The package as others install it: away from the repository, in an environment of its own."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from launching import ROOT
from packaging.requirements import Requirement
from readme_walk import README

PLACE = "https://host.invalid/owner/repository"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "outputs", "*.egg-info")

TRAIN = """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

size = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (16, 16))]
args = TrainingArguments(output_dir="run", max_steps=2, save_steps=2, logging_steps=1, report_to="none")
Trainer(model=model, args=args, train_dataset=rows).train()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is made from it as `python -m build` does, without fetching the build tool."""
    pytest.importorskip("setuptools", reason="the package is built here without fetching its build tool")
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "tree", ignore=LEFT_OUT)
    environment = os.environ | {"HF_ZERO_URL": PLACE}
    for build, where in (("sdist", folder / "tree"), ("wheel", folder / "sources")):
        code = f"from setuptools.build_meta import build_{build}; build_{build}({str(folder)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=where, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-2000:]
        if build == "sdist":
            [sdist] = folder.glob("*.tar.gz")
            with tarfile.open(sdist) as packed:
                packed.extractall(folder, filter="data")
            (folder / sdist.name.removesuffix(".tar.gz")).rename(folder / "sources")
    [wheel] = folder.glob("*.whl")
    return folder / "sources", wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The `bin` of an environment with the wheel, and the requirements of the tests' own environment behind it."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, symlinks=True)
    [packages] = home.glob("lib/python*/site-packages")
    # A path in a `.pth` file is searched last, and the `.pth` files in that folder are not read: an editable hf_zero stays out.
    (packages / "requirements.pth").write_text(str(Path(torch.__file__).parents[1]), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--python", home, "install", "--no-deps", "--no-index", "--quiet", built[1]]
    subprocess.run(command, check=True, timeout=200)
    return home / "bin"


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(packed.read(name).decode())


@pytest.mark.slow
def test_sources_have_tests_and_docs_and_the_wheel_every_file_of_the_package(built):
    sources, wheel = built
    for name in ("tests", "docs", "scripts", "configs"):
        ours = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*") if path.is_file()}
        ours = {path for path in ours if not {"__pycache__", "outputs"} & set(path.parts)}
        assert len(ours) > 10 and all((sources / path).is_file() for path in ours), name
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT) for path in (ROOT / "hf_zero").rglob("*") if path.is_file()}
    assert names == {str(path) for path in package if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_two_builds_make_the_same_bytes_with_a_bill_of_materials(built, tmp_path):
    wheels = []
    for name in ("one", "two"):
        shutil.copytree(built[0], tmp_path / name)
        code = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r} + '/{name}-out')"
        (tmp_path / f"{name}-out").mkdir()
        environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path / name, env=environment, check=True, timeout=200)
        wheels += (tmp_path / f"{name}-out").glob("*.whl")
    one, two = (wheel.read_bytes() for wheel in wheels)
    assert one == two
    with zipfile.ZipFile(wheels[0]) as packed:
        [bill] = [name for name in packed.namelist() if name.endswith(".dist-info/sboms/hf_zero.cdx.json")]
        document = json.loads(packed.read(bill))
    required = {
        Requirement(each).name for each in read_metadata(wheels[0]).get_all("Requires-Dist") if "extra ==" not in each
    }
    assert {component["name"] for component in document["components"]} == required


@pytest.mark.slow
def test_a_registry_shows_urls_of_the_repository_and_a_readme_whose_links_work_there(built):
    metadata = read_metadata(built[1])
    assert f"Repository, {PLACE}" in metadata.get_all("Project-URL", [])
    assert metadata["Author"] and len(metadata.get_all("Classifier", [])) > 10
    targets = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    files = [target.removeprefix(f"{PLACE}/") for target in targets if target.startswith(PLACE)]
    assert len(files) > 10 and all(re.match(r"https://|#", target) for target in targets)
    for name in files:
        kind, tag, path = name.partition("#")[0].split("/", 2)
        assert kind in ("blob", "raw") and tag == f"v{metadata['Version']}" and (ROOT / path).is_file(), name


def test_without_a_place_of_the_repository_no_link_leads_nowhere():
    pytest.importorskip("setuptools", reason="setup.py needs it")
    setup = runpy.run_path(str(ROOT / "setup.py"))
    shown = setup["long_description"]("", "0")
    assert all(re.match(r"https?://|#", target) for target in re.findall(r"\]\(([^)\s]+)\)", shown))
    assert len(re.sub(r"\W", "", shown)) > 0.8 * len(re.sub(r"\W", "", README)) and setup["project_urls"]("", "0") == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_installed_wheel_trains_a_script_of_another_folder_and_reads_its_checkpoint(installed, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_ZERO_"))}
    environment = inherited | {"HF_HUB_OFFLINE": "1", "PATH": f"{installed}:{os.environ['PATH']}"}

    def done_by(*words: str) -> subprocess.CompletedProcess:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    where = done_by(str(installed / "python"), "-c", "import hf_zero; print(hf_zero.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)
    command = "hf-zero run --zero 2 train.py"
    assert command in README
    before, script = command.rsplit(" ", 1)
    trained = done_by(*before.split(), "--cpu", "--num-processes", "2", script)
    assert "state over 2 of 2 ranks" in trained.stdout + trained.stderr
    # It checks the checkpoint before it reads it.
    written = done_by("hf-zero", "consolidate", "run/checkpoint-2", "model", "--json")
    assert json.loads(written.stdout)["folder"] == "model"
