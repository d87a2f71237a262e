"""`accelerator.save_state`: written aside and renamed when it is whole, beside what a script keeps in the same folder."""

import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from ranks import run_ranks
from trainer_job import as_launched
from training import gpt2, gpt2_batch

from hf_zero import ZeroPlugin
from hf_zero.checkpoint.files import CheckpointError
from hf_zero.integrations import accelerator as door
from hf_zero.integrations.verify import checkpoint_faults

pytestmark = pytest.mark.timeout(120)


def saves_and_fails(rank: int, world_size: int, folder: str) -> str:
    """Saves; steps; fails to save once more, on one rank; loads. What came back is the first state."""
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    torch.manual_seed(0)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step() -> float:
        loss = model(**gpt2_batch(torch.Generator().manual_seed(rank), 2)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    assert accelerator.save_state(folder) == folder
    expected = step()
    stock = door.seal_state

    def fails(engine, root, manifest, **kwargs):
        if rank == 1:
            next((root / "zero").glob("rank-00001*")).unlink()
        stock(engine, root, manifest, **kwargs)

    door.seal_state = fails
    with pytest.raises(CheckpointError) as refused:
        accelerator.save_state(folder)
    door.seal_state = stock
    accelerator.load_state(folder)
    assert step() == expected
    # Once more in its own place, and beside a file of the script's.
    accelerator.save_state(folder)
    if rank == 0:
        Path(folder, "notes.txt").write_text("mine")
    accelerator.wait_for_everyone()
    accelerator.save_state(folder)
    return str(refused.value)


def test_a_save_that_fails_leaves_the_state_that_was_there(tmp_path):
    for said in run_ranks(
        saves_and_fails, world_size=2, time_limit_s=100, keyword_arguments={"folder": str(tmp_path / "state")}
    ):
        assert "rank" in said and "could not" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
    assert (tmp_path / "state" / "notes.txt").read_text() == "mine"
    assert checkpoint_faults(tmp_path / "state", "zero") == []


def saves_twice(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    model = gpt2()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.save_state(folder)
    accelerator.load_state(folder)


def test_a_link_to_a_folder_on_another_disk_stays_one(tmp_path):
    there = tmp_path / "disk" / "here"
    there.mkdir(parents=True)
    (tmp_path / "state").symlink_to(there)
    run_ranks(saves_twice, world_size=1, time_limit_s=60, keyword_arguments={"folder": str(tmp_path / "state")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "state"] and (tmp_path / "state").is_symlink()
    assert list(there.parent.iterdir()) == [there] and checkpoint_faults(there, "zero") == []


def names_no_folder(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    model = gpt2()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"save_state\(\) was called without a folder.*Give the folder, or Project"):
        accelerator.save_state()
    with pytest.raises(
        ValueError, match=r"to different folders: .*/step0/state, .*/step1/state\. .* the same one on every"
    ):
        accelerator.save_state(f"{folder}/step{rank}/state")
    with pytest.raises(ValueError, match=r"load_state\(\) was called without a folder.*is off\. Give the folder"):
        accelerator.load_state()
    Path(folder, f"file{rank}").touch()
    accelerator.wait_for_everyone()
    with pytest.raises(ValueError, match=r"file0 is a file, and a state is a folder"):
        accelerator.save_state(f"{folder}/file0")


def test_a_state_without_a_folder_is_refused_in_words(tmp_path):
    run_ranks(names_no_folder, world_size=2, time_limit_s=60, keyword_arguments={"folder": str(tmp_path)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file0", "file1"]


def saves_by_number(rank: int, world_size: int, folder: str) -> list[list[str]]:
    as_launched(rank, world_size)
    naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=1), project_config=naming)
    model = gpt2()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    seen = []
    for _ in range(4):
        accelerator.save_state()
        accelerator.wait_for_everyone()
        seen.append(sorted(os.listdir(f"{folder}/checkpoints")))
        accelerator.wait_for_everyone()
    accelerator.load_state()
    naming.iteration = 3
    with pytest.raises(ValueError, match=r"checkpoint_3 is there already\. Set .*iteration"):
        accelerator.save_state()
    return seen


def test_accelerates_own_names_and_limit_are_kept(tmp_path):
    for seen in run_ranks(saves_by_number, world_size=2, time_limit_s=100, keyword_arguments={"folder": str(tmp_path)}):
        assert seen == [
            ["checkpoint_0"],
            ["checkpoint_0", "checkpoint_1"],
            ["checkpoint_1", "checkpoint_2"],
            ["checkpoint_2", "checkpoint_3"],
        ]
