"""Trainer's checkpoints under kills, full disks and damage: a folder checkpoint-N is good, and the newest good one is found."""

import errno
import faulthandler
import hashlib
import json
import logging
import multiprocessing
import os
import pkgutil
import random
import re
import resource
import shutil
import signal
import struct
import threading
import time
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cells import short_of
from hostile_folders import list_rows, resign
from ranks import PRELOADED_MODULES, joined_process_group
from shared_ranks import run_on_ranks
from trainer_job import as_launched, history, make_trainer
from transformers import Trainer, TrainerCallback

from hf_zero.checkpoint import commit as committing
from hf_zero.checkpoint.commit import begin, clear_leftovers, commit, temporary_of
from hf_zero.checkpoint.disks import Disk, find_disk
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.files import files_below
from hf_zero.checkpoint.hashes import FileRecord, record_of
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.checkpoint.run_lock import LOCK_NAME, held_alone
from hf_zero.checkpoint.structure import may_be_edited
from hf_zero.checkpoint.verify import checkpoint_faults, find_good, newest_first
from hf_zero.comm.all_or_none import Merged, exchange_between_ranks
from hf_zero.integrations import trainer_saves
from hf_zero.integrations.trainer_saves import CheckpointSaver

pytestmark = pytest.mark.timeout(180)

SAVING = {"max_steps": 10, "save_strategy": "steps", "save_steps": 2}
KILLS = 3
SLOW_KILLS = 25


def itself(value: Merged) -> Merged:
    """Merges the values of one rank."""
    return value


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
    logging.getLogger("hf_zero.integrations").addHandler(handler)
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


class WatchedDisk:
    """Every touch of the disk that a save makes, counted; `at[n]` is called as the n-th begins."""

    def __init__(self) -> None:
        self.touches = 0
        self.at: dict[int, Callable[[], None]] = {}

    def watch(self) -> None:
        """Stays for the life of the process."""
        for owner, name in (
            ("hf_zero.checkpoint.commit", "hashes_of"),
            ("os", "posix_fallocate"),
            ("os", "pwrite"),
            ("os", "fsync"),
            ("transformers.modeling_utils", "safe_save_file"),
            ("torch", "save"),
            ("shutil", "rmtree"),
            ("pathlib.Path", "rename"),
            ("pathlib.Path", "replace"),
            ("pathlib.Path", "mkdir"),
            ("pathlib.Path", "unlink"),
            ("pathlib.Path", "write_text"),
        ):
            place = pkgutil.resolve_name(owner)
            mock.patch.object(place, name, self._touching(vars(place)[name])).start()

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


def watched_run(rank: int, world_size: int, output_dir: str, notes: str, stage: int, kill: Kill | None = None) -> dict:
    """Resumes from what is good and trains to the end, or until the kill.

    `notes` is a file a rank that outlives it: is a save under way, and the step of the last one that came back.
    """
    as_launched(rank, world_size)
    note = np.memmap(f"{notes}.{rank}", dtype=np.uint8, mode="w+", shape=(2,))
    save, complete = CheckpointSaver.save, CheckpointSaver._complete

    def noted_save(saver, trial, position, **how):
        saver.finish()
        note[0] = 1
        save(saver, trial, position, **how)

    def noted_complete(saver, manifest, pieces, temporary, final, **kwargs):
        complete(saver, manifest, pieces, temporary, final, **kwargs)
        note[:] = 0, int(final.name.removeprefix("checkpoint-"))

    CheckpointSaver.save, CheckpointSaver._complete = noted_save, noted_complete
    disk, starts = WatchedDisk(), Starts()
    trainer = make_trainer(f"flag {stage}", "bert", output_dir, callbacks=[starts], save_total_limit=2, **SAVING)
    pids = exchange_between_ranks(os.getpid())
    disk.watch()

    def strike() -> None:
        # The own process last: it has to live until the others are dead.
        for victim in sorted(kill.victims, key=lambda victim: victim == rank):
            # One that has come to its end before is nobody's victim.
            with suppress(ProcessLookupError):
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


def _join_and_run(rank: int, world_size: int, port: int, arguments: dict) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # A survivor gives a dead rank's part of a save up, which would take it ten seconds.
    trainer_saves._PATIENCE_S = 1.0
    # A rank that hangs says where.
    faulthandler.dump_traceback_later(50)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    with joined_process_group(rank, world_size, "", 60, store):
        watched_run(rank, world_size, **arguments)


def run_until_killed(**arguments) -> list[int]:
    """Both ranks' exit codes. Unlike `run_ranks` it leaves the survivors alone: they find out by themselves."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    # As a launcher does: the ranks' store lives in a process that is not killed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [context.Process(target=_join_and_run, args=(rank, 2, store.port, arguments)) for rank in range(2)]
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
        return (outcome["losses"], outcome["state"]) == (self.outcomes[0]["losses"], self.outcomes[0]["state"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    outcomes = run_on_ranks(watched_run, output_dir=str(folder / "run"), notes=str(folder / "notes"), stage=3)
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
    trainer_saves: bool


def kill_then_resume(
    seed: int, undisturbed: Undisturbed, folder: Path, kills: Sequence[int] = (1, 1, 2)
) -> list[Struck]:
    """One run, killed as often as one of `kills` says, and resumed after each; the last resume goes on to the end."""
    rng = random.Random(seed)
    folder.mkdir()
    run, notes = folder / "run", folder / "notes"
    struck: list[Struck] = []
    committed = newest = 0
    for _ in range(rng.choice(kills)):
        if newest == 10:
            break
        kill, stage = a_kill(rng, undisturbed), rng.randrange(4)
        context = f"seed {seed}: {kill} at stage {stage}"
        codes = run_until_killed(output_dir=str(run), notes=str(notes), stage=stage, kill=kill)
        assert None not in codes, f"{context}: a survivor does not notice that its peer is dead"
        assert all(Path(f"{notes}.{rank}").is_file() for rank in range(2)), f"{context}: {codes} before any training"
        seen = [np.fromfile(f"{notes}.{rank}", dtype=np.uint8) for rank in range(2)]
        struck.append(Struck(codes[kill.victims[0]] == -signal.SIGKILL, bool(seen[kill.victims[0]][0])))
        committed = max(committed, *(int(note[1]) for note in seen))
        found = list(newest_first(run))
        for path in found:
            assert checkpoint_faults(path, "zero") == [], f"{context}: {path.name} is not good"
        newest = int(found[0].name.removeprefix("checkpoint-")) if found else 0
        assert newest >= committed, f"{context}: checkpoint-{committed} was saved, and the newest is {newest}"
    outcomes = run_on_ranks(watched_run, output_dir=str(run), notes=str(notes), stage=rng.randrange(4))
    for outcome in outcomes:
        assert outcome["start"] == newest, context
        assert undisturbed.same(outcome), f"{context}: another run than the undisturbed one"
    left = sorted(path.name for path in run.iterdir())
    if newest == 10:
        # The last resume takes no step, saves nothing, and deletes nothing that a killed deletion has left.
        assert left[:1] == ["checkpoint-10"] and "checkpoint-8" in left, context
    else:
        assert left == ["checkpoint-10", "checkpoint-8"], context
    shutil.rmtree(folder)
    return struck


@pytest.mark.parametrize("seed", short_of(range(KILLS), [0]))
def test_a_killed_run_leaves_only_good_checkpoints_and_goes_on_bit_for_bit(seed, undisturbed, tmp_path):
    assert any(struck.alive for struck in kill_then_resume(seed, undisturbed, tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_killed_runs_go_on_bit_for_bit(undisturbed, tmp_path, capsys):
    struck: list[Struck] = []
    seed = 1000
    while sum(each.alive for each in struck) < SLOW_KILLS:
        struck += kill_then_resume(seed, undisturbed, tmp_path / "killed", kills=(2, 3, 4))
        seed += 1
    alive = [each for each in struck if each.alive]
    with capsys.disabled():
        print(f"\n{len(alive)} kills, {sum(each.trainer_saves for each in alive)} of them inside a save")


# ---- a disk that refuses ----


def raising(error: OSError) -> Callable:
    def refuse(*args, **kwargs):
        raise error

    return refuse


@contextmanager
def limited_file_size(output_dir: Path) -> Iterator[None]:
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@contextmanager
def failing_disk(output_dir: Path) -> Iterator[None]:
    with mock.patch("os.pwrite", raising(OSError(errno.EIO, os.strerror(errno.EIO)))):
        yield


@contextmanager
def filling_disk(output_dir: Path) -> Iterator[None]:
    pwrite = os.pwrite

    def some(handle, data, at):
        if at > 2000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(handle, data[: len(data) // 2 or 1], at)

    with mock.patch("os.pwrite", some):
        yield


@contextmanager
def file_cut_off_meanwhile(output_dir: Path) -> Iterator[None]:
    pwrite = os.pwrite

    def then_cut(handle, data, at):
        written = pwrite(handle, data, at)
        if "rank-" in os.readlink(f"/proc/self/fd/{handle}"):
            os.ftruncate(handle, at)
        return written

    with mock.patch("os.pwrite", then_cut):
        yield


@contextmanager
def disk_that_takes_nothing(output_dir: Path) -> Iterator[None]:
    with mock.patch("os.pwrite", lambda handle, data, at: 0):
        yield


@contextmanager
def full_disk_at_the_weights(output_dir: Path) -> Iterator[None]:
    with mock.patch("os.posix_fallocate", raising(OSError(errno.ENOSPC, "No space left"))):
        yield


@contextmanager
def full_disk_at_the_rest(output_dir: Path) -> Iterator[None]:
    with mock.patch("torch.save", raising(OSError(errno.ENOSPC, "No space left"))):
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
    def only_there_already(folder, *args, **kwargs):
        assert folder == output_dir, f"{folder} is made"

    with mock.patch("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000)):
        with mock.patch.object(Path, "mkdir", only_there_already):
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


def saves_on_a_bad_disk(
    rank: int, world_size: int, folder: str, stage: int, refusal: Callable, guilty: int, async_save: bool
) -> dict:
    """The same refusal with on_failure of stop and of continue. It lasts until what is written behind training is there."""
    save = CheckpointSaver.save

    def save_and_wait(saver, trial, position, **how):
        save(saver, trial, position, **how)
        if saver._background._thread is not None:
            saver._background._thread.join()

    CheckpointSaver.save = save_and_wait
    outcomes = {}
    for on_failure in ("stop", "continue"):
        output_dir = f"{folder}/{on_failure}"
        sabotage = Sabotage(refusal, output_dir)
        outcomes[on_failure] = train_from(
            rank,
            world_size,
            output_dir,
            None,
            door=f"flag stage={stage},checkpoint.on_failure={on_failure},checkpoint.async_save={async_save}",
            callbacks=[sabotage] if rank == guilty else [],
        )
        sabotage.end()
    return outcomes


REFUSALS = [
    (limited_file_size, 2, 1, "rank 1 could not write to .*File too large"),
    (failing_disk, 3, 1, "rank 1 could not write to .*Input/output error"),
    (filling_disk, 1, 0, "rank 0 could not write to .*No space left on device"),
    (disk_that_takes_nothing, 2, 1, "rank 1 could not write to .*accepts no more data at byte"),
    (file_cut_off_meanwhile, 0, 0, r"could not write .*rank-00000-of-00002\.safetensors is shorter than its header"),
    (full_disk_at_the_weights, 3, 0, "rank 0 could not write the model to .*No space left"),
    (full_disk_at_the_rest, 1, 1, "rank 1 could not write trainer state to .*No space left"),
    (file_for_a_folder, 2, 0, "rank 0 could not write to .*File exists"),
    (refused_rename, 3, 0, "rank 0 could not commit .*checkpoint-4.*Permission denied"),
    (
        nearly_full_disk,
        3,
        0,
        r"rank 0 could not .* needs about [\d.]+ KiB, but .* has 1000 B free: [\d.]+ KiB too little",
    ),
]


# In the short run: one of each part of a save, the state's, the model's and the commit, at once, and others behind training.
MET_AT_ONCE = (limited_file_size, full_disk_at_the_weights, refused_rename)
MET_BEHIND = (failing_disk, file_cut_off_meanwhile, full_disk_at_the_rest, file_for_a_folder, nearly_full_disk)


@pytest.mark.short_cells("full_disk_at_the_weights-False")
@pytest.mark.parametrize(
    ("refusal", "stage", "guilty", "says", "async_save"),
    [
        pytest.param(
            *case,
            async_save,
            id=f"{case[0].__name__}-{async_save}",
            marks=[] if case[0] in (MET_BEHIND if async_save else MET_AT_ONCE) else pytest.mark.slow,
        )
        for case in REFUSALS
        for async_save in (True, False)
    ],
)
def test_a_refused_save_is_every_ranks_error_and_harms_nothing(
    refusal, stage, guilty, says, async_save, undisturbed, tmp_path
):
    case = {"stage": stage, "refusal": refusal, "guilty": guilty, "async_save": async_save}
    outcomes = run_on_ranks(saves_on_a_bad_disk, folder=str(tmp_path), **case)
    refused = {outcome["stop"]["refused"] for outcome in outcomes}
    assert len(refused) == 1, refused
    assert re.search(rf"hf_zero: .*{says}.*training state (is|are) unchanged", refused.pop())
    # Where the folder was out of reach at the end of the run, the lock's file is left, which nobody holds.
    left = {LOCK_NAME} if refusal is file_for_a_folder else set()
    assert {path.name for path in (tmp_path / "stop").iterdir()} - left == {"checkpoint-2"}
    for outcome in outcomes:
        assert undisturbed.same(outcome["continue"])
        assert re.search(
            f"{says}.* Training continues because of `checkpoint.on_failure: continue`", outcome["continue"]["said"][-1]
        )
    assert sorted(path.name for path in (tmp_path / "continue").iterdir()) == [f"checkpoint-{n}" for n in (10, 2, 6, 8)]
    for path in [tmp_path / "stop" / "checkpoint-2", *newest_first(tmp_path / "continue")]:
        assert checkpoint_faults(path, "zero") == []


class Scores:
    """A metric that is best at the second evaluation."""

    def __init__(self) -> None:
        self._left = [1.0, 9.0, 2.0, 3.0, 4.0]

    def __call__(self, prediction) -> dict[str, float]:
        return {"score": self._left.pop(0)}


def best_after_a_failed_save(rank: int, world_size: int, output_dir: str) -> str:
    as_launched(rank, world_size)
    trainer = make_trainer(
        "flag stage=3,checkpoint.on_failure=continue,checkpoint.async_save=false",
        "bert",
        output_dir,
        callbacks=[Sabotage(refused_rename, output_dir)],
        compute_metrics=Scores(),
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        save_total_limit=1,
        **SAVING,
    )
    trainer.train()
    assert trainer.state.best_global_step == 4
    return trainer.state.best_model_checkpoint


def test_the_best_checkpoint_is_never_one_whose_save_failed(tmp_path):
    [best] = run_on_ranks(best_after_a_failed_save, world_size=1, output_dir=str(tmp_path))
    assert best == str(tmp_path / "checkpoint-2") and checkpoint_faults(Path(best), "zero") == []
    # At the end stock Trainer, with a limit of 1, takes all away but what it believes to be the best.
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_what_a_killed_run_left_is_no_obstacle_to_replacing_a_checkpoint(tmp_path):
    final, left = tmp_path / "checkpoint-4", tmp_path / ".old-checkpoint-4"
    for folder in (final, left):
        folder.mkdir()
        (folder / "former").touch()
    commit(begin(final, needed_bytes=0, disk=Disk.shared(), merge=itself), final, disk=Disk.shared(), merge=itself)
    assert list(tmp_path.iterdir()) == [final] and list(final.iterdir()) == []


def test_a_link_in_the_place_of_a_checkpoint_goes_and_what_it_leads_to_stays(tmp_path):
    run, names = tmp_path / "run", ("checkpoint-1", ".tmp-checkpoint-2", "checkpoint-3")
    run.mkdir()
    for name in names:
        (tmp_path / "moved" / name).mkdir(parents=True)
        (tmp_path / "moved" / name / "kept").touch()
        (run / name).symlink_to(tmp_path / "moved" / name)
    for name in (".tmp-checkpoint-3", ".old-checkpoint-3"):
        (run / name).symlink_to(tmp_path / "nowhere")
    committing.discard(run / "checkpoint-1")
    clear_leftovers(run)
    final = run / "checkpoint-3"
    commit(begin(final, needed_bytes=0, disk=Disk.shared(), merge=itself), final, disk=Disk.shared(), merge=itself)
    assert list(run.iterdir()) == [final] and not final.is_symlink()
    assert all((tmp_path / "moved" / name / "kept").is_file() for name in names)


def test_a_replacement_that_is_refused_leaves_the_former_in_its_place(tmp_path, monkeypatch):
    final = tmp_path / "checkpoint-4"
    final.mkdir()
    (final / "former").touch()
    temporary = begin(final, needed_bytes=0, disk=Disk.shared(), merge=itself)
    rename = Path.rename
    monkeypatch.setattr(
        Path,
        "rename",
        lambda path, target: raising(OSError("refused"))() if path == temporary else rename(path, target),
    )
    with pytest.raises(CheckpointError, match=r"rank 0 could not commit .*refused"):
        commit(temporary, final, disk=Disk.shared(), merge=itself)
    assert (final / "former").is_file()


def test_leftovers_go_and_a_checkpoint_that_was_not_yet_replaced_comes_back(tmp_path):
    for name in (".tmp-checkpoint-6", ".old-checkpoint-2", "checkpoint-2", ".old-checkpoint-4", ".tmp-of-the-user"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4", ".tmp-of-the-user"}
    assert (tmp_path / "checkpoint-2" / "checkpoint-2").is_file()
    assert (tmp_path / "checkpoint-4" / ".old-checkpoint-4").is_file()


# ---- damage ----


@pytest.fixture
def checkpoint(undisturbed, tmp_path) -> Path:
    """A good one of stage 3 on two ranks, to be damaged."""
    return Path(shutil.copytree(undisturbed.folder / "checkpoint-10", tmp_path / "checkpoint-10"))


def flip_a_bit(file: Path, position: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position // 8)
        byte = opened.read(1)[0]
        opened.seek(position // 8)
        opened.write(bytes([byte ^ 1 << position % 8]))


def test_one_flipped_bit_anywhere_is_found_and_passed_over(checkpoint, undisturbed):
    former = Path(shutil.copytree(undisturbed.folder / "checkpoint-8", checkpoint.with_name("checkpoint-8")))
    rng = random.Random(17)
    names = files_below(checkpoint)
    assert "zero/manifest.json" in names and len(names) >= 9
    flips = [(name, rng.randrange((checkpoint / name).stat().st_size * 8)) for name in (*names, *names, *names)]
    taken: set[str] = set()
    for name, position in flips:
        flip_a_bit(checkpoint / name, position)
        [fault] = checkpoint_faults(checkpoint, "zero")
        assert name in fault, f"bit {position} of {name}: {fault}"
        warned: list[str] = []
        good, passed = find_good(checkpoint.parent, "zero", disk=Disk.shared(), exchange=alone, on_edits=warned.append)
        if good == checkpoint:
            # As plain Trainer reads it, with a warning: no tensor of the model or the optimizer is in there.
            assert may_be_edited(name, "zero") and not passed and fault in warned[0]
            taken.add(name)
        else:
            assert good == former and not warned
            assert [(each.path, each.faults) for each in passed] == [(checkpoint, (fault,))]
        flip_a_bit(checkpoint / name, position)
    assert checkpoint_faults(checkpoint, "zero") == []
    assert {"scheduler.pt", "training_args.bin"} <= taken and len(taken) < len(names)


def test_any_flipped_bit_of_the_manifest_is_found(checkpoint):
    path = checkpoint / "zero" / "manifest.json"
    text = path.read_bytes()
    # A capital E in 1e-08 reads as the same number: only the text tells.
    places = [8 * text.index(b"e-0") + 5, *random.Random(3).sample(range(8 * len(text)), 150)]
    for place in places:
        flip_a_bit(path, place)
        assert len(checkpoint_faults(checkpoint, "zero")) == 1, place
        path.write_bytes(text)


def test_each_ranks_share_of_the_faults_is_all_of_them(checkpoint):
    for name in files_below(checkpoint):
        if name != "zero/manifest.json":
            (checkpoint / name).unlink()
    shares = [checkpoint_faults(checkpoint, "zero", rank=rank, world_size=3) for rank in range(3)]
    assert {fault for share in shares for fault in share} == set(checkpoint_faults(checkpoint, "zero"))
    assert all(shares)


ROWS = "zero/rank-00001-of-00002.safetensors"


def swapped(checkpoint: Path) -> None:
    other = checkpoint / "zero/rank-00000-of-00002.safetensors"
    aside = (checkpoint / ROWS).rename(checkpoint / "aside")
    other.rename(checkpoint / ROWS)
    aside.rename(other)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda checkpoint: os.truncate(checkpoint / ROWS, 1000), rf"{ROWS} has 1000 bytes instead of \d+"),
        (lambda checkpoint: (checkpoint / ROWS).unlink(), f"{ROWS} is missing"),
        (lambda checkpoint: (checkpoint / ROWS).write_bytes(b""), rf"{ROWS} has 0 bytes instead of \d+"),
        (swapped, f"{ROWS} has "),
        (lambda checkpoint: os.truncate(checkpoint / "zero/manifest.json", 700), r"manifest\.json is damaged"),
        (lambda checkpoint: (checkpoint / "zero/manifest.json").unlink(), r"holds no manifest\.json"),
        (lambda checkpoint: (checkpoint / "zero/manifest.json").write_bytes(b""), r"manifest\.json is damaged"),
        (lambda checkpoint: (checkpoint / "zero/manifest.json").write_bytes(b"\xff"), r"manifest\.json is damaged"),
    ],
    ids=["truncated", "missing", "emptied", "swapped", "cut manifest", "no manifest", "empty manifest", "no text"],
)
def test_damaged_files_are_named(damage, says, checkpoint):
    damage(checkpoint)
    faults = checkpoint_faults(checkpoint, "zero")
    assert faults and any(re.search(says, fault) for fault in faults)


def test_a_file_that_cannot_be_read_is_a_fault_and_no_crash(checkpoint, monkeypatch):
    monkeypatch.setattr("hf_zero.checkpoint.verify.hashes_of", raising(OSError(errno.EIO, "Input/output error")))
    faults = checkpoint_faults(checkpoint, "zero")
    assert any(fault.startswith(f"{ROWS} cannot be read ([Errno 5]") for fault in faults)


@pytest.mark.parametrize("outside", ["../../x", "/etc/hostname", "zero/../../x", "..\\x"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(outside, checkpoint):
    (checkpoint.parent.parent / "x").write_text("somewhere else")
    manifest = Manifest.read(checkpoint / "zero")
    manifest.with_files({**manifest.files, outside: FileRecord(size=14, chunk_bytes=14, xxh3=("0" * 16,))}).write(
        checkpoint / "zero"
    )
    [fault] = checkpoint_faults(checkpoint, "zero")
    assert f"manifest.json names {outside!r}, which is not inside its checkpoint" in fault

    def change(content: dict) -> None:
        list_rows(content)
        content["rows"][0][4] = outside

    manifest.write(checkpoint / "zero")
    resign(checkpoint, change)
    [fault] = checkpoint_faults(checkpoint, "zero")
    assert f"manifest.json names {outside!r}, which is not a file of that folder" in fault
    with pytest.raises(CheckpointError, match="which is not a file of that folder"):
        CheckpointReader(checkpoint / "zero")


def test_elements_that_no_row_or_two_rows_have_are_faults(checkpoint):
    manifest = Manifest.read(checkpoint / "zero")
    for rows in (manifest.rows[1:], (*manifest.rows, manifest.rows[0])):
        replace(manifest, rows=rows).write(checkpoint / "zero")
        [fault] = checkpoint_faults(checkpoint, "zero")
        assert fault == f"{manifest.rows[0].kind} of {manifest.rows[0].name} is missing or duplicated for some elements"


@pytest.mark.parametrize("name", ["model.safetensors", ROWS])
def test_a_header_length_of_10_gb_is_refused_with_the_files_name(name, checkpoint):
    with (checkpoint / name).open("r+b") as opened:
        opened.write(struct.pack("<Q", 10 * 2**30))
    [fault] = checkpoint_faults(checkpoint, "zero")
    assert fault.startswith(f"{name} differs from the contents that were written")
    manifest = Manifest.read(checkpoint / "zero")
    manifest.with_files({**manifest.files, name: record_of(checkpoint / name)}).write(checkpoint / "zero")
    if name == ROWS:
        row = next(row for rows in manifest.rows for row in rows if ROWS.endswith(manifest.file_of(row)))
        with CheckpointReader(checkpoint / "zero") as reader:
            with pytest.raises(CheckpointError, match=rf"{ROWS} cannot be read \(.*[Hh]eader"):
                reader.read(row.kind, row.name, row.interval)
    shutil.rmtree(checkpoint / "zero")
    assert checkpoint_faults(checkpoint, "zero") == ([f"{name} is cut off or damaged"] if name != ROWS else [])


# ---- which checkpoint is taken ----


def test_resume_true_passes_over_what_is_not_good_and_says_why(undisturbed, tmp_path):
    for number in (50, 100, 150):
        shutil.copytree(undisturbed.folder / "checkpoint-8", tmp_path / f"checkpoint-{number}")
    rows = tmp_path / "checkpoint-150" / ROWS
    flip_a_bit(rows, 8 * (rows.stat().st_size - 100))
    for name in ("checkpoint-200", ".tmp-checkpoint-300", ".old-checkpoint-100"):
        (tmp_path / name).mkdir()
    for outcome in run_on_ranks(train_from, output_dir=str(tmp_path), resume=True, door="flag 1"):
        assert outcome["start"] == 8 and undisturbed.same(outcome)
    said = run_on_ranks(train_from, output_dir=str(tmp_path), resume="last-good", door="flag 3")[0]["said"][0]
    assert f"resuming from {tmp_path}/checkpoint-100. Skipped: checkpoint-200: it holds no model weights" in said
    assert f"checkpoint-150: {ROWS} differs from the contents that were written" in said
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"checkpoint-{n}" for n in (10, 50, 100, 150, 200)}


def test_without_a_good_checkpoint_true_raises_with_each_fault_and_last_good_starts_afresh(undisturbed, tmp_path):
    shutil.copytree(undisturbed.folder / "checkpoint-8", tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-8" / "model.safetensors").unlink()
    (tmp_path / "checkpoint-9").mkdir()
    for outcome in run_on_ranks(train_from, output_dir=str(tmp_path), resume=True):
        assert outcome["refused"].startswith("No valid checkpoint found in output directory")
        assert "checkpoint-9: it holds no model weights, trainer_state.json is missing" in outcome["refused"]
        assert "checkpoint-8: model.safetensors is missing" in outcome["refused"]
    afresh = run_on_ranks(train_from, output_dir=str(tmp_path), resume="last-good")
    assert "checkpoint-8: model.safetensors is missing); starting afresh." in afresh[0]["said"][0]
    for outcome in afresh:
        assert outcome["start"] == 0 and undisturbed.same(outcome)


def edited_state(checkpoint: Path) -> None:
    path = checkpoint / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"save_steps": 5, "log_history": []}))


def removes(*names: str) -> Callable[[Path], None]:
    return lambda checkpoint: [(checkpoint / name).unlink() for name in names]


EDITS: dict[str, Callable[[Path], object]] = {
    "rng_state_1.pth": removes("rng_state_0.pth", "rng_state_1.pth"),
    "scheduler.pt": removes("scheduler.pt"),
    "trainer_state.json": edited_state,
    "config.json": lambda checkpoint: (checkpoint / "config.json").open("a").write("\n"),
    "training_args.bin": removes("training_args.bin"),
}


def goes_on_from_each(rank: int, world_size: int, folder: str) -> dict[str, dict]:
    found = {
        name: train_from(rank, world_size, f"{folder}/{name}", resume=f"{folder}/{name}/checkpoint-8") for name in EDITS
    }
    # The newest good one is the edited one, too.
    found["newest"] = train_from(rank, world_size, f"{folder}/newest", resume=True)
    # Of ours plain Trainer takes the weights alone, as it does of its own without scheduler.pt.
    edited = f"{folder}/scheduler.pt/checkpoint-8"
    found["DDP"] = train_from(rank, world_size, f"{folder}/ddp", resume=edited, door="ddp")
    return found


def test_a_resume_takes_files_without_tensors_as_a_person_has_left_them_and_warns(undisturbed, tmp_path):
    for name, edit in EDITS.items():
        edit(Path(shutil.copytree(undisturbed.folder / "checkpoint-8", tmp_path / name / "checkpoint-8")))
    shutil.copytree(tmp_path / "config.json" / "checkpoint-8", tmp_path / "newest" / "checkpoint-8")
    first, second = run_on_ranks(goes_on_from_each, folder=str(tmp_path))
    for name in (*EDITS, "newest"):
        assert first[name]["refused"] is None and first[name]["start"] == second[name]["start"] == 8, name
        # Each run's handler hears the runs after it, too.
        [said] = [
            line for line in first[name]["said"] if f"/{name}/checkpoint-8 was changed after it was written" in line
        ]
        assert (name if name in EDITS else "config.json") in said and "hf-zero verify --accept" in said
        assert not any("was changed after it was written" in line for line in second[name]["said"])
    for name in ("trainer_state.json", "config.json", "training_args.bin", "newest"):
        # Without what the edit may have taken out of the log.
        assert first[name]["losses"][-2:] == undisturbed.outcomes[0]["losses"][-2:], name
        assert first[name]["state"] == undisturbed.outcomes[0]["state"], name
    assert any("optimizer and schedule start afresh" in line for line in first["scheduler.pt"]["said"])
    assert first["scheduler.pt"]["losses"] == first["DDP"]["losses"]


def test_a_folder_without_checkpoints_is_said_to_hold_none(tmp_path):
    [refused] = run_on_ranks(train_from, world_size=1, output_dir=str(tmp_path), resume=True)
    assert refused["refused"].startswith(f"No valid checkpoint found in output directory ({tmp_path}). Omit")
    [afresh] = run_on_ranks(train_from, world_size=1, output_dir=str(tmp_path), resume="last-good", max_steps=2)
    assert afresh["said"] == [f"hf_zero: no good checkpoint in {tmp_path} (it holds none); starting afresh."]


@pytest.mark.slow
def test_a_checkpoint_of_the_model_alone_is_good_and_starts_the_optimizer_afresh(tmp_path):
    run_on_ranks(train_from, output_dir=str(tmp_path), resume=None, door="flag 3", save_only_model=True, max_steps=4)
    assert checkpoint_faults(tmp_path / "checkpoint-4", "zero") == []
    for outcome in run_on_ranks(train_from, output_dir=str(tmp_path), resume=True, door="flag 2"):
        assert outcome["start"] == 4
        assert (
            f"hf_zero: {tmp_path}/checkpoint-4 holds no optimizer state; the optimizer starts afresh."
            in outcome["said"]
        )


def goes_on(rank: int, world_size: int, folder: str, doors: list[str]) -> list[dict]:
    """Trains from the checkpoint below `folder` behind each door, a new model each time."""
    checkpoint = f"{folder}/checkpoint-4"
    return [
        train_from(
            rank, world_size, f"{folder}/{door}", checkpoint, door=door, seed=77, save_strategy="no", max_steps=6
        )
        for door in doors
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", short_of([1, 2], [2]))
def test_a_plain_trainers_checkpoint_goes_on_at_every_stage_as_ddp_does(world_size, tmp_path):
    whole = run_on_ranks(train_from, output_dir=str(tmp_path), resume=None, door="ddp", max_steps=6)[0]
    assert (tmp_path / "checkpoint-4" / "optimizer.pt").is_file() and not (tmp_path / "checkpoint-4" / "zero").exists()
    # Two ranks go on as the run that was not broken off; one takes other batches than they did, and plain Trainer tells which.
    # (On two without GPUs not every Trainer can read its own optimizer.pt: transformers 5.17 would have it on `cpu:0`.)
    doors = [*(["ddp"] if world_size == 1 else []), *(f"flag {stage}" for stage in range(4))]
    for outcomes in run_on_ranks(goes_on, world_size, folder=str(tmp_path), doors=doors):
        plain = outcomes.pop(0) if world_size == 1 else whole
        assert len(plain["losses"]) == 6
        for stage, outcome in enumerate(outcomes):
            assert outcome["start"] == 4
            assert (outcome["losses"], outcome["state"]) == (plain["losses"], plain["state"]), stage


class GoodOnes(TrainerCallback):
    """Which checkpoints are good after each save."""

    def __init__(self, output_dir: str):
        self.seen: list[list[str]] = []
        self._output_dir = Path(output_dir)

    def on_save(self, args, state, control, **kwargs):
        self.seen.append([path.name for path in newest_first(self._output_dir) if not checkpoint_faults(path, "zero")])


def rotates(rank: int, world_size: int, output_dir: str, **overrides) -> list[list[str]]:
    good_ones = GoodOnes(output_dir)
    refusal = Sabotage(failing_disk, output_dir, step=10)
    outcome = train_from(
        rank,
        world_size,
        output_dir,
        "last-good",
        door="flag stage=2,checkpoint.on_failure=continue,checkpoint.async_save=false",
        callbacks=[good_ones, refusal],
        save_total_limit=1,
        max_steps=14,
        **overrides,
    )
    assert outcome["start"] == 8
    return good_ones.seen


def test_rotation_never_takes_the_last_good_one(undisturbed, tmp_path):
    shutil.copytree(undisturbed.folder / "checkpoint-8", tmp_path / "checkpoint-8")
    # One of a later step, and by its time newer than all that this run writes.
    shutil.copytree(undisturbed.folder / "checkpoint-10", tmp_path / "checkpoint-30")
    flip_a_bit(tmp_path / "checkpoint-30" / ROWS, 12345)
    os.utime(tmp_path / "checkpoint-30", (2**32, 2**32))
    # The save at step 10 fails, so that the former one has to stay.
    seen = run_on_ranks(rotates, world_size=1, output_dir=str(tmp_path))[0]
    assert seen == [["checkpoint-8"], ["checkpoint-12"], ["checkpoint-14"]]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-14"]


@pytest.mark.parametrize(("best", "left"), [(None, {6, 8}), (2, {2, 8})])
def test_rotation_goes_by_step_whatever_the_clock_said(best, left, tmp_path):
    for step in (2, 4, 6, 8, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
        # The clock goes back at each save. A resume has passed over checkpoint-30.
        os.utime(tmp_path / f"checkpoint-{step}", (10**9 - step, 10**9 - step))
    kept = None if best is None else tmp_path / f"checkpoint-{best}"
    trainer_saves._rotate(tmp_path, tmp_path / "checkpoint-8", limit=2, best=kept)
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in left}


def saves_over_a_file(rank: int, world_size: int, output_dir: str) -> list[str]:
    as_launched(rank, world_size)
    settings = "flag stage=2,checkpoint.resume=auto,checkpoint.async_save=false"
    trainer = make_trainer(settings, "bert", output_dir, save_strategy="steps", save_steps=2, max_steps=4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    return [str(each.message) for each in said if "was a file" in str(each.message)]


def test_a_file_with_a_checkpoints_name_is_moved_aside_and_kept(tmp_path):
    for name in ("checkpoint-4", "checkpoint-3", ".tmp-checkpoint-2", ".old-checkpoint-2"):
        (tmp_path / name).write_text("mine")
    [[said]] = run_on_ranks(saves_over_a_file, world_size=1, output_dir=str(tmp_path))
    assert "checkpoint-4 was a file, not a checkpoint folder. It was renamed to checkpoint-4.file-" in said
    assert all(checkpoint_faults(tmp_path / f"checkpoint-{step}", "zero") == [] for step in (2, 4))
    [aside] = tmp_path.glob("checkpoint-4.file-*")
    assert aside.read_text() == (tmp_path / "checkpoint-3").read_text() == "mine"


REFUSED = ("OSError: [Errno 24] Too many open files",)


def refused_elsewhere(value: tuple) -> list:
    """Rank 0's exchange with a rank 1 that has failed."""
    return [value, (REFUSED, None)]


@pytest.mark.parametrize("asks", [find_disk, begin])
def test_nothing_is_left_where_another_rank_cannot_write(asks, tmp_path):
    with pytest.raises(CheckpointError, match=r"rank 1 could not .*Too many open files"):
        if asks is find_disk:
            find_disk(tmp_path, 0, refused_elsewhere, then="")
        else:
            begin(
                tmp_path / "checkpoint-2",
                needed_bytes=0,
                disk=Disk.shared(0, 2),
                merge=lambda value: replace(value, told={1: REFUSED}),
            )
    assert not list(tmp_path.iterdir())


def test_a_killed_rotation_leaves_no_half_of_a_checkpoint(checkpoint, monkeypatch):
    monkeypatch.setattr(shutil, "rmtree", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        committing.discard(checkpoint)
    assert not checkpoint.exists() and temporary_of(checkpoint).is_dir()


def test_what_a_killed_run_left_while_it_looked_at_its_disk_goes_when_the_next_run_has_the_folder(tmp_path):
    (tmp_path / ".hf_zero-ofadeadrun").touch()
    disk = find_disk(tmp_path, 0, alone, then="")
    assert disk.ranks == (0,)
    with held_alone(tmp_path, disk=disk, exchange=alone):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    assert not list(tmp_path.iterdir())
