"""What a run says of its saves and resumes: which checkpoint it goes on from, and on a terminal how far a long one is."""

import io
import sys

import pytest
import torch
from accelerate_job import make_accelerator
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from ranks import run_ranks
from trainer_job import as_launched, make_trainer
from training import adamw_in_two_groups, gpt2, gpt2_batch

from hf_zero.integrations import state_io
from hf_zero.integrations.state_io import progress_bar

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}


class Terminal(io.StringIO):
    """What was written to a terminal."""

    def isatty(self) -> bool:
        return True


def said_by(rank: int, world_size: int, jobs: list[tuple], is_terminal: bool = True) -> list[str]:
    """What each of these Trainer runs prints to stderr: door, folder, the checkpoint to resume from, and arguments."""
    as_launched(rank, world_size)
    state_io._PATIENCE_S = 0.0
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
    first, other = run_ranks(said_by, world_size=2, time_limit_s=100, keyword_arguments={"jobs": jobs})
    assert [lines_with("resumed", said) for said in first] == [
        [],
        [
            f"hf_zero: resumed from {ours}/checkpoint-2 at step 2, saved by 2 ranks at stage 2; going on with 2 ranks at stage 3."
        ],
        [
            f"hf_zero: resumed from {ours}/checkpoint-4 at step 4, saved by 2 ranks at stage 3; going on with 2 ranks at stage 1."
        ],
    ]
    assert not any(lines_with("resumed", said) for said in other)
    jobs = [
        ("ddp", plain, None, {}),
        ("flag 0", plain, f"{plain}/checkpoint-2", more),
        ("flag 3", ours, f"{ours}/checkpoint-2", more),
    ]
    [[_, of_plain, of_two]] = run_ranks(said_by, world_size=1, time_limit_s=100, keyword_arguments={"jobs": jobs})
    assert "checkpoint-2 at step 2, saved by plain Trainer; going on with 1 rank at stage 0." in of_plain
    assert "checkpoint-2 at step 2, saved by 2 ranks at stage 2; going on with 1 rank at stage 3." in of_two


@pytest.mark.short_cells("stage=3,checkpoint.layout=sharded")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "config", ["stage=2", "stage=2,checkpoint.async_save=false", "stage=3,checkpoint.layout=sharded"]
)
def test_a_save_that_training_waits_for_shows_a_bar_on_the_main_ranks_terminal(config, tmp_path):
    jobs = [(f"flag {config}", str(tmp_path), None, {}), (f"flag {config}", str(tmp_path), True, {"max_steps": 4})]
    first, other = run_ranks(said_by, world_size=2, time_limit_s=100, keyword_arguments={"jobs": jobs})
    assert lines_with("hf_zero: writing checkpoint-2", first[0])
    assert lines_with("hf_zero: reading optimizer state", first[1])
    assert not any(lines_with("hf_zero: writing", said) + lines_with("hf_zero: reading", said) for said in other)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_without_a_terminal_or_with_bars_turned_off_saves_are_quiet(tmp_path):
    jobs = [("flag 2", str(tmp_path), None, {}), ("flag 2", str(tmp_path), True, {"max_steps": 4})]
    arguments = {"jobs": jobs, "is_terminal": False}
    [said] = run_ranks(said_by, world_size=1, time_limit_s=100, keyword_arguments=arguments)
    jobs = [("flag 2", str(tmp_path / "off"), None, {"disable_tqdm": True})]
    [off] = run_ranks(said_by, world_size=1, time_limit_s=100, keyword_arguments={"jobs": jobs})
    assert not [line for text in (*said, *off) for line in lines_with("hf_zero: writing", text)]
    assert not [line for text in said for line in lines_with("hf_zero: reading", text)]


def logged_by(rank: int, world_size: int, folder: str) -> list[dict]:
    as_launched(rank, world_size)
    trainer = make_trainer("flag 2", "bert", folder, **SAVING | {"max_steps": 5, "logging_steps": 1})
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_the_log_has_a_saves_stall_once_and_nothing_of_what_one_rank_does_not_send(tmp_path):
    [entries] = run_ranks(logged_by, world_size=1, time_limit_s=60, keyword_arguments={"folder": str(tmp_path)})
    # A save comes behind the entry of its step.
    assert [entry["step"] for entry in entries if "zero/save_stall_s" in entry] == [3, 5]
    figures = {name for entry in entries for name in entry if name.startswith("zero/")}
    assert figures == {"zero/peak_mib", "zero/save_stall_s", "zero/samples_per_s"}


def saved_and_loaded(rank: int, world_size: int, folder: str) -> str:
    """What save_state and load_state of a loop print to stderr."""
    as_launched(rank, world_size)
    state_io._PATIENCE_S = 0.0
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
    first, other = run_ranks(saved_and_loaded, world_size=2, time_limit_s=60, keyword_arguments={"folder": folder})
    assert lines_with("hf_zero: writing optimizer state", first)
    assert lines_with("hf_zero: reading optimizer state", first)
    [line] = lines_with("resumed", first)
    assert line.endswith(
        f"hf_zero: resumed from {folder} after 3 optimizer steps, saved by 2 ranks at stage 2; going on with 2 ranks at stage 2."
    )
    assert "hf_zero:" not in other


def test_a_bar_is_for_the_main_rank_and_a_terminal_alone(monkeypatch):
    monkeypatch.setattr(state_io, "_PATIENCE_S", 0.0)

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
