"""What a run of an unmodified script enters, it leaves again; and what is said on its command line is read or refused."""

import importlib
import json
import os
import sys
from pathlib import Path

import accelerate
import pytest
import torch.optim.optimizer as torch_optimizer
from typer.testing import CliRunner

from hf_zero import ConfigError, ZeroConfig
from hf_zero.cli.app import app
from hf_zero.integrations.launcher import launch_of, script_call
from hf_zero.integrations.unmodified import AfterImport, Door, run_script


def entered() -> tuple:
    hooks = getattr(torch_optimizer, "_global_optimizer_pre_hooks")  # noqa: B009
    return (
        accelerate.Accelerator.__init__,
        tuple(hooks),
        list(sys.meta_path),
        list(sys.argv),
        list(sys.path),
        dict(os.environ),
    )


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import sys\nseen = sys.argv[1:], sys.path[0], __name__\nraise SystemExit(4)\n")
    return path


def test_what_was_entered_is_undone_however_the_script_ends(script):
    before = entered()
    with Door(ZeroConfig()).opened():
        assert entered()[:3] != before[:3]
        # Its signature is that of the one that it stands for.
        assert accelerate.Accelerator.__init__.__wrapped__ is before[0]
    assert entered() == before
    for text, status in (("raise SystemExit(4)", 4), ("1 / 0", 1), ("x = (", 1), ("", 1)):
        script.write_text(text)
        with pytest.raises(SystemExit) as ended:
            run_script(script_call(["--zero", "2", str(script)]))
        assert ended.value.code == status and entered() == before


def test_a_call_waits_for_an_import_and_leaves_the_loader_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    with AfterImport(
        {"imported_later": lambda module: seen.append(module.value), "json": lambda _: seen.append("json")}
    ):
        assert seen == ["json"]
        module = importlib.import_module("imported_later")
        assert seen == ["json", 1]
    assert "exec_module" not in vars(module.__spec__.loader)
    assert not any(isinstance(finder, AfterImport) for finder in sys.meta_path)


def test_the_command_line_is_read_up_to_the_script(script, monkeypatch):
    call = script_call(["--zero", "stage=3", str(script), "--zero", "1", "-m", "x"])
    assert call.config == ZeroConfig(stage=3) and call.arguments == ("--zero", "1", "-m", "x") and not call.is_module
    module = script_call(["--zero=1", "-m", "package.train", "--lr", "3"])
    assert module.is_module and module.script == "package.train" and module.config == ZeroConfig(stage=1)
    monkeypatch.setenv("HF_ZERO_CONFIG", "1")
    assert script_call([str(script)]).config == ZeroConfig(stage=1)
    assert script_call(["--zero", "0", str(script)]).config == ZeroConfig(stage=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["SCRIPT"], "no config"),
        (["--zero", "9", "SCRIPT"], "`stage` is 9"),
        (["--zero", "2", "nowhere.py"], "no script 'nowhere.py'"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(script, words, said, monkeypatch):
    monkeypatch.delenv("HF_ZERO_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=said):
        script_call([str(script) if word == "SCRIPT" else word for word in words])


def test_the_launch_has_the_flags_and_variables_that_ranks_on_a_cpu_need(script):
    words = ["--zero", "2", str(script), "--lr", "3"]
    launch = launch_of(words, processes=2, cpu=True, port=29501)
    said = " ".join(launch.command)
    assert launch.environment == {"ACCELERATE_USE_CPU": "true"}
    assert "--num_processes 2 --num_machines 1 --multi_gpu" in said and said.endswith(
        f"-m hf_zero.run {' '.join(words)}"
    )
    assert "--multi_gpu" not in launch_of(words, cpu=True).command
    with pytest.raises(ConfigError, match="--num-processes is 0"):
        launch_of(words, processes=0, cpu=True)
    printed = CliRunner().invoke(
        app, ["run", "--zero", "2", "--num-processes", "2", "--cpu", "--json", str(script), "--lr", "3"]
    )
    assert printed.exit_code == 0, printed.output
    document = json.loads(printed.stdout)
    assert document["command"][-4:] == ["2", str(script), "--lr", "3"] and document["environment"] == launch.environment
    refused = CliRunner().invoke(app, ["run", "--zero", "7", str(script)])
    assert refused.exit_code == 1 and "`stage` is 7" in refused.output
