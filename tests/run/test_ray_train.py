"""Ray's own workers, on this machine: one is killed, and the run ends by itself. Needs `pip install "ray[train]"`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "configs" / "launch" / "ray_train.py"
MANIFEST = "zero/manifest.json"
SECONDS = 400
STEPS = 80
"""Enough to be in the middle of when the sixth checkpoint is there."""


def workers_below(process: psutil.Process) -> list[psutil.Process]:
    return [
        each for each in process.children(recursive=True) if "RayTrainWorker" in each.name() + " ".join(each.cmdline())
    ]


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_goes_on_from_its_last_checkpoint(tmp_path):
    pytest.importorskip("ray.train")
    storage, said = tmp_path / "run", tmp_path / "said.txt"
    command = [sys.executable, SCRIPT, "--storage", storage, "--steps", STEPS]
    until = time.monotonic() + SECONDS
    with said.open("w") as output:
        run = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, start_new_session=True)
        try:
            while not (storage / "trainer" / "checkpoint-30" / MANIFEST).exists():
                assert run.poll() is None and time.monotonic() < until, said.read_text()[-3000:]
                time.sleep(0.1)
            workers_below(psutil.Process(run.pid))[-1].send_signal(signal.SIGKILL)
            assert run.wait(timeout=until - time.monotonic()) == 0, said.read_text()[-3000:]
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    assert (storage / "trainer" / f"checkpoint-{STEPS}" / MANIFEST).exists()
    [step] = {
        line.split("at step ")[1].split(",")[0] for line in said.read_text().splitlines() if "resumed from" in line
    }
    assert 30 <= int(step) < STEPS
