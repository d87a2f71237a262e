"""Scripts that know nothing of hf_zero, run without and with the engine and compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import hf_zero
from launching import ROOT, SECONDS, own_environment, own_port, run_forked

from hf_zero.config import ConfigError
from hf_zero.diagnose import recorded as recordings
from hf_zero.diagnose.parity_report import ParityError, ParityReport, Recording, compare

HERE = Path(__file__).parent
SCRIPTS = HERE.parent / "run" / "scripts"


def recorded(folder: Path, zero: str | None, script: str, *arguments: object) -> Recording:
    folder.mkdir()
    options = ("--record", folder, "--steps", 3, *(("--stock",) if zero is None else ()), "--zero", zero or 2)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    words = (*options, SCRIPTS / script, *arguments)
    done = run_forked(HERE / "recorded_module.py", words, environment=environment, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    return Recording(folder)


def reports(tmp_path: Path, settings: list[str], script: str, *arguments: object) -> list[ParityReport]:
    stock = recorded(tmp_path / "stock", None, script, *arguments)
    return [compare(stock, recorded(tmp_path / f"{n}", zero, script, *arguments)) for n, zero in enumerate(settings)]


@pytest.mark.slow
def test_an_accelerate_loop_is_equal_but_for_the_norm(tmp_path):
    for report in reports(tmp_path, ["1", "3"], "plain_loop.py", tmp_path / "losses.json"):
        assert report.passed and report.steps == 3 and report.world_size == 2, str(report)
        # A clip that does not scale leaves all else as it is.
        assert report.loss == 0 and not report.gradients and not report.parameters, str(report)
        assert len(report.reasons) == 1 and "clipped" in report.reasons[0]


def test_trainer_is_equal_and_inexact_settings_are_named(tmp_path):
    words = ("--output_dir", tmp_path / "out", "--max_steps", 4, "--report_to", "none", "--max_grad_norm", 100)
    exact, inexact = reports(tmp_path, ["2", "stage=2,comm.gradients=int8"], "trainers.py", *words)
    assert exact.passed and exact.loss == 0 and not exact.gradients, str(exact)
    assert inexact.passed and "comm.gradients" in str(inexact) and inexact.gradients, str(inexact)


def test_a_script_without_a_step_cannot_be_compared(tmp_path):
    stock = recorded(tmp_path / "stock", None, "odd_ends.py", "evaluates")
    with pytest.raises(ParityError, match="without the engine took no optimizer step"):
        compare(stock, stock)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_launches_the_script_twice_and_ends_with_0(tmp_path):
    words = [
        sys.executable,
        "-c",
        "from hf_zero.cli.app import main; main()",
        "parity",
        "--cpu",
        "--json",
        "--zero",
        "2",
    ]
    words += ["--num-processes", "2", "--port", str(own_port()), str(SCRIPTS / "plain_loop.py"), str(tmp_path / "l")]
    environment = own_environment(tmp_path)
    good = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * SECONDS)
    assert good.returncode == 0, good.stderr[-3000:]
    assert json.loads(good.stdout)["passed"]


LONG = """
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
accelerator = Accelerator()
size = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(100, (16, 63))]
optimizer, loader = torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_sequence_over_two_ranks_is_compared_with_one_rank(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(LONG)
    report = recordings.parity_of_script(["--zero", "3", str(script)], processes=2, cpu=True, sp=2, port=own_port())
    assert report.passed and report.steps == 3 and report.loss < 1e-5, str(report)
    assert [reason for reason in report.reasons if "2 ranks compute a sequence" in reason]
    with pytest.raises(ConfigError, match="divides the 4 ranks"):
        recordings.parity_of_script(["--zero", "3", str(script)], processes=4, cpu=True, sp=3)


@pytest.mark.slow
def test_the_command_ends_with_1_where_a_run_differs(tmp_path, monkeypatch):
    stock, inexact = (
        recorded(tmp_path / f"{zero}", zero, "plain_loop.py", tmp_path / "losses.json")
        for zero in (None, "stage=2,comm.gradients=int8")
    )
    monkeypatch.setattr(recordings, "parity_of_script", lambda *_, tolerance, **__: compare(stock, inexact, tolerance))
    bad = hf_zero("parity", "--json", "--tolerance", "0", "script.py")
    assert bad.exit_code == 1, bad.output
    assert json.loads(bad.stdout)["first"]["kind"] == "gradient"
