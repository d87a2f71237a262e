"""Runs that go on by themselves on other numbers of ranks: from the newest good checkpoint, with the rows that come next."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from trainer_job import as_launched, make_trainer
from training import gpt2, gpt2_batch
from transformers import Trainer

from hf_zero import ZeroPlugin, last_good_state, same_global_batch
from hf_zero.integrations.elastic import DataPosition, trap_of_agents_store

pytestmark = pytest.mark.timeout(300)

AUTO = "flag stage=2,checkpoint.resume=auto"


class LoggingTrainer(Trainer):
    """Notes the rows of each step, each by its first tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows: dict[int, list[tuple[int, ...]]] = {}

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.rows.setdefault(self.state.global_step, []).extend(map(tuple, inputs["input_ids"][:, :6].tolist()))
        return super().compute_loss(model, inputs, *args, **kwargs)


def train(rank: int, world_size: int, output_dir: str, resume: object = None, door: str = AUTO, **settings) -> dict:
    as_launched(rank, world_size)
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4, "dropout": 0.0, **settings}
    trainer = make_trainer(door, "gpt2", output_dir, trainer_class=LoggingTrainer, **settings)
    trainer.train(resume_from_checkpoint=resume)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    rates = {entry["step"]: entry["learning_rate"] for entry in logged}
    return {"rows": trainer.rows, "rates": rates, "losses": {entry["step"]: entry["loss"] for entry in logged}}


def run(world_size: int, output_dir: Path, **arguments) -> list[dict]:
    keywords = {"output_dir": str(output_dir), **arguments}
    return run_ranks(train, world_size=world_size, time_limit_s=250, keyword_arguments=keywords)


def rows_by_step(outcomes: list[dict]) -> dict[int, list[tuple[int, ...]]]:
    """The rows of each step on all ranks, in an order that does not depend on the ranks."""
    steps = sorted({step for outcome in outcomes for step in outcome["rows"]})
    return {step: sorted(row for outcome in outcomes for row in outcome["rows"].get(step, [])) for step in steps}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """The folder of a run of three ranks that has come to step 4 of an epoch of 20."""
    folder = tmp_path_factory.mktemp("begun")
    run(3, folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[dict]:
    return run(3, tmp_path_factory.mktemp("uninterrupted"), max_steps=8, door="flag 2", save_strategy="no")


def test_a_restart_on_fewer_ranks_takes_the_rows_that_come_next_in_steps_of_the_same_size(
    begun, uninterrupted, tmp_path
):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    went_on = run(2, tmp_path, max_steps=8)
    expected = rows_by_step(uninterrupted)
    assert rows_by_step(went_on) == {step: expected[step] for step in (4, 5, 6, 7)}
    assert all(len(rows) == 12 for rows in expected.values())
    for step in (5, 6, 7, 8):
        assert went_on[0]["rates"][step] == uninterrupted[0]["rates"][step]
        assert went_on[0]["losses"][step] == pytest.approx(uninterrupted[0]["losses"][step], rel=1e-5)
    assert DataPosition.read(tmp_path / "checkpoint-8") == DataPosition(global_rows=12, epoch=0, rows=96)


@pytest.mark.slow
def test_a_restart_on_ranks_that_cannot_share_a_step_begins_at_a_step_of_its_own_and_leaves_nothing_out(
    begun, tmp_path
):
    """12 rows are not 5 ranks': 10 a step. 48 rows were trained on, and 40 are four steps of 10."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    went_on = run(5, tmp_path, max_steps=24, num_train_epochs=1)
    steps = rows_by_step(went_on)
    assert {len(rows) for rows in steps.values()} == {10}
    taken = [row for rows in steps.values() for row in rows]
    assert len(set(taken)) == len(taken) == 200
    assert DataPosition.read(tmp_path / "checkpoint-24") == DataPosition(global_rows=12, epoch=1, rows=0)


def test_auto_begins_where_there_is_no_checkpoint_and_goes_on_from_the_one_asked_for_until_there_is(begun, tmp_path):
    [went_on] = run(1, tmp_path, resume=str(begun / "checkpoint-4"), max_steps=5)
    assert list(went_on["rows"]) == [4]
    assert len(went_on["rows"][4]) == 12


def refused(rank: int, world_size: int, output_dir: str) -> str:
    with pytest.raises(ValueError, match=r"resume: auto` finds no good checkpoint") as error:
        train(rank, world_size, output_dir)
    return str(error.value)


def test_auto_does_not_begin_again_beside_checkpoints_that_are_all_damaged(begun, tmp_path):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    said = run_ranks(refused, world_size=2, time_limit_s=100, keyword_arguments={"output_dir": str(tmp_path)})
    assert all("trainer_state.json is missing" in each and "mend or move them" in each for each in said)


def begins_again(rank: int, world_size: int, output_dir: str) -> list[str]:
    from transformers import logging

    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    said: list[str] = []
    logger = logging.get_logger("hf_zero.integrations.resume")
    logger.warning = said.append
    train(rank, world_size, output_dir, door="flag 2", save_strategy="no", max_steps=1)
    return said


def test_a_restart_that_begins_again_beside_checkpoints_says_what_to_set(begun):
    [said] = run_ranks(begins_again, world_size=1, time_limit_s=100, keyword_arguments={"output_dir": str(begun)})
    assert len(said) == 1 and "restarted this run (2 times)" in said[0] and "`checkpoint.resume: auto`" in said[0]


# ---- rows of a step ----


@given(rows=st.integers(1, 9), accumulation=st.integers(1, 9), ranks=st.integers(1, 9), then=st.integers(1, 12))
def test_a_step_keeps_its_rows_wherever_they_can_be_shared(rows, accumulation, ranks, then):
    wanted = rows * accumulation * ranks
    if then > wanted:
        with pytest.raises(ValueError, match=f"a step of {wanted} rows cannot be dealt to {then} ranks"):
            same_global_batch(wanted, rows=rows, world_size=then)
        return
    batch = same_global_batch(wanted, rows=rows, world_size=then)
    assert batch.world_size == then and 1 <= batch.rows <= rows
    if wanted % then == 0:
        assert batch.global_rows == wanted
    else:
        assert wanted - then * batch.accumulation < batch.global_rows <= wanted
    if wanted % (rows * then) == 0:
        assert batch.rows == rows


# ---- accelerate ----


def saves_and_goes_on(rank: int, world_size: int, folder: str) -> list[object]:
    as_launched(rank, world_size)
    naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2), project_config=naming)
    torch.manual_seed(0)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step() -> float:
        loss = model(**gpt2_batch(torch.Generator().manual_seed(rank), 2)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    seen: list[object] = [last_good_state(accelerator)]
    accelerator.save_state()
    expected = step()
    accelerator.save_state()
    if rank == 0:
        next(Path(folder, "checkpoints/checkpoint_1/zero").glob("rank-00001*")).write_bytes(b"")
    accelerator.wait_for_everyone()
    found = last_good_state(accelerator)
    accelerator.load_state(found)
    seen += [Path(found).name, step() == expected]
    seen.append(Path(accelerator.save_state()).name)
    if rank == 0:
        for number in (0, 2):
            shutil.rmtree(Path(folder, f"checkpoints/checkpoint_{number}"))
    accelerator.wait_for_everyone()
    with pytest.raises(ValueError, match=r"no state in .* is good: checkpoint_1: .*rank-00001.*mend or move"):
        last_good_state(accelerator)
    return seen


def test_a_loop_finds_the_last_good_state_on_all_ranks_and_saves_under_a_number_of_its_own(tmp_path):
    arguments = {"folder": str(tmp_path)}
    for seen in run_ranks(saves_and_goes_on, world_size=2, time_limit_s=100, keyword_arguments=arguments):
        assert seen == [None, "checkpoint_0", True, "checkpoint_2"]


@pytest.mark.parametrize(
    ("changes", "is_trap"),
    [
        ({}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
    ],
)
def test_workers_that_would_meet_in_the_store_of_earlier_ones_are_told_what_to_set(changes, is_trap):
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    trap = trap_of_agents_store(environment | changes)
    assert (trap is not None and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in trap) == is_trap
