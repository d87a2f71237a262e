"""The log of a run: by every door on rank 0 alone, without a change to what is trained, and with the run's own figures."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from accelerate_job import make_accelerator
from ranks import run_ranks
from report_runs import fails_at, lines_of, loops, of_kind, plain_loop, trains
from trainer_job import as_launched
from training import gpt2

from hf_zero import ConfigError, ZeroConfig, ZeroEngine
from hf_zero.checkpoint.structure import LOG_NAME, PAGE_NAME
from hf_zero.report.run_files import LogFile, ReportError

pytestmark = pytest.mark.timeout(180)


def on_ranks(target, world_size: int = 2, **arguments):
    return run_ranks(target, world_size=world_size, time_limit_s=120, keyword_arguments=arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[list[float]]]:
    """A Trainer run's folder, and the losses of its ranks."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, on_ranks(trains, folder=str(folder))


def test_a_trainer_run_leaves_its_log_and_its_page(trained):
    folder, [losses, _] = trained
    [start] = of_kind(folder, "start")
    assert (start["ranks"], start["stage"], start["step"], start["model"]) == (2, 2, 0, "GPT2LMHeadModel")
    logged = [line["values"]["loss"] for line in of_kind(folder, "log") if "loss" in line["values"]]
    assert logged == losses
    steps = of_kind(folder, "steps")
    assert sum(line["steps"] for line in steps) == 8 and steps[-1]["step"] == 8
    assert sum(line["rows"] for line in steps) == 8 * 4
    assert sum(line["tokens"] for line in steps) == 8 * 4 * 16
    assert {line["step"] for line in of_kind(folder, "stall") if line["what"] == "save"} == {4, 8}
    [end] = of_kind(folder, "end")
    assert (end["how"], end["step"]) == ("finished", 8)
    assert (folder / PAGE_NAME).is_file()


def test_one_step_is_followed_span_by_span(trained):
    [trace] = of_kind(trained[0], "trace")
    names = [name for name, *_ in trace["phases"]]
    assert trace["step"] == 5 and names == ["between steps", "forward", "backward", "optimizer step"]
    starts, ends = [start for _, start, _ in trace["phases"]], [end for *_, end in trace["phases"]]
    assert starts[1:] == ends[:-1] and ends[-1] == trace["seconds"]
    kinds = {kind for kind, *_ in trace["under_way"]}
    assert {"all-gather of parameters", "reduce-scatter of gradients"} <= kinds
    assert all(0 <= start < end <= trace["seconds"] for _, start, end in trace["under_way"] + trace["waits"])


def test_memory_is_told_while_gradients_are_there(trained):
    [start], memory = of_kind(trained[0], "start"), of_kind(trained[0], "memory")[0]
    held = {kind: nbytes for kind, nbytes, _, _ in memory["rows"]}
    for kind in ("parameters", "gradients"):
        assert held[kind] == start["plan"][kind] > 0
    assert 0.9 * start["plan"]["optimizer state"] <= held["optimizer state"] <= start["plan"]["optimizer state"]


def test_a_log_changes_nothing_of_what_is_trained(trained, tmp_path):
    plain = on_ranks(trains, folder=str(tmp_path), reported=False)
    assert plain == trained[1]
    assert not (tmp_path / LOG_NAME).exists() and not (tmp_path / PAGE_NAME).exists()


def test_a_resumed_run_goes_on_in_the_same_log(trained, tmp_path):
    folder = Path(shutil.copytree(trained[0], tmp_path / "run"))
    on_ranks(trains, folder=str(folder), resume=f"{folder}/checkpoint-4", max_steps=10)
    assert [line["step"] for line in of_kind(folder, "start")] == [0, 4]
    assert of_kind(folder, "steps")[-1]["step"] == 10


def test_a_run_that_fails_says_of_what(tmp_path):
    assert on_ranks(fails_at, folder=str(tmp_path), step=3) == ["the data is gone"] * 2
    assert lines_of(tmp_path)[-1]["how"] == "ValueError: the data is gone"
    assert "ValueError: the data is gone" in (tmp_path / PAGE_NAME).read_text()


@pytest.mark.slow
def test_an_accelerate_loop_leaves_its_log_where_the_project_is(tmp_path):
    first, other = on_ranks(loops, folder=str(tmp_path))
    assert first == {"is_open": True, "open_after": False} and not other["is_open"]
    values = [line["values"] for line in of_kind(tmp_path, "log")]
    assert len(values) == 6 and set(values[0]) == {"train_loss", "epoch"}
    assert of_kind(tmp_path, "steps")[-1]["step"] == 6
    assert [line["step"] for line in of_kind(tmp_path, "stall")] == [3]
    # Another run of the same script, which loads the state, is known to go on from the step that it was saved behind.
    on_ranks(loops, folder=str(tmp_path), load=True)
    assert [line["step"] for line in of_kind(tmp_path, "start")] == [0, 3]


def test_a_loss_is_found_without_a_word_of_the_script(tmp_path):
    on_ranks(loops, world_size=1, folder=str(tmp_path), tracked=False)
    assert not of_kind(tmp_path, "log")
    assert all(0 < line["loss"] < 10 and line["grad_norm"] > 0 for line in of_kind(tmp_path, "steps"))


def test_a_plain_loop_records_on_the_first_rank(tmp_path):
    first, other = on_ranks(plain_loop, folder=str(tmp_path / "deep" / "run"))
    assert (first[1], other[1]) == ("6", "0")
    assert sum(line["steps"] for line in of_kind(tmp_path / "deep" / "run", "steps")) == 6


def test_an_engine_by_itself_refuses_the_setting_and_names_the_way():
    model = gpt2()
    with pytest.raises(ConfigError, match=r"RunRecorder\(engine"):
        ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"stage": 2, "report": True})


def without_folder(rank: int, world_size: int) -> str:
    as_launched(rank, world_size)
    accelerator = make_accelerator("plugin stage=2,report=true", cpu=True)
    model = gpt2()
    with pytest.raises(ConfigError) as raised:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return str(raised.value)


def test_a_loop_without_a_folder_is_told_so_on_every_rank():
    said = on_ranks(without_folder)
    assert all("project_dir" in text and "report: runs/first" in text for text in said)


@pytest.mark.parametrize("value", ["true", "auto", "", 1, 2.5, ["a"], "a\0b"])
def test_what_is_neither_a_switch_nor_a_folder_is_refused(value):
    with pytest.raises(ConfigError, match="report"):
        ZeroConfig(report=value)


def test_the_setting_is_read_from_flags():
    assert ZeroConfig.from_flag("stage=2,report=true").report is True
    assert ZeroConfig.from_flag("stage=2,report=runs/first").report == "runs/first"


def test_a_full_disk_ends_the_log_and_not_the_training(tmp_path, capsys):
    log = LogFile(tmp_path)

    def full(_text: str) -> None:
        raise OSError(28, "No space left on device")

    log._file.close()
    log._file = type("Full", (), {"closed": False, "write": staticmethod(full), "close": lambda self: None})()
    log.write("steps", 1)
    assert "cannot be written any more" in capsys.readouterr().err


@pytest.mark.parametrize("put", [os.symlink, os.link])
def test_a_log_that_is_a_link_is_refused_and_its_target_stays(tmp_path, put):
    (tmp_path / "victim").write_text("keep")
    put(tmp_path / "victim", tmp_path / LOG_NAME)
    with pytest.raises(ReportError, match="is a link or not a regular file"):
        LogFile(tmp_path)
    assert (tmp_path / "victim").read_text() == "keep"


def test_a_line_after_one_that_was_cut_off_is_a_line_of_its_own(tmp_path):
    (tmp_path / LOG_NAME).write_text('{"kind":"start","ti')
    log = LogFile(tmp_path)
    log.write("end", 3, how="finished", loss=float("nan"))
    log.close()
    cut_off, last = (tmp_path / LOG_NAME).read_text().splitlines()
    assert cut_off == '{"kind":"start","ti' and '"loss":"nan"' in last
