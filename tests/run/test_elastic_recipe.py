"""The plain loop's recipe, restarted by torchrun's agents with another number of ranks."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from launching import ROOT, port_to_meet_on, run_forked
from safetensors.torch import load_file

SCRIPT = ROOT / "scripts" / "finetune_accelerate.py"
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
