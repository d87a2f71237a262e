"""Patches for other projects fit the releases that are installed."""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import ROOT

PATCHES = {
    "trl": "docs/upstream/trl/distributed_backend.patch",
    "accelerate": "docs/upstream/accelerate/accelerator_ready.patch",
}


def test_every_patch_is_tried():
    kept = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "upstream").rglob("*.patch")}
    assert kept == set(PATCHES.values())


@pytest.mark.parametrize("package", PATCHES)
def test_a_patch_applies_to_the_installed_release(package):
    found = find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not among the tests' packages")
    where = Path(found.submodule_search_locations[0]).parent
    command = ["patch", "--dry-run", "--strip=1", "--fuzz=0", f"--input={ROOT / PATCHES[package]}"]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
