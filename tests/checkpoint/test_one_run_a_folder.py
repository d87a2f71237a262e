"""Two runs on one output_dir: one trains, the other is told who has it. What a full disk says, and what a run leaves behind."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_alone, run_ranks
from shared_ranks import run_on_ranks
from trainer_job import as_launched, make_trainer
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from hf_zero.checkpoint import run_lock
from hf_zero.checkpoint.disks import Disk, disk_asked
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.hashes import hashes_of
from hf_zero.checkpoint.run_lock import LOCK_NAME, held_alone
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.config import ZeroConfig
from hf_zero.integrations.resume import alone_in_output_dir
from hf_zero.offload.run_folder import RunFolder

pytestmark = pytest.mark.timeout(180)

HOLD = """
import sys, time
from pathlib import Path
from hf_zero.checkpoint.disks import Disk
from hf_zero.checkpoint.run_lock import held_alone
with held_alone(Path(sys.argv[1]), disk=Disk.shared(), exchange=lambda value: [value]):
    print("held", flush=True)
    time.sleep(100)
"""


def alone(value: object) -> list:
    return [value]


@pytest.fixture
def holder(tmp_path):
    """A process that has the folder, until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_folder_that_another_process_has_is_refused_by_its_number_and_free_when_that_is_killed(
    holder, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.3)
    owner = rf"process {holder.pid} on {os.uname().nodename}, since 20\S+\+00:00"
    with pytest.raises(CheckpointError, match=rf"another run is writing there \({owner}\).*its own"):
        with held_alone(tmp_path, disk=Disk.shared(), exchange=alone):
            pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    (tmp_path / ".hf_zero-ofadeadrun").touch()
    with held_alone(tmp_path, disk=Disk.shared(), exchange=alone):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    assert not list(tmp_path.iterdir())


def copied(folder: Path, to: Path) -> None:
    shutil.copytree(folder, to)


def hashed(folder: Path, to: Path) -> None:
    hashes_of(folder / LOCK_NAME, [0], 1 << 18)


def left_by_a_forked_child(folder: Path, to: Path) -> None:
    if os.fork() == 0:
        # Unwinds to `asks_for_it`, through the block that holds the lock.
        sys.exit()
    os.wait()


def no_ofd_locks(*_: object) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def asks_for_it(folder: Path) -> str:
    run_lock.PATIENCE_S = 0.1
    try:
        with held_alone(folder, disk=Disk.shared(), exchange=alone):
            return "taken"
    except CheckpointError as error:
        return str(error)


def reads_what_it_holds(folder: str, reads: str, has_ofd: bool) -> tuple[str, str]:
    stock, run = run_lock.fcntl.fcntl, Path(folder) / "run"
    run.mkdir()
    run_lock.fcntl.fcntl = stock if has_ofd else no_ofd_locks
    try:
        with held_alone(run, disk=Disk.shared(), exchange=alone):
            globals()[reads](run, Path(folder) / "to")
            own = asks_for_it(run)
            mine, theirs = os.pipe()
            if os.fork() == 0:
                os.write(theirs, asks_for_it(run).encode())
                os._exit(0)
            os.wait()
            return own, os.read(mine, 1000).decode()
    except SystemExit:
        os._exit(0)


@pytest.mark.parametrize("has_ofd", [True, False])
@pytest.mark.parametrize("reads", ["copied", "hashed", "left_by_a_forked_child"])
def test_a_process_keeps_the_folder_whatever_it_and_its_children_do_with_the_file(reads, has_ofd, tmp_path):
    """`has_ofd`: whether the kernel has locks of open files; if not, flock is used."""
    arguments = {"folder": str(tmp_path), "reads": reads, "has_ofd": has_ofd}
    own, anothers = run_alone(reads_what_it_holds, time_limit_s=60, keyword_arguments=arguments)
    assert "(another Trainer in this process)" in own
    assert "another run is writing there (process " in anothers


OUTLIVED = HOLD.replace("print(", "os.fork() and print(").replace("import sys", "import os, sys")


def test_a_child_that_outlives_a_killed_run_does_not_keep_the_folder(tmp_path):
    # A session of its own, so that the child can be ended with its parent.
    holder = subprocess.Popen(
        [sys.executable, "-c", OUTLIVED, tmp_path], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert asks_for_it(tmp_path) == "taken"
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_a_trainer_that_trains_inside_its_own_train_has_the_folder_already(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.1)
    args = SimpleNamespace(output_dir=str(tmp_path), process_index=0, save_strategy=SaveStrategy.STEPS)
    accelerator = SimpleNamespace(zero_config=ZeroConfig(stage=2))
    first, second = (SimpleNamespace(args=args, accelerator=accelerator, _alone_in=None) for _ in range(2))
    with alone_in_output_dir(first, None):
        with alone_in_output_dir(first, None):
            pass
        with pytest.raises(CheckpointError, match="another Trainer in this process"):
            with alone_in_output_dir(second, None):
                pass
    with alone_in_output_dir(second, None):
        pass


def linked(lock: Path, victim: Path) -> None:
    lock.symlink_to(victim)


def hard_linked(lock: Path, victim: Path) -> None:
    os.link(victim, lock)


def a_pipe(lock: Path, victim: Path) -> None:
    os.mkfifo(lock)


def a_folder(lock: Path, victim: Path) -> None:
    lock.mkdir()


@pytest.mark.parametrize("put", [linked, hard_linked, a_pipe, a_folder])
def test_nothing_that_is_no_lock_file_is_written_to_for_one(put, tmp_path):
    """As another user of a shared folder could put it there, over a file of this one's."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    put(run / LOCK_NAME, victim)
    with pytest.raises(
        CheckpointError, match=r"is a link or not a regular file, so hf_zero did not create it\. Remove it"
    ):
        with held_alone(run, disk=Disk.shared(), exchange=alone):
            pass
    assert victim.read_text() == "mine" and os.path.lexists(run / LOCK_NAME)


@pytest.mark.slow
def test_what_a_lock_file_says_of_its_holder_is_not_obeyed_by_a_terminal(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.1)
    (tmp_path / LOCK_NAME).write_text(json.dumps({"pid": "\x1b[31m7", "host": "h", "since": "s"}))
    with pytest.raises(CheckpointError, match=r"process \\x1b\[31m7 on h"):
        with held_alone(tmp_path, disk=Disk.shared(), exchange=alone):
            pass


def takes_as_another_user(folder: str) -> str:
    os.setuid(65534)
    try:
        with held_alone(Path(folder), disk=Disk.shared(), exchange=alone):
            return "taken"
    except CheckpointError as error:
        return str(error)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_users_lock_is_named_as_theirs():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        os.close(os.open(Path(folder, LOCK_NAME), os.O_CREAT, 0o600))
        said = run_alone(takes_as_another_user, time_limit_s=30, keyword_arguments={"folder": folder})
    assert f"{LOCK_NAME} belongs to user 0: a run of that user writes there or left the file behind" in said


class Waits(TrainerCallback):
    """Says that training has begun, and goes on when it is told to."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def on_step_end(self, args, state, control, **kwargs):
        (self._folder / f"begun-{os.getpid()}").touch()
        deadline_s = time.monotonic() + 100
        while state.global_step == 3 and not (self._folder / "go on").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)


def trains(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    make_trainer("flag 2", "bert", f"{folder}/run", callbacks=[Waits(folder)], **saving).train()


def is_refused(rank: int, world_size: int, folder: str) -> str:
    as_launched(rank, world_size)
    run_lock.PATIENCE_S = 0.3
    trainer = make_trainer("flag 2", "bert", f"{folder}/run", save_strategy="steps", save_steps=2, max_steps=6)
    try:
        trainer.train(resume_from_checkpoint="last-good")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_second_run_on_an_output_dir_is_refused_and_the_first_one_goes_on(tmp_path):
    arguments = {"folder": str(tmp_path)}
    first = threading.Thread(
        target=run_ranks, args=(trains,), kwargs={"world_size": 2, "time_limit_s": 150, "keyword_arguments": arguments}
    )
    first.start()
    try:
        deadline_s = time.monotonic() + 100
        while len(list(tmp_path.glob("begun-*"))) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        refusals = run_on_ranks(is_refused, **arguments)
    finally:
        (tmp_path / "go on").touch()
        first.join()
    assert len(set(refusals)) == 1
    assert "another run is writing there (process " in refusals[0] and "its own output_dir" in refusals[0]
    found = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert found == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert all(checkpoint_faults(tmp_path / "run" / name, "zero") == [] for name in found)


def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch):
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "fcntl", refuses)
    with (
        pytest.warns(UserWarning, match=r"on a file system without locks \(No locks available\).*its own output_dir"),
        held_alone(tmp_path, disk=Disk.shared(), exchange=alone),
    ):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    assert not list(tmp_path.iterdir())


def test_a_lock_file_that_its_holder_takes_away_at_the_last_moment_is_made_again(tmp_path, monkeypatch):
    fstat, looks = os.fstat, iter([False, True])

    def then_gone(lock: int) -> os.stat_result:
        if next(looks, False):
            (tmp_path / LOCK_NAME).unlink()
        return fstat(lock)

    monkeypatch.setattr(run_lock.os, "fstat", then_gone)
    with held_alone(tmp_path, disk=Disk.shared(), exchange=alone):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_a_refused_lock_file_that_goes_meanwhile_leaves_the_refusal_to_be_said(tmp_path, monkeypatch):
    def refuses(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def gone(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    (tmp_path / LOCK_NAME).touch()
    monkeypatch.setattr(Path, "lstat", gone)
    monkeypatch.setattr(run_lock.os, "open", refuses)
    with pytest.raises(CheckpointError, match="Permission denied"):
        with held_alone(tmp_path, disk=Disk.shared(), exchange=alone):
            pass


def saves_on_a_full_disk(folder: str) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        torch.save({"a": torch.zeros(1000)}, f"{folder}/bare")
    except RuntimeError as error:
        bare = str(error)
    try:
        with disk_asked(Path(folder)):
            torch.save({"a": torch.zeros(1000)}, f"{folder}/asked")
    except OSError as error:
        return f"{bare} / {errno.errorcode[error.errno]}"
    return ""


def test_a_full_disk_is_called_so_where_torch_says_unexpected_pos(tmp_path):
    said = run_alone(saves_on_a_full_disk, time_limit_s=60, keyword_arguments={"folder": str(tmp_path)})
    assert "unexpected pos" in said and said.endswith("/ EFBIG")
    assert {path.name for path in tmp_path.iterdir()} == {"bare", "asked"}


def test_an_error_of_torch_that_is_not_the_disks_stays_as_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="of its own"), disk_asked(tmp_path):
        raise RuntimeError("of its own")
    assert not list(tmp_path.iterdir())


def test_the_last_run_on_an_nvme_path_leaves_nothing_there(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.close()
    assert len(list(tmp_path.glob("hf_zero-run-*"))) == 1
    second.close()
    assert not list(tmp_path.iterdir())
