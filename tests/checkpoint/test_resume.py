"""Runs that go on: from which checkpoint, on how many ranks, what they say of it, and what they refuse before they train."""

import errno
import io
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from accelerate_job import make_accelerator
from cells import short_rows
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from hypothesis import given
from hypothesis import strategies as st
from shared_ranks import on_ranks, run_on_ranks
from trainer_job import as_launched, make_trainer
from training import adamw_in_two_groups, bert, gpt2, gpt2_batch
from transformers import Trainer, TrainerState

from hf_zero import ZeroPlugin, last_good_state, same_global_batch
from hf_zero.checkpoint.commit import begin, commit
from hf_zero.checkpoint.disks import Disk
from hf_zero.integrations import progress_bars
from hf_zero.integrations.agents_store import trap_of_agents_store
from hf_zero.integrations.data_position import DataPosition
from hf_zero.integrations.progress_bars import progress_bar
from hf_zero.integrations.resume import state_faults

pytestmark = pytest.mark.timeout(300)
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}


def saves(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    make_trainer("flag 2", "bert", folder, **SAVING).train()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run's output_dir with `checkpoint-2` of two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    run_on_ranks(saves, folder=str(folder))
    return folder


def refuses(rank: int, world_size: int, stage: int, folder: str, resume: str | None, model: str, hidden: int) -> str:
    """What ends a run before its first step."""
    as_launched(rank, world_size)

    def adapt(made):
        return made if model != "bert" or hidden == 24 else type(made)(_with_hidden_size(made.config, hidden))

    trainer = make_trainer(f"flag {stage}", model, folder, adapt=adapt, **{**SAVING, "max_steps": 4})
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ValueError as error:
        assert trainer.state.global_step in (0, 2)
        return str(error)
    return ""


def _with_hidden_size(config, hidden: int):
    config.hidden_size = hidden
    return config


def refusal(tmp_path: Path, **case: object) -> str:
    """All ranks' one message."""
    plain = {"stage": 2, "resume": None, "model": "bert", "hidden": 24}
    said = set(run_on_ranks(refuses, folder=str(tmp_path), **(plain | case)))
    assert len(said) == 1, said
    return said.pop()


def test_a_folder_of_checkpoints_is_refused_with_the_newest_that_is_inside(trained, tmp_path):
    said = refusal(tmp_path, resume=str(trained))
    assert f"cannot resume from '{trained}': it is a folder of checkpoints; " in said
    assert f"pass the newest of them, '{trained}/checkpoint-2'" in said


def test_a_checkpoint_comes_back_by_its_name_whose_replacement_was_killed_between_the_two_renames(trained, tmp_path):
    shutil.copytree(trained / "checkpoint-2", tmp_path / ".old-checkpoint-2")
    assert refusal(tmp_path, resume=str(tmp_path / "checkpoint-2")) == ""
    assert (tmp_path / "checkpoint-4").is_dir() and not (tmp_path / ".old-checkpoint-2").exists()


@pytest.mark.parametrize(
    ("stage", "model", "hidden"),
    short_rows([(2, "bert", 60), (3, "bert", 60), (2, "gpt2", 48)], [(3, "bert", 60), (2, "gpt2", 48)]),
)
def test_a_checkpoint_of_another_model_is_refused_with_a_tensor_that_differs(stage, model, hidden, trained, tmp_path):
    said = refusal(tmp_path, stage=stage, model=model, hidden=hidden, resume=str(trained / "checkpoint-2"))
    assert said.startswith("hf_zero: ") and "checkpoint-2" in said
    assert re.search(r"bert\.embeddings|transformer\.", said), said
    assert re.search(r"[Rr]esume (with|from)|build the model", said), said


def on_a_read_only_disk(rank: int, world_size: int, folder: str) -> str:
    touch = Path.touch

    def refused(path: Path, *args: object, **kwargs: object) -> None:
        if str(path).startswith(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        touch(path, *args, **kwargs)

    with mock.patch.object(Path, "touch", refused):
        return refuses(rank, world_size, 2, folder, None, "bert", 24)


def test_an_output_dir_that_cannot_be_written_to_is_said_before_the_first_step(tmp_path):
    [said] = run_on_ranks(on_a_read_only_disk, world_size=1, folder=str(tmp_path))
    assert said.startswith(f"hf_zero: rank 0 could not write to {tmp_path}: OSError: [Errno 30] Read-only file system")
    assert "Nothing was trained. Make the folder writable" in said and "save_strategy='no'" in said


def loads_the_parent(rank: int, world_size: int, folder: str) -> str:
    as_launched(rank, world_size)
    accelerator = make_accelerator("attach 2", cpu=True)
    model = bert()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError) as raised:
        accelerator.load_state(folder)
    return str(raised.value)


def test_load_state_of_a_parent_folder_names_the_state_inside(trained):
    [said] = run_on_ranks(loads_the_parent, world_size=1, folder=str(trained))
    assert f"checkpoint-2 is inside: load_state('{trained}/checkpoint-2')." in said


def test_a_trainers_state_without_the_batch_size_that_it_calculates_with_is_a_fault(tmp_path):
    path = tmp_path / "trainer_state.json"
    TrainerState(train_batch_size=4).save_to_json(str(path))
    assert state_faults(tmp_path) == []
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"train_batch_size": None}))
    assert state_faults(tmp_path) == ["train_batch_size in trainer_state.json is None, which Trainer never writes"]
    del content["train_batch_size"]
    path.write_text(json.dumps(content))
    assert state_faults(tmp_path) == ["trainer_state.json lacks train_batch_size, which every Trainer writes"]


# ---- on other numbers of ranks ----

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
    return run_on_ranks(train, world_size=world_size, time_limit_s=250, output_dir=str(output_dir), **arguments)


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
    said = run_on_ranks(refused, output_dir=str(tmp_path))
    assert all("trainer_state.json is missing" in each and "repair or move them" in each for each in said)


def begins_again(rank: int, world_size: int, output_dir: str) -> list[str]:
    from transformers import logging

    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    said: list[str] = []
    logger = logging.get_logger("hf_zero.integrations.resume")
    logger.warning = said.append
    train(rank, world_size, output_dir, door="flag 2", save_strategy="no", max_steps=1)
    return said


def test_a_restart_that_begins_again_beside_checkpoints_says_what_to_set(begun):
    [said] = run_on_ranks(begins_again, world_size=1, output_dir=str(begun))
    assert len(said) == 1 and "restarted this run (2 times)" in said[0] and "`checkpoint.resume: auto`" in said[0]


# ---- rows of a step ----


@given(rows=st.integers(1, 9), accumulation=st.integers(1, 9), ranks=st.integers(1, 9), then=st.integers(1, 12))
def test_a_step_keeps_its_rows_wherever_they_can_be_shared(rows, accumulation, ranks, then):
    wanted = rows * accumulation * ranks
    if then > wanted:
        with pytest.raises(ValueError, match=f"a step of {wanted} rows cannot be distributed over {then} ranks"):
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


@on_ranks(2)
def test_a_loop_finds_the_last_good_state_on_all_ranks_and_saves_under_a_number_of_its_own(rank, world_size, tmp_path):
    folder = str(tmp_path)
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
    with pytest.raises(ValueError, match=r"no state in .* is good: checkpoint_1: .*rank-00001.*repair or move"):
        last_good_state(accelerator)
    assert seen == [None, "checkpoint_0", True, "checkpoint_2"]


def killed_between_the_renames(final: Path) -> None:
    """Another process commits a state in the place of `final`, and dies when the former one has stepped aside."""
    child = os.fork()
    if child == 0:
        rename = Path.rename
        Path.rename = lambda path, to: (
            os.kill(os.getpid(), signal.SIGKILL) if path.name.startswith(".tmp-") else rename(path, to)
        )
        temporary = begin(final, needed_bytes=0, disk=Disk.shared(), merge=lambda value: value)
        commit(temporary, final, disk=Disk.shared(), merge=lambda value: value)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL and not final.exists()


@on_ranks(2)
def test_a_state_comes_back_whose_replacement_was_killed_between_the_two_renames(rank, world_size, tmp_path):
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    (tmp_path / "link").symlink_to(tmp_path / "state") if rank == 0 else None
    accelerator.save_state(str(tmp_path / "state_1"))
    saved = [parameter.clone() for parameter in model.parameters()]
    accelerator.save_state(str(tmp_path / "state"))
    for find in ("state", "link", "last good"):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            killed_between_the_renames(tmp_path / ("state_1" if find == "last good" else "state"))
        accelerator.wait_for_everyone()
        found = last_good_state(accelerator, tmp_path) if find == "last good" else str(tmp_path / find)
        assert find != "last good" or found == str(tmp_path / "state_1")
        accelerator.load_state(found)
        assert all(map(torch.equal, model.parameters(), saved))


@pytest.mark.parametrize(
    ("changes", "is_trap"),
    [({}, True), ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False), ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False)],
)
def test_workers_that_would_meet_in_the_store_of_earlier_ones_are_told_what_to_set(changes, is_trap):
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    trap = trap_of_agents_store(environment | changes)
    assert (trap is not None and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in trap) == is_trap


# ---- what a run says of its saves ----


class Terminal(io.StringIO):
    """What was written to a terminal."""

    def isatty(self) -> bool:
        return True


def said_by(rank: int, world_size: int, jobs: list[tuple], is_terminal: bool = True) -> list[str]:
    """What each of these Trainer runs prints to stderr: door, folder, the checkpoint to resume from, and arguments."""
    as_launched(rank, world_size)
    progress_bars._PATIENCE_S = 0.0
    said = []
    for door, folder, resume, overrides in jobs:
        sys.stderr = Terminal() if is_terminal else io.StringIO()
        make_trainer(door, "bert", folder, **SAVING | {"disable_tqdm": False} | overrides).train(
            resume_from_checkpoint=resume
        )
        said.append(sys.stderr.getvalue())
        sys.stderr = sys.__stderr__
    return said


def lines_with(words: str, said: str) -> list[str]:
    return [line for line in said.replace("\r", "\n").splitlines() if words in line]


@pytest.mark.timeout(240)
def test_a_resume_names_folder_step_and_who_saved_it(tmp_path):
    ours, plain, more = str(tmp_path / "ours"), str(tmp_path / "plain"), {"max_steps": 4}
    jobs = [
        ("flag 2", ours, None, {}),
        ("flag 3", ours, f"{ours}/checkpoint-2", more),
        ("flag 1", ours, "last-good", {"max_steps": 6}),
    ]
    first, other = run_on_ranks(said_by, jobs=jobs)
    assert [lines_with("resumed", said) for said in first] == [
        [],
        [
            f"hf_zero: resumed from {ours}/checkpoint-2 at step 2, saved by 2 ranks at stage 2; "
            "continuing with 2 ranks at stage 3."
        ],
        [
            f"hf_zero: resumed from {ours}/checkpoint-4 at step 4, saved by 2 ranks at stage 3; "
            "continuing with 2 ranks at stage 1."
        ],
    ]
    assert not any(lines_with("resumed", said) for said in other)
    jobs = [
        ("ddp", plain, None, {}),
        ("flag 0", plain, f"{plain}/checkpoint-2", more),
        ("flag 3", ours, f"{ours}/checkpoint-2", more),
    ]
    [[_, of_plain, of_two]] = run_on_ranks(said_by, world_size=1, jobs=jobs)
    assert "checkpoint-2 at step 2, saved by plain Trainer; continuing with 1 rank at stage 0." in of_plain
    assert "checkpoint-2 at step 2, saved by 2 ranks at stage 2; continuing with 1 rank at stage 3." in of_two


@pytest.mark.short_cells("stage=3,checkpoint.layout=sharded")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "config", ["stage=2", "stage=2,checkpoint.async_save=false", "stage=3,checkpoint.layout=sharded"]
)
def test_a_save_that_training_waits_for_shows_a_bar_on_the_main_ranks_terminal(config, tmp_path):
    jobs = [(f"flag {config}", str(tmp_path), None, {}), (f"flag {config}", str(tmp_path), True, {"max_steps": 4})]
    first, other = run_on_ranks(said_by, jobs=jobs)
    assert lines_with("hf_zero: writing checkpoint-2", first[0])
    assert lines_with("hf_zero: reading optimizer state", first[1])
    assert not any(lines_with("hf_zero: writing", said) + lines_with("hf_zero: reading", said) for said in other)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_without_a_terminal_or_with_bars_turned_off_saves_are_quiet(tmp_path):
    jobs = [("flag 2", str(tmp_path), None, {}), ("flag 2", str(tmp_path), True, {"max_steps": 4})]
    [said] = run_on_ranks(said_by, world_size=1, jobs=jobs, is_terminal=False)
    jobs = [("flag 2", str(tmp_path / "off"), None, {"disable_tqdm": True})]
    [off] = run_on_ranks(said_by, world_size=1, jobs=jobs)
    assert not [line for text in (*said, *off) for line in lines_with("hf_zero: writing", text)]
    assert not [line for text in said for line in lines_with("hf_zero: reading", text)]


def logged_by(rank: int, world_size: int, folder: str) -> list[dict]:
    as_launched(rank, world_size)
    trainer = make_trainer("flag 2", "bert", folder, **SAVING | {"max_steps": 5, "logging_steps": 1})
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_the_log_has_a_saves_stall_once_and_nothing_of_what_one_rank_does_not_send(tmp_path):
    [entries] = run_on_ranks(logged_by, world_size=1, folder=str(tmp_path))
    # A save comes behind the entry of its step.
    assert [entry["step"] for entry in entries if "zero/save_stall_s" in entry] == [3, 5]
    figures = {name for entry in entries for name in entry if name.startswith("zero/")}
    assert figures == {"zero/peak_mib", "zero/save_stall_s", "zero/samples_per_s"}


def saved_and_loaded(rank: int, world_size: int, folder: str) -> str:
    """What save_state and load_state of a loop print to stderr."""
    as_launched(rank, world_size)
    progress_bars._PATIENCE_S = 0.0
    accelerator = make_accelerator("plugin 2", cpu=True)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, adamw_in_two_groups(model))
    for seed in range(3):
        accelerator.backward(model(**gpt2_batch(torch.Generator().manual_seed(seed), 1)).loss)
        optimizer.step()
        optimizer.zero_grad()
    sys.stderr = Terminal()
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    said, sys.stderr = sys.stderr.getvalue(), sys.__stderr__
    return said


def test_a_loops_state_is_saved_and_loaded_with_bars_and_says_what_is_resumed(tmp_path):
    folder = str(tmp_path / "state")
    first, other = run_on_ranks(saved_and_loaded, folder=folder)
    assert lines_with("hf_zero: writing optimizer state", first)
    assert lines_with("hf_zero: reading optimizer state", first)
    [line] = lines_with("resumed", first)
    assert line.endswith(
        f"hf_zero: resumed from {folder} after 3 optimizer steps, saved by 2 ranks at stage 2; "
        "continuing with 2 ranks at stage 2."
    )
    assert "hf_zero:" not in other


def test_a_bar_is_for_the_main_rank_and_a_terminal_alone(monkeypatch):
    monkeypatch.setattr(progress_bars, "_PATIENCE_S", 0.0)

    def shown(file: io.StringIO, *, is_main: bool) -> str:
        monkeypatch.setattr(sys, "stderr", file)
        with progress_bar("writing it", 100, is_main=is_main) as show:
            show(60)
        return file.getvalue()

    assert "hf_zero: writing it" in shown(Terminal(), is_main=True)
    assert shown(Terminal(), is_main=False) == shown(io.StringIO(), is_main=True) == ""
    disable_progress_bars()
    try:
        assert shown(Terminal(), is_main=True) == ""
    finally:
        enable_progress_bars()


def test_what_takes_no_time_shows_no_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("writing it", 100, is_main=True) as show:
        show(100)
    assert terminal.getvalue() == ""
