"""The folder of a run's files: found again from wherever the script is, and apart from other users'."""

import os
from pathlib import Path

from hf_zero.offload import run_folder
from hf_zero.offload.run_folder import RunFolder


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
    monkeypatch.setattr(run_folder.os, "getuid", lambda: user + 1)
    turns = []
    monkeypatch.setattr(run_folder, "_wait_for", lambda path: turns.append(path) or os.open(path, os.O_CREAT))
    # Opened for writing, or removed, a file of another user's would be an error.
    ours = RunFolder(tmp_path)
    assert turns == [tmp_path / f".hf_zero-turn-{user + 1}"]
    assert dead.is_dir() and theirs.path.is_dir() and not capsys.readouterr().err
    ours.close()
    monkeypatch.undo()
    theirs.close()
