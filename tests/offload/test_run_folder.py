"""The folder of a run's files: found again from wherever the script is, and apart from other users'."""

import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_zero.offload import tiers
from hf_zero.offload.tiers import RunFolder


def test_a_folder_is_removed_from_wherever_the_script_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("."))
    monkeypatch.chdir("/")
    folder.close()
    assert not list(tmp_path.iterdir())


def test_folders_of_other_users_are_left_alone(tmp_path, monkeypatch, capsys):
    theirs = RunFolder(tmp_path)
    dead = tmp_path / "hf_zero-run-1-0"
    dead.mkdir()
    user = os.getuid()
    monkeypatch.setattr(tiers.os, "getuid", lambda: user + 1)
    ours = RunFolder(tmp_path)
    assert dead.is_dir() and theirs.path.is_dir() and not capsys.readouterr().err
    ours.close()
    monkeypatch.undo()
    theirs.close()


def a_link_to_nothing(shared: Path, victim: Path) -> None:
    (shared / "hf_zero-run-1-abc").symlink_to("/nowhere/at/all")


def a_link_to_a_folder(shared: Path, victim: Path) -> None:
    (shared / "hf_zero-run-1-abc").symlink_to(victim)


def a_file(shared: Path, victim: Path) -> None:
    (shared / "hf_zero-run-1-abc").touch()


def a_pipe(shared: Path, victim: Path) -> None:
    os.mkfifo(shared / "hf_zero-run-1-abc")


def a_linked_lock(shared: Path, victim: Path) -> None:
    dead = shared / "hf_zero-run-1-abc"
    dead.mkdir()
    (dead / "lock").symlink_to(victim / "lock")


PUT = [a_link_to_nothing, a_link_to_a_folder, a_file, a_pipe, a_linked_lock]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("put", PUT)
def test_what_others_put_into_a_shared_path_is_not_followed_and_refuses_no_run(put, tmp_path, capsys):
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    victim.mkdir()
    for name in ("lock", "mine"):
        (victim / name).write_text("kept")
    put(shared, victim)
    folder = RunFolder(shared)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.close()
    assert not folder.path.exists() and os.path.lexists(shared / "hf_zero-run-1-abc")
    assert [(victim / name).read_text() for name in ("lock", "mine")] == ["kept", "kept"]
    assert ("and stays" in capsys.readouterr().err) == (put is a_linked_lock)


@pytest.mark.timeout(20)
def test_no_lock_of_anybodys_is_waited_for(tmp_path):
    held = [tmp_path / f".hf_zero-turn-{os.getuid()}", tmp_path / "hf_zero-run-1-abc" / "lock"]
    held[1].parent.mkdir()
    handles = [os.open(path, os.O_CREAT | os.O_RDWR) for path in held]
    for handle in handles:
        fcntl.flock(handle, fcntl.LOCK_EX)
    RunFolder(tmp_path).close()
    assert all(path.exists() for path in held)
    os.close(handles[1])
    RunFolder(tmp_path).close()
    assert not held[1].parent.exists()


@pytest.mark.parametrize("files", [[], ["lock"], ["bucket-0.state"], ["lock", "bucket-0.state"]])
def test_what_a_run_left_that_was_killed_at_any_moment_is_removed(files, tmp_path, capsys):
    left = tmp_path / "hf_zero-run-1-abc"
    left.mkdir()
    for name in files:
        (left / name).write_text("x" * (name != "lock"))
    RunFolder(tmp_path).close()
    assert not list(tmp_path.iterdir())
    assert ("removed" in capsys.readouterr().err) == ("bucket-0.state" in files)


@pytest.mark.timeout(60)
def test_runs_that_begin_and_end_at_once_take_nothing_from_each_other(tmp_path):
    def run(number: int) -> None:
        for turn in range(25):
            folder = RunFolder(tmp_path)
            (folder.path / "bucket-0.state").write_text(f"{number} {turn}")
            assert (folder.path / "lock").read_text() and (
                folder.path / "bucket-0.state"
            ).read_text() == f"{number} {turn}"
            folder.close()
            assert not folder.path.exists()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(8)))
    assert not list(tmp_path.iterdir())


def test_a_new_folder_that_another_process_takes_away_is_made_again(tmp_path, monkeypatch):
    stock, taken = fcntl.flock, []

    def takes_the_first(lock: int, kind: int) -> None:
        if not taken:
            [folder] = tmp_path.iterdir()
            taken.append(folder)
            (folder / "lock").unlink()
            folder.rmdir()
        stock(lock, kind)

    monkeypatch.setattr(tiers.fcntl, "flock", takes_the_first)
    folder = RunFolder(tmp_path)
    assert folder.path != taken[0] and (folder.path / "lock").is_file()
    folder.close()
    assert not list(tmp_path.iterdir())
