"""Workers of torchrun's agents and of Ray, killed and restarted: training goes on with no hand laid on."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import elastic
import psutil
import pytest
import torch
from launching import ROOT, port_to_meet_on, run_forked
from safetensors.torch import load_file
from shared_ranks import run_on_ranks
from trainer_job import as_launched
from transformers.trainer import TRAINER_STATE_NAME

PLAIN = {"max_steps": 12, "save_steps": 3, "logging_steps": 3, "disable_tqdm": True, "report_to": "none", "step_s": 0.1}
SHAPE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def assert_went_on(outcome: elastic.Outcome, ranks: int) -> None:
    assert outcome.ended, outcome.statuses
    assert outcome.ranks_after == ranks and outcome.resumed_at > 0
    assert elastic.is_each_row_once(elastic.rows_trained(outcome.starts), 480)
    assert outcome.starts[-1].whole_steps(4 * 2 * (ranks + 1) // ranks // 4)[-1] == PLAIN["max_steps"] - 1


@pytest.mark.slow
@pytest.mark.timeout(elastic.LIMIT_S + 60)
def test_one_of_two_agents_is_killed_and_the_other_ends_the_run(tmp_path):
    outcome = elastic.killed_run(
        tmp_path / "run",
        elastic.Network([elastic.Node(), elastic.Node()]),
        PLAIN | SHAPE | {"zero": "stage=2,checkpoint.resume=auto"},
        killed=1,
        after_step=7,
        pause_s=0.0,
    )
    assert_went_on(outcome, ranks=1)


@pytest.mark.slow
@pytest.mark.timeout(2 * elastic.LIMIT_S + 60)
@pytest.mark.parametrize("killed", [0, 2])
def test_one_of_three_nodes_is_lost_and_the_others_go_on_as_by_hand(killed, tmp_path):
    with elastic.own_network(3) as network:
        outcome = elastic.killed_run(
            tmp_path / "run",
            network,
            PLAIN | SHAPE | {"save_steps": 2, "zero": "stage=2,checkpoint.resume=auto"},
            killed=killed,
            after_step=7,
            pause_s=0.0,
        )
    assert_went_on(outcome, ranks=2)
    assert outcome.at_step - outcome.resumed_at <= 4
    assert elastic.compared(tmp_path / "run", outcome, PLAIN | {"save_steps": 2}, 3) == "bit for bit"


SCRIPT = ROOT / "scripts" / "finetune_accelerate.py"
# ---- the plain loop's recipe ----

WITHOUT_DROPOUT = "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
SIZE = f"hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,{WITHOUT_DROPOUT}"


def trains(output: Path, ranks: int, restarts: int) -> dict[str, torch.Tensor]:
    """Four steps of eight rows, of which those are left out that a good state has; the weights at the end."""
    agents = {
        "TORCHELASTIC_RUN_ID": "elastic",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "ACCELERATE_USE_CPU": "true",
    }
    if ranks == 1:
        agents |= {name: "0" for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")}
        agents |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        agents |= {"MASTER_PORT": str(port_to_meet_on())}
    words = {
        "--zero": 2,
        "--output_dir": output,
        "--config_overrides": SIZE,
        "--max_train_samples": 32,
        "--max_eval_samples": 4,
        "--max_seq_length": 16,
        "--num_train_epochs": 1,
        "--per_device_train_batch_size": 4,
        "--global_batch_size": 8,
        "--num_warmup_steps": 1,
        "--learning_rate": 1e-3,
        "--checkpointing_steps": 1,
        "--resume_from_checkpoint": "auto",
    }
    arguments = [word for pair in words.items() for word in pair]
    done = run_forked(SCRIPT, arguments, environment=os.environ | agents, processes=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((output / "results.json").read_text())["processes"] == ranks
    return load_file(output / "model.safetensors")


def lose(output: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(output / f"step_{step}")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_plain_recipe_goes_on_from_two_ranks_to_one_and_back_with_the_same_rows(tmp_path):
    expected = trains(tmp_path, 2, 0)
    lose(tmp_path, 2, 3, 4)
    alone = trains(tmp_path, 1, 1)
    assert {path.name for path in tmp_path.glob("step_*")} == {f"step_{step}" for step in (1, 2, 3, 4)}
    # The second was saved by one rank.
    lose(tmp_path, 3, 4)
    again = trains(tmp_path, 2, 2)
    moved = max((value - alone[name]).abs().max() for name, value in expected.items())
    assert moved < 1e-5
    for name, value in expected.items():
        assert torch.allclose(again[name], value, rtol=1e-5, atol=1e-5), name


RAY_SCRIPT = Path(__file__).resolve().parents[2] / "configs" / "launch" / "ray_train.py"
# ---- Ray ----

MANIFEST = "zero/manifest.json"
SECONDS = 400
STEPS = 80
"""Enough to be in the middle of when the sixth checkpoint is there."""


def workers_below(process: psutil.Process) -> list[psutil.Process]:
    return [
        each for each in process.children(recursive=True) if "RayTrainWorker" in each.name() + " ".join(each.cmdline())
    ]


def trains_without_ray(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    runpy.run_path(str(RAY_SCRIPT))["train_worker"]({"output_dir": folder, "steps": STEPS, "gpu": False})


def losses_of(checkpoint: Path) -> list[float]:
    history = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_worker_is_killed_goes_on_from_its_last_checkpoint(tmp_path):
    pytest.importorskip("ray.train", reason="ray[train] is not among the tests' packages")
    storage, said = tmp_path / "run", tmp_path / "said.txt"
    command = [sys.executable, RAY_SCRIPT, "--storage", storage, "--steps", STEPS]
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
    run_on_ranks(trains_without_ray, folder=str(tmp_path / "alone"))
    assert losses_of(storage / "trainer" / f"checkpoint-{STEPS}") == losses_of(
        tmp_path / "alone" / f"checkpoint-{STEPS}"
    )
