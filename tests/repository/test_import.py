"""What importing the package costs, and that the command line of an install without extras is enough."""

import gc
import importlib
import importlib.resources
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cells import slow
from safetensors.torch import save_file

import hf_zero

MEASURE = """
import time
first = time.process_time()
import accelerate
start = time.process_time()
import hf_zero
{names}
print(time.process_time() - start, start - first)
import sys
from types import SimpleNamespace
hf_zero.ZeroPlugin(2)
assert 'transformers.trainer' not in sys.modules
"""


LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def test_names_are_loaded_without_collections_and_pythons_setting_stays(monkeypatch):
    # A collection in an import looks through all that torch and transformers have made: 0.3 s of CPU time.
    collects = []
    monkeypatch.setattr(
        hf_zero, "import_module", lambda *_: SimpleNamespace(ZeroConfig=collects.append(gc.isenabled()) or True)
    )
    before = gc.isenabled()
    try:
        for setting in (gc.enable, gc.disable):
            setting()
            collects.append(gc.isenabled())
            assert hf_zero.__getattr__("ZeroConfig")
            collects.append(gc.isenabled())
    finally:
        (gc.enable if before else gc.disable)()
    assert collects == [True, False, True, False, False, False]


MOST_SECONDS, MOST_OF_ACCELERATES = 0.3, 0.15
"""Either will do: a core that does other work too, takes longer for both."""


def cost_over_accelerate(names: str) -> float:
    """Seconds of CPU, as far as they are on a machine that has nothing else to do."""
    # As installed: Python keeps what it has compiled.
    keeps_bytecode = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE.format(names=names)],
        env=keeps_bytecode,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    seconds, accelerates = map(float, ran.stdout.split())
    return min(seconds, seconds / accelerates / MOST_OF_ACCELERATES * MOST_SECONDS)


@pytest.mark.parametrize("names", [slow(""), "hf_zero.ZeroPlugin; hf_zero.ZeroConfig; hf_zero.engine_of"])
def test_import_costs_little_over_accelerate_and_leaves_transformers_trainer_out(names):
    # One of a few is enough: whatever else the machine does adds to a process's time and never takes from it.
    found = []
    while len(found) < 4 and min(found, default=MOST_SECONDS) >= MOST_SECONDS:
        found.append(cost_over_accelerate(names))
    print(f"import hf_zero; {names}: {min(found):.3f} s of CPU over import accelerate")
    assert min(found) < MOST_SECONDS


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error():
    assert all(hasattr(hf_zero, name) for name in hf_zero.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ZeroPluggin'"):
        hf_zero.ZeroPluggin  # noqa: B018


@pytest.mark.parametrize(
    ("backends", "before", "after"),
    [(None, None, "1"), (None, "0", "0"), ("cpu:gloo,cuda:nccl", None, None), ("gloo", None, "1")],
)
def test_importing_asks_nccl_for_one_order_of_launches_while_nccl_can_still_heed(backends, before, after, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: backends is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    # Where the variable is not set, the test's own process keeps none.
    monkeypatch.setenv(LAUNCH_ORDER, before or "")
    if before is None:
        monkeypatch.delenv(LAUNCH_ORDER)
    importlib.reload(hf_zero)
    assert os.environ.get(LAUNCH_ORDER) == after


def test_type_checkers_are_told_that_the_package_is_typed():
    assert (importlib.resources.files("hf_zero") / "py.typed").is_file()


SECONDS_OF_TORCH = 1.4
"""Of CPU, to import it, where a core does no other work."""

COMMAND = """
import sys, time
from hf_zero.cli.app import app
try:
    app({arguments})
except SystemExit:
    pass
print(*{{name.partition('.')[0] for name in sys.modules}} & {{'torch', 'transformers', 'accelerate', 'peft', 'datasets'}})
print(time.process_time())
"""


@pytest.mark.parametrize(
    ("arguments", "most_s", "imported"),
    [
        (["--help"], 0.5, set()),
        (["run", "--help"], 0.5, set()),
        (["migrate", "nowhere.json"], 0.5, set()),
        slow(["doctor", "--quick"], 2.5, {"torch"}),
        (["inspect", "FOLDER"], 2.5, {"torch"}),
        slow(["verify", "FOLDER"], 2.5, {"torch"}),
        slow(["report", "FOLDER"], 2.5, {"torch"}),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_a_command_waits_for_what_it_needs_alone(arguments, most_s, imported, tmp_path):
    save_file({"weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"loss": 1.0, "step": 1}], "global_step": 1}')
    words = [str(tmp_path) if word == "FOLDER" else word for word in arguments]
    found, took_s = set(), []
    while len(took_s) < 4 and min(took_s, default=most_s) >= most_s:
        ran = subprocess.run(
            [sys.executable, "-c", COMMAND.format(arguments=words)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        *_, modules, seconds = ran.stdout.splitlines()
        found = set(modules.split())
        took_s.append(float(seconds) if float(seconds) < most_s else float(seconds) * share_of_a_core())
    assert found == imported
    assert min(took_s) < most_s


def share_of_a_core() -> float:
    """How fast this process's core is beside one that has nothing else to do."""
    timed = "import time, torch; print(time.process_time())"
    ran = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True, timeout=60)
    return min(1.0, SECONDS_OF_TORCH / float(ran.stdout))


@pytest.mark.parametrize(
    ("system", "without", "words"), [("win32", "fcntl", "install it in WSL 2"), ("darwin", "", "macOS")]
)
def test_another_system_than_linux_is_refused_in_one_sentence(system, without, words, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    if without:
        monkeypatch.setitem(sys.modules, without, None)
    source = importlib.resources.files(hf_zero).joinpath("__init__.py").read_text(encoding="utf-8")
    with pytest.raises(ImportError, match=words) as refused:
        exec(compile(source, "__init__", "exec"), {"__name__": "hf_zero", "__package__": "hf_zero"})
    assert str(refused.value).startswith("hf_zero runs on Linux") and "\n" not in str(refused.value)


def test_a_library_that_is_too_old_is_named_at_import():
    """By its version and what pip has to do, before a name that it lacks raises an error of its own."""
    code = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "1.12.0" if name == "accelerate" else real(name)
import hf_zero
hf_zero.ZeroPlugin
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    said = ran.stderr.splitlines()[-1]
    assert ran.returncode == 1
    assert said == (
        "ImportError: hf_zero needs accelerate>=1.13, and accelerate 1.12.0 is installed: pip install -U 'accelerate>=1.13'."
    )
