"""What other projects and strangers meet: workflows, templates, files whose versions agree, and patches that apply."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from launching import ROOT

import hf_zero

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
COMMUNITY = ROOT / ".github"


def jobs_of(workflow: str) -> dict:
    return yaml.safe_load((COMMUNITY / "workflows" / workflow).read_text(encoding="utf-8"))["jobs"]


def test_versions_agree():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    [packaged] = re.findall(r'^version = "(.+)"$', PYPROJECT, flags=re.MULTILINE)
    assert packaged == hf_zero.__version__ == cited["version"]


def test_the_short_suite_runs_on_every_python_with_the_oldest_and_the_newest_versions():
    short = jobs_of("tests.yml")["short"]
    assert short["strategy"]["matrix"]["versions"] == ["oldest", "newest"]
    declared = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert declared and short["strategy"]["matrix"]["python"] == declared
    [versions] = [step["run"] for step in short["steps"] if step.get("name") == "Versions"]
    [pattern] = re.findall(r"s/(\^.+?\$)/", versions)
    floors = re.findall(pattern, PYPROJECT, flags=re.MULTILINE)
    assert {name for name, _ in floors} == {"torch", "transformers", "accelerate"}


def test_workflows_run_commands_that_exist_and_a_gpu_job_that_a_variable_switches_on():
    said = ""
    for path in (COMMUNITY / "workflows").iterdir():
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            said += "\n".join(step.get("run", "") for step in job["steps"])
    scripts = set(re.findall(r"scripts/[\w/]+\.\w+", said))
    assert {"scripts/test.sh", "scripts/docs.sh", "scripts/gpu_day.sh"} <= scripts
    assert all((ROOT / script).is_file() for script in scripts)
    gpu = jobs_of("tests.yml")["gpu"]
    assert "vars.GPU_RUNNER != ''" in gpu["if"] and gpu["runs-on"] == "${{ vars.GPU_RUNNER }}"


def test_workflows_read_only_and_pin_each_action_by_its_commit():
    for path in (COMMUNITY / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        used = re.findall(r"uses: (.+)", text)
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d[\w.]*", each) for each in used), path.name
        assert len(used) == sum("uses" in step for job in workflow["jobs"].values() for step in job["steps"])


def test_a_release_is_published_without_a_stored_token_from_tools_with_hashes():
    workflow = (COMMUNITY / "workflows" / "release.yml").read_text(encoding="utf-8")
    publish = yaml.safe_load(workflow)["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and "secrets." not in workflow
    tools = (COMMUNITY / "release-requirements.txt").read_text(encoding="utf-8")
    wanted = (COMMUNITY / "release-requirements.in").read_text(encoding="utf-8")
    for line in wanted.splitlines():
        name = re.split(r"[>#= ]", line)[0]
        assert not name or re.search(rf"^{name}==[^\n]+\\\n    --hash=sha256:", tools, flags=re.MULTILINE), name


def test_templates_ask_for_what_the_doctor_says():
    templates = [COMMUNITY / "PULL_REQUEST_TEMPLATE.md", COMMUNITY / "ISSUE_TEMPLATE" / "bug.yml"]
    assert all("hf-zero doctor --json" in template.read_text(encoding="utf-8") for template in templates)
    for path in (COMMUNITY / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        assert all(part["attributes"]["label"] for part in yaml.safe_load(path.read_text(encoding="utf-8"))["body"])


def test_files_that_the_community_pages_name_exist():
    for page in COMMUNITY.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"(?<![\w/.])(?:scripts|tests)/[\w/]+\.\w+", text))
        assert all((ROOT / name).is_file() for name in named), page.name
        assert all((COMMUNITY / name).is_file() for name in re.findall(r"\]\(([\w.]+)\)", text)), page.name


# Patches for other projects

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
