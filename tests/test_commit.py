"""Trainer's checkpoints under kills, full disks and damage: a folder checkpoint-N is good, and the newest good one is found."""

import errno
import hashlib
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import PRELOADED_MODULES, joined_process_group, run_ranks
from trainer_job import as_launched, history, make_trainer
from transformers import Trainer, TrainerCallback

from hf_zero.checkpoint import commit as committing
from hf_zero.checkpoint.commit import begin, clear_leftovers, commit, temporary_of
from hf_zero.checkpoint.files import FileRecord, files_below
from hf_zero.checkpoint.manifest import CheckpointError, Manifest
from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.checkpoint.verify import checkpoint_faults, find_good, newest_first
from hf_zero.integrations import trainer as trainer_integration
from hf_zero.integrations.trainer_checkpoints import exchange_between_ranks

pytestmark = pytest.mark.timeout(180)

SAVING = {"max_steps": 10, "save_strategy": "steps", "save_steps": 2}
KILLS = 6
SLOW_KILLS = 200


def on_ranks(target: Callable, world_size: int = 2, **arguments) -> list:
    return run_ranks(target, world_size=world_size, time_limit_s=120, keyword_arguments=arguments)


def alone(value: object) -> list:
    return [value]


class Starts(TrainerCallback):
    """Notes the step that training starts from."""

    step = -1

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


def outcome_of(trainer: Trainer) -> dict:
    """The losses, and a hash of every bit of the model."""
    digest = hashlib.sha256()
    for name, value in trainer.model.state_dict().items():
        digest.update(name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {"losses": history(trainer)["losses"], "state": digest.hexdigest()}


def train_from(rank: int, world_size: int, output_dir: str, resume: object, door: str = "flag 2", **overrides) -> dict:
    """Trains; where it started, what it said, losses and the model's hash."""
    as_launched(rank, world_size)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hf_zero.integrations.trainer_checkpoints").addHandler(handler)
    starts = Starts()
    callbacks = [starts, *overrides.pop("callbacks", [])]
    trainer = make_trainer(door, "bert", output_dir, callbacks=callbacks, **{**SAVING, **overrides})
    outcome = {"refused": None, "said": said}
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ValueError as error:
        return {**outcome, "refused": str(error)}
    return {**outcome, **outcome_of(trainer), "start": starts.step}


# ---- kills ----


class Disk:
    """Every touch of the disk that a save makes, counted; `at[n]` is called as the n-th begins."""

    def __init__(self) -> None:
        self.touches = 0
        self.at: dict[int, Callable[[], None]] = {}

    def watch(self) -> None:
        """Stays for the life of the process."""
        for owner, name in (
            ("hf_zero.checkpoint.writer", "save_file"),
            ("hf_zero.checkpoint.commit", "sync"),
            ("hf_zero.checkpoint.manifest", "sync"),
            ("transformers.modeling_utils", "safe_save_file"),
            ("torch", "save"),
            ("shutil", "rmtree"),
            ("pathlib.Path", "rename"),
            ("pathlib.Path", "replace"),
            ("pathlib.Path", "mkdir"),
            ("pathlib.Path", "unlink"),
            ("pathlib.Path", "write_text"),
        ):
            place = f"{owner}.{name}"
            original = mock._importer(owner).__dict__[name]
            mock.patch(place, self._touching(original)).start()
        hashing = FileRecord.__dict__["of"].__func__
        mock.patch.object(FileRecord, "of", classmethod(self._touching(hashing))).start()

    def _touching(self, original: Callable) -> Callable:
        def touching(*args, **kwargs):
            self.touches += 1
            self.at.pop(self.touches, lambda: None)()
            return original(*args, **kwargs)

        return touching


@dataclass(frozen=True)
class Kill:
    """Who dies and when: at a touch of the disk, or some time after the start; and how long after that."""

    victims: tuple[int, ...]
    touch: int | None
    delay_s: float


def watched_run(
    rank: int, world_size: int, output_dir: str, notes: str, stage: int, kill: Kill | None = None
) -> dict:
    """Resumes from what is good and trains to the end, or until the kill.

    `notes` is a file a rank that outlives it: is a save under way, and the step of the last one that came back.
    """
    as_launched(rank, world_size)
    note = np.memmap(f"{notes}.{rank}", dtype=np.uint8, mode="w+", shape=(2,))
    original = trainer_integration.save_checkpoint

    def noted_save(trainer, engine, trial):
        note[0] = 1
        original(trainer, engine, trial)
        note[:] = 0, trainer.state.global_step

    trainer_integration.save_checkpoint = noted_save
    disk, starts = Disk(), Starts()
    trainer = make_trainer(
        f"flag {stage}", "bert", output_dir, callbacks=[starts], save_total_limit=2, seed=stage, **SAVING
    )
    pids = exchange_between_ranks(os.getpid())
    disk.watch()

    def strike() -> None:
        # The own process last: it has to live until the others are dead.
        for victim in sorted(kill.victims, key=lambda victim: victim == rank):
            os.kill(pids[victim], signal.SIGKILL)

    began = time.monotonic()
    if kill is not None and rank == kill.victims[0]:
        timer = threading.Timer(kill.delay_s, strike)
        if kill.touch is None:
            timer.start()
        else:
            disk.at[kill.touch] = timer.start
    trainer.train(resume_from_checkpoint="last-good")
    return {**outcome_of(trainer), "start": starts.step, "touches": disk.touches, "seconds": time.monotonic() - began}


def _join_and_run(rank: int, world_size: int, store: str, arguments: dict) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with joined_process_group(rank, world_size, store, 60):
        watched_run(rank, world_size, **arguments)


def run_until_killed(**arguments) -> list[int]:
    """Both ranks' exit codes. Unlike `run_ranks` it leaves the survivors alone: they find out by themselves."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    with tempfile.TemporaryDirectory() as store:
        ranks = [context.Process(target=_join_and_run, args=(rank, 2, store, arguments)) for rank in range(2)]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(60)
        finally:
            codes = [process.exitcode for process in ranks]
            for process in ranks:
                process.kill()
                process.join()
    return codes


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to: its ranks' outcomes, and checkpoint-8 and checkpoint-10, of stage 3."""

    folder: Path
    outcomes: list[dict]

    def same(self, outcome: dict) -> bool:
        return all(outcome[key] == self.outcomes[0][key] for key in ("losses", "state"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    outcomes = on_ranks(watched_run, output_dir=str(folder / "run"), notes=str(folder / "notes"), stage=3)
    assert len(outcomes[0]["losses"]) == 10 and outcomes[0]["start"] == 0
    return Undisturbed(folder / "run", outcomes)


def a_kill(rng: random.Random, undisturbed: Undisturbed) -> Kill:
    victims = rng.choice([(0,), (1,), (0, 1)])
    rank = undisturbed.outcomes[victims[0]]
    if rng.random() < 0.2:
        return Kill(victims, None, rng.uniform(0, rank["seconds"]))
    return Kill(victims, rng.randint(1, rank["touches"]), rng.choice([0.0, rng.uniform(0, 0.004)]))


@dataclass(frozen=True)
class Struck:
    """Whether a kill met its rank alive, and inside a save."""

    alive: bool
    saving: bool


def kill_then_resume(seed: int, undisturbed: Undisturbed, folder: Path) -> list[Struck]:
    """One run, killed (some twice, the second time after a resume), then a last one that goes on to the end."""
    rng = random.Random(seed)
    run, notes = folder / "run", folder / "notes"
    struck: list[Struck] = []
    committed = 0
    for _ in range(rng.choice([1, 1, 2])):
        kill, stage = a_kill(rng, undisturbed), rng.randrange(4)
        context = f"seed {seed}: {kill} at stage {stage}"
        codes = run_until_killed(output_dir=str(run), notes=str(notes), stage=stage, kill=kill)
        assert None not in codes, f"{context}: a survivor does not notice that its peer is dead"
        seen = [np.fromfile(f"{notes}.{rank}", dtype=np.uint8) for rank in range(2)]
        struck.append(Struck(codes[kill.victims[0]] == -signal.SIGKILL, bool(seen[kill.victims[0]][0])))
        committed = max(committed, *(int(note[1]) for note in seen))
        found = list(newest_first(run))
        for path in found:
            assert checkpoint_faults(path, "zero") == [], f"{context}: {path.name} is not good"
        newest = int(found[0].name.removeprefix("checkpoint-")) if found else 0
        assert newest >= committed, f"{context}: checkpoint-{committed} was saved, and the newest is {newest}"
    outcomes = on_ranks(watched_run, output_dir=str(run), notes=str(notes), stage=rng.randrange(4))
    for outcome in outcomes:
        assert outcome["start"] == newest, context
        assert undisturbed.same(outcome), f"{context}: another run than the undisturbed one"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-10", "checkpoint-8"], context
    shutil.rmtree(folder)
    return struck


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_run_leaves_only_good_checkpoints_and_goes_on_bit_for_bit(seed, undisturbed, tmp_path):
    assert any(struck.alive for struck in kill_then_resume(seed, undisturbed, tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_200_killed_runs_go_on_bit_for_bit(undisturbed, tmp_path, capsys):
    struck: list[Struck] = []
    seed = 1000
    while sum(each.alive for each in struck) < SLOW_KILLS:
        struck += kill_then_resume(seed, undisturbed, tmp_path / "killed")
        seed += 1
    alive = [each for each in struck if each.alive]
    with capsys.disabled():
        print(f"\n{len(alive)} kills, {sum(each.saving for each in alive)} of them inside a save")


# ---- a disk that refuses ----


def raising(error: OSError) -> Callable:
    def refuse(*args, **kwargs):
        raise error

    return refuse


@contextmanager
def limited_file_size(output_dir: Path) -> Iterator[None]:
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@contextmanager
def failing_disk(output_dir: Path) -> Iterator[None]:
    with mock.patch("hf_zero.checkpoint.writer.save_file", raising(OSError(errno.EIO, os.strerror(errno.EIO)))):
        yield


@contextmanager
def filling_disk(output_dir: Path) -> Iterator[None]:
    def half(tensors, path):
        Path(path).write_bytes(b"\0" * 1000)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch("hf_zero.checkpoint.writer.save_file", half):
        yield


@contextmanager
def silently_short_write(output_dir: Path) -> Iterator[None]:
    from safetensors.torch import save_file

    def half(tensors, path):
        save_file(tensors, path)
        os.truncate(path, Path(path).stat().st_size // 2)

    with mock.patch("hf_zero.checkpoint.writer.save_file", half):
        yield


@contextmanager
def file_for_a_folder(output_dir: Path) -> Iterator[None]:
    """What a read-only folder is to a user who may write everywhere."""
    aside = output_dir.with_name("aside")
    os.rename(output_dir, aside)
    output_dir.write_text("in the way")
    try:
        yield
    finally:
        output_dir.unlink()
        os.rename(aside, output_dir)


@contextmanager
def refused_rename(output_dir: Path) -> Iterator[None]:
    with mock.patch.object(Path, "rename", raising(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))):
        yield


Usage = namedtuple("Usage", "total used free")


@contextmanager
def nearly_full_disk(output_dir: Path) -> Iterator[None]:
    unwritten = raising(AssertionError("something was written"))
    with mock.patch("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000)):
        with mock.patch.object(Path, "mkdir", unwritten), mock.patch("hf_zero.checkpoint.writer.save_file", unwritten):
            yield


class Sabotage(TrainerCallback):
    """Has the disk refuse at one save."""

    def __init__(self, refusal: Callable, output_dir: str, step: int = 4):
        self._refusal, self._output_dir, self._step = refusal, Path(output_dir), step
        self._stack = ExitStack()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._stack.enter_context(self._refusal(self._output_dir))

    def on_step_begin(self, args, state, control, **kwargs):
        self.end()

    def end(self) -> None:
        self._stack.close()


def saves_on_a_bad_disk(rank: int, world_size: int, folder: str, stage: int, refusal: Callable, guilty: int) -> dict:
    """The same refusal with on_failure of stop and of continue."""
    outcomes = {}
    for on_failure in ("stop", "continue"):
        output_dir = f"{folder}/{on_failure}"
        sabotage = Sabotage(refusal, output_dir)
        outcomes[on_failure] = train_from(
            rank,
            world_size,
            output_dir,
            None,
            door=f"flag stage={stage},checkpoint.on_failure={on_failure}",
            callbacks=[sabotage] if rank == guilty else [],
        )
        sabotage.end()
    return outcomes


@pytest.mark.parametrize(
    ("refusal", "stage", "guilty", "says"),
    [
        (limited_file_size, 2, 1, "could not write to .*File too large"),
        (failing_disk, 3, 1, "could not write to .*Input/output error"),
        (filling_disk, 1, 0, "could not write to .*No space left on device"),
        (silently_short_write, 0, 0, r"rank-00000-of-00002\.safetensors is shorter than its header says"),
        (file_for_a_folder, 2, 0, "could not begin .*checkpoint-4.*File exists"),
        (refused_rename, 3, 0, "could not commit .*checkpoint-4.*Permission denied"),
        (nearly_full_disk, 3, 0, r"needs about \d+ bytes and .* has 1000 free: \d+ too few"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_refused_save_is_every_ranks_error_and_harms_nothing(refusal, stage, guilty, says, undisturbed, tmp_path):
    outcomes = on_ranks(
        saves_on_a_bad_disk, folder=str(tmp_path), stage=stage, refusal=refusal, guilty=guilty
    )
    stopped = {outcome["stop"]["refused"] for outcome in outcomes}
    assert len(stopped) == 1, stopped
    said = stopped.pop()
    import re

    assert re.search(rf"hf_zero: rank \d could not .*{says}|hf_zero: rank {guilty} {says}", said), said
    assert "The former checkpoints are as they were" in said or "training state is unharmed" in said
    assert [path.name for path in (tmp_path / "stop").iterdir()] == ["checkpoint-2"]
    for outcome in outcomes:
        assert undisturbed.same(outcome["continue"])
        assert any("Training goes on, as `checkpoint.on_failure: continue` says." in text for text in outcome["continue"]["said"])
    assert sorted(path.name for path in (tmp_path / "continue").iterdir()) == [f"checkpoint-{n}" for n in (10, 2, 6, 8)]
    for path in [tmp_path / "stop" / "checkpoint-2", *newest_first(tmp_path / "continue")]:
        assert checkpoint_faults(path, "zero") == []
