"""What takes long shows how far it is: on a terminal, on the main rank, and where nobody has turned bars off."""

import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate_job import make_accelerator
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from ranks import run_ranks
from trainer_job import as_launched, make_trainer
from training import adamw_in_two_groups, gpt2
from transformers.utils import logging

from hf_zero import ZeroEngine
from hf_zero.checkpoint.hashes import CHUNK_BYTES, record_of
from hf_zero.checkpoint.verify import faults_of
from hf_zero.cli.consolidate import consolidate
from hf_zero.cli.verify import verify
from hf_zero.integrations import progress_bars
from hf_zero.integrations.progress_bars import progress_of

pytestmark = pytest.mark.timeout(120)


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """The process's error output is a terminal; what is given tells afterwards what was written to it."""
    master, slave = pty.openpty()
    # It begins without a width, and bars of none are empty.
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    written: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(master, 4096):
                written.append(part)
        except OSError:
            # How a terminal ends whose other side is closed.
            return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    before, sys.stderr = sys.stderr, os.fdopen(slave, "w")
    try:
        yield lambda: b"".join(written).decode()
    finally:
        sys.stderr.close()
        sys.stderr = before
        reader.join(5)
        os.close(master)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(progress_bars, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(progress_bars, "_EVERY_S", 0.0)


def saves(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    make_trainer("flag 3", "bert", folder, save_strategy="steps", save_steps=2, max_steps=2).train()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(saves, world_size=2, time_limit_s=100, keyword_arguments={"folder": str(folder)})
    return folder / "checkpoint-2"


def test_commands_show_how_far_they_are(checkpoint, tmp_path):
    with terminal() as said:
        verify(checkpoint)
    assert "hf_zero: checking checkpoint-2: " in said()
    with terminal() as said:
        consolidate(checkpoint, tmp_path / "model")
    assert "hf_zero: checking checkpoint-2" in said() and "hf_zero: writing weights: " in said()


def test_commands_are_quiet_elsewhere(checkpoint, capsys):
    verify(checkpoint)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("off", "on"),
    [(disable_progress_bars, enable_progress_bars), (logging.disable_progress_bar, logging.enable_progress_bar)],
    ids=["of the Hub", "of transformers"],
)
def test_both_libraries_switches_turn_bars_off(off, on, checkpoint):
    off()
    try:
        with terminal() as said:
            verify(checkpoint)
        assert said() == ""
    finally:
        on()


def built(rank: int, world_size: int) -> str:
    progress_bars._PATIENCE_S = progress_bars._EVERY_S = 0.0
    as_launched(rank, world_size)
    with terminal() as said:
        accelerator = make_accelerator("plugin stage=3", cpu=True)
        model = gpt2()
        accelerator.prepare(model, adamw_in_two_groups(model))
    return said()


def test_the_first_build_shows_its_bar_on_the_main_rank():
    first, other = run_ranks(built, world_size=2, time_limit_s=60)
    assert "hf_zero: building: " in first
    assert "building" not in other


def resumed(rank: int, world_size: int, folder: str) -> str:
    progress_bars._PATIENCE_S = progress_bars._EVERY_S = 0.0
    as_launched(rank, world_size)
    with terminal() as said:
        make_trainer("flag 3", "bert", folder, max_steps=3, disable_tqdm=False).train(resume_from_checkpoint=True)
    return said()


def test_a_resume_shows_that_it_checks_what_it_resumes_from(checkpoint):
    first, other = run_ranks(
        resumed, world_size=2, time_limit_s=100, keyword_arguments={"folder": str(checkpoint.parent)}
    )
    assert "hf_zero: checking the checkpoint: " in first
    assert "checking" not in other


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_tells_how_much_of_the_model_it_has(stage):
    model, told = gpt2(), []
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    ZeroEngine(model, [optimizer], stage, on_progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (nbytes, nbytes) and told == sorted(told)


def test_checking_files_tells_the_bytes_of_its_own_share(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (2 * CHUNK_BYTES + 5))
    (tmp_path / "b").write_bytes(b"")
    records = {name: record_of(tmp_path / name) for name in ("a", "b")}
    told: list[tuple[int, int]] = []
    assert faults_of(tmp_path, records, [("a", 1), ("a", 2), ("b", 0)], lambda *sizes: told.append(sizes)) == []
    assert told == [(CHUNK_BYTES, CHUNK_BYTES + 5), (CHUNK_BYTES + 5,) * 2]


def test_a_bar_begins_anew_for_the_next_of_several():
    with terminal() as said:
        with progress_of("checking") as show:
            for total in (100, 40):
                show(total // 2, total)
                show(total, total)
    assert said().count("100%") == 2
