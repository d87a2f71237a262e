"""The core without the extras' folders trains, offloads, saves and resumes; to ask for an extra there is one clear error."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_zero.extras import EXTRAS, extra

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = shutil.ignore_patterns("__pycache__", "results")

ASKS = """
import hf_zero
from hf_zero.extras import EXTRAS, MissingExtraError, extra
for folder, found in EXTRAS.items():
    for factory in found.factories:
        try:
            extra(folder, factory.partition(":")[2])
        except MissingExtraError as error:
            print(error)
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A copy of the repository without the extras."""
    root = tmp_path_factory.mktemp("core")
    for name in ("hf_zero", "tests", "scripts", "configs", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=LEFT_OUT)
    shutil.copy2(ROOT / "pyproject.toml", root)
    for folder in EXTRAS:
        shutil.rmtree(root / "hf_zero" / folder)
    return root


def run(core: Path, *words: str) -> subprocess.CompletedProcess:
    """A process of Python that finds the copy."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=core,
        env=os.environ | {"PYTHONPATH": str(core)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_extra_gives_what_the_core_asks_of_it():
    for folder, found in EXTRAS.items():
        assert found.what.endswith(".") and found.factories
        for factory in found.factories:
            assert callable(extra(folder, factory.partition(":")[2]))


def test_an_extra_whose_folder_is_missing_is_one_short_error(core):
    ran = run(core, "-c", ASKS)
    said = ran.stdout.splitlines()
    assert len(said) == sum(len(found.factories) for found in EXTRAS.values()), ran.stderr
    assert all(len(line.split()) <= 35 for line in said)
    assert "`hf-zero push` needs the extra `hub`, whose folder is missing" in ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_tests_of_the_core_pass_without_the_extras(core):
    # Tests of documents, recipes and benchmarks are about the whole repository. All cells of a test import the same modules.
    words = ["-n", "2", "--dist", "loadfile", "--one-cell", "--ignore", "tests/repository", "tests"]
    ran = run(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *words)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]
