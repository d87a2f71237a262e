"""Shards in the nodes' memory: a run that has lost a node goes on from there, as from a checkpoint on the disk."""

import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from ranks import run_ranks
from trainer_job import as_launched, make_trainer
from training import gpt2
from transformers import TrainerCallback

from hf_zero import ConfigError, ZeroConfig, ZeroPlugin
from hf_zero.checkpoint.format.manifest import Manifest
from hf_zero.comm.peers.file_server import Address, FileServer, fetch_file
from hf_zero.integrations.elastic import node_memory

pytestmark = pytest.mark.timeout(300)

SETTINGS = "checkpoint.resume=auto,checkpoint.replicate=neighbour,checkpoint.replicate_every=2"


class Ending(Exception):
    """What ends a run in the middle."""


class EndAt(TrainerCallback):
    def __init__(self, step: int):
        self._step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            raise Ending


def train(
    rank: int,
    world_size: int,
    folder: str,
    nodes: list[int],
    end_at: int | None = None,
    stage: int = 2,
    settings: str = SETTINGS,
    resume: str | None = None,
    **overrides,
) -> dict:
    """A Trainer whose rank r is on node `nodes[r]`, and so has the memory of that."""
    as_launched(rank, world_size)
    node_memory.MEMORY = Path(folder, f"node{nodes[rank]}")
    node_memory.MEMORY.mkdir(exist_ok=True)
    overrides = {"max_steps": 6, "dropout": 0.1, "save_strategy": "steps", "save_steps": 4, **overrides}
    callbacks = [] if end_at is None else [EndAt(end_at)]
    door = f"flag stage={stage},{settings}" if settings else f"flag {stage}"
    trainer = make_trainer(door, "gpt2", f"{folder}/out", callbacks=callbacks, **overrides)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Ending:
        return {"ended": True}
    logged = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"losses": logged, "left": [path.name for path in node_memory.MEMORY.iterdir()]}


def run(nodes: list[int], folder: Path, **arguments) -> list[dict]:
    keywords = {"folder": str(folder), "nodes": nodes, **arguments}
    return run_ranks(train, world_size=len(nodes), time_limit_s=250, keyword_arguments=keywords)


def generations(node: Path) -> list[Path]:
    return sorted(node.glob("hf_zero-*/checkpoint-*"))


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_that_has_lost_a_node_goes_on_from_memory_as_from_the_disk(stage, tmp_path):
    run([0, 1, 2], tmp_path, end_at=5, stage=stage)
    assert [[path.name for path in generations(tmp_path / f"node{n}")] for n in range(3)] == [
        ["checkpoint-2", "checkpoint-4"]
    ] * 3
    shutil.rmtree(tmp_path / "node1")
    shutil.copytree(tmp_path / "out", tmp_path / "disk" / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    outcomes = run([2, 0], tmp_path, stage=stage)
    by_hand = run(
        [2, 0],
        tmp_path / "disk",
        stage=stage,
        settings="",
        resume=str(tmp_path / "disk" / "out" / "checkpoint-4"),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
    )
    assert outcomes[0]["losses"] == by_hand[0]["losses"] and len(by_hand[0]["losses"]) == 6
    assert [outcome["left"] for outcome in outcomes] == [[], []]


@pytest.mark.slow
def test_a_generation_without_all_of_its_files_is_passed_over_for_the_one_before_or_the_disk(tmp_path):
    run([0, 0, 1], tmp_path, end_at=5)
    for node in (0, 1):
        newest = generations(tmp_path / f"node{node}")[-1]
        manifest = Manifest.read(newest / "zero")
        assert manifest.elsewhere == () and len([name for name in manifest.files if "rank-" in name]) == 3
        next(newest.glob("zero/rank-00001*")).write_bytes(b"half")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    assert min(run([0], tmp_path, max_steps=4)[0]["losses"]) == 1
    assert not generations(tmp_path / "node0")


@pytest.mark.slow
def test_memory_of_a_run_whose_output_dir_was_emptied_is_not_taken(tmp_path):
    run([0, 1], tmp_path, end_at=3)
    shutil.rmtree(tmp_path / "out")
    outcome = run([0], tmp_path, max_steps=2, learning_rate=0.5)[0]
    assert list(outcome["losses"]) == [1, 2] and outcome["left"] == []


def test_a_file_is_sent_to_those_who_know_the_secret_and_none_from_outside_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(bytes(range(256)) * 9000)
    (tmp_path / "outside").write_text("no")
    server = FileServer(tmp_path / "in", "0" * 32)
    assert fetch_file(server.address, "file", tmp_path / "got") == 256 * 9000
    assert (tmp_path / "got").read_bytes() == (tmp_path / "in" / "file").read_bytes()
    for name in ("../outside", "missing", str(tmp_path / "outside")):
        with pytest.raises(FileNotFoundError, match="has no"):
            fetch_file(server.address, name, tmp_path / "never")
    stranger = Address(server.address.host, server.address.port, "1" * 32)
    with pytest.raises(OSError):
        fetch_file(stranger, "file", tmp_path / "never")
    server.close()
    with pytest.raises(OSError):
        fetch_file(server.address, "file", tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicate": "neighbour"}, r"Set `checkpoint\.resume: auto`"),
        ({"replicate_every": 3}, r"nothing is kept with `checkpoint\.replicate: none`"),
        ({"replicate": "disk"}, r"allowed: none, neighbour"),
        ({"resume": "always"}, r"allowed: asked, auto"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        ZeroConfig.from_dict({"stage": 2, "checkpoint": settings})


def prepares_by_itself(rank: int, world_size: int) -> None:
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(f"stage=2,{SETTINGS}"))
    model = gpt2()
    with pytest.raises(ConfigError, match=r"`checkpoint\.replicate: neighbour` is of Trainer.*call save_state"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_a_loop_that_saves_by_itself_is_told_that_nobody_replicates_for_it():
    run_ranks(prepares_by_itself, world_size=1, time_limit_s=100, keyword_arguments={})
