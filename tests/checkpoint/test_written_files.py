"""Files are written through no link: each place that opens a file for writing is listed with the reason why that is safe."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pictures import PACKAGE

from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.files import copy_new, open_in_place, replace_file
from hf_zero.checkpoint.live_pieces import Piece, lay_out

OWN_FOLDER = "in a folder that a rank of this run has just made"
NEW = "O_EXCL or mode x: makes a file, and refuses a link"
NO_LINK = "O_NOFOLLOW, in a file that this run has made"
PLAIN = "O_NOFOLLOW, and refuses everything but a plain file with one name"
LOCK = "O_NOFOLLOW, in a folder of this user, and only locked"
RANDOM = "under a random name that this call draws"
GIVEN = "to an open handle, or to memory"
NOWHERE = "os.devnull"

WRITES = {
    # The three ways to write where others may write, too.
    ("checkpoint/files.py", "replace_file", "temporary.open"): NEW,
    ("checkpoint/files.py", "copy_new", "target.open"): NEW,
    ("checkpoint/files.py", "open_in_place", "os.open"): PLAIN,
    # Checkpoints.
    ("checkpoint/disks.py", "disk_asked", "probe.write_bytes"): RANDOM,
    ("checkpoint/disks.py", "put", "mark.touch"): NEW,
    ("checkpoint/live_pieces.py", "lay_out", "path.open"): NEW,
    ("checkpoint/live_pieces.py", "write", "os.open"): NO_LINK,
    ("foreign/convert.py", "_copy_other_files", "shutil.copy2"): OWN_FOLDER,
    ("foreign/convert.py", "convert", "model.save_pretrained"): OWN_FOLDER,
    ("integrations/data_position.py", "write", "write_text"): OWN_FOLDER,
    # Calls of a notebook's function, in a temporary folder.
    ("integrations/notebook.py", "_write", "path.open"): OWN_FOLDER,
    ("integrations/notebook.py", "main", "write_text"): OWN_FOLDER,
    ("integrations/notebook.py", "main", "os.open"): NOWHERE,
    ("integrations/trainer_stop.py", "evaluation", "self._trainer._save_rng_state"): OWN_FOLDER,
    ("integrations/trainer_saves.py", "_save_other_files", "model.config.save_pretrained"): OWN_FOLDER,
    ("integrations/trainer_saves.py", "_save_other_files", "model.generation_config.save_pretrained"): OWN_FOLDER,
    (
        "integrations/trainer_saves.py",
        "_save_other_files",
        "self._trainer.processing_class.save_pretrained",
    ): OWN_FOLDER,
    ("integrations/trainer_saves.py", "_write_scheduler", "torch.save"): OWN_FOLDER,
    ("integrations/trainer_saves.py", "_write_other_files", "trainer._save_rng_state"): OWN_FOLDER,
    ("integrations/trainer_saves.py", "_write_other_files", "trainer.state.save_to_json"): OWN_FOLDER,
    # Offloaded state, in a folder that only this user can enter.
    ("offload/files.py", "__init__", "os.open"): OWN_FOLDER,
    ("offload/run_folder.py", "_locked", "os.open"): NEW,
    ("offload/run_folder.py", "_remove_if_dead", "os.open"): LOCK,
    ("offload/files.py", "mapped", "torch.from_file"): GIVEN,
    # Pushes and pictures.
    ("hub/push.py", "_place", "os.link"): OWN_FOLDER,
    ("hub/push.py", "_place", "shutil.copy2"): OWN_FOLDER,
    ("integrations/drawing.py", "write_png", "figure.savefig"): GIVEN,
    # Runs, and comparisons of runs.
    ("cli/migrate.py", "migrate", "write.open"): NEW,
    ("presence/error_hook.py", "write_error_file", "json.dump"): GIVEN,
    ("presence/error_hook.py", "write_error_file", "open"): NEW,
    ("diagnose/links.py", "_run", "open"): OWN_FOLDER,
    ("diagnose/software.py", "_can_write_below", "tempfile.TemporaryFile"): NEW,
    ("diagnose/disk.py", "_write", "os.open"): NEW,
    ("diagnose/link_ranks.py", "main", "write_text"): OWN_FOLDER,
    ("diagnose/parity_report.py", "write_facts", "write_text"): OWN_FOLDER,
    ("diagnose/parity_report.py", "write_tensors", "torch.save"): OWN_FOLDER,
    ("diagnose/parity_report.py", "write_trace", "torch.save"): OWN_FOLDER,
    ("report/run_files.py", "__init__", "os.fdopen"): GIVEN,
}
"""(file, function, call) → why no link is followed there."""


def calls(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Calls with the name of the function that each is in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield function, node
        yield from calls(node, node.name if isinstance(node, ast.FunctionDef) else function)


MAKERS = {
    *("write_text", "write_bytes", "savefig", "save_file", "save_pretrained", "save_to_json", "_save_rng_state"),
    *("symlink", "symlink_to", "hardlink_to", "link_to", "link", "mkfifo", "mknod", "tofile", "memmap", "from_file"),
    *(
        "copyfile",
        "copy2",
        "copytree",
        "move",
        "extractall",
        "unpack_archive",
        "serialize_file",
        "FileHandler",
        "mkstemp",
    ),
    *("NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile", "export_chrome_trace", "_dump_snapshot"),
}
OF_MODULES = {"torch.save", "np.save", "numpy.save", "shutil.copy", "json.dump", "pickle.dump", "yaml.dump"}
READ_ONLY = {"O_RDONLY", "O_DIRECT", "O_DIRECTORY", "O_CLOEXEC", "O_NOFOLLOW", "os"}


def writes(call: ast.Call) -> bool:
    """Whether a call may open a file for writing, or make one."""
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if name == "os.open":
        nodes = list(ast.walk(call.args[1]))
        names = {n.id for n in nodes if isinstance(n, ast.Name)} | {
            n.attr for n in nodes if isinstance(n, ast.Attribute)
        }
        return not names <= READ_ONLY
    if last in ("open", "fdopen"):
        place = 0 if last == "open" and "." in name else 1
        modes = [*call.args[place : place + 1], *(k.value for k in call.keywords if k.arg == "mode")]
        return any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in modes)
    if last == "touch":
        return not call.args
    if last.endswith("safe_dump"):
        return len(call.args) > 1 or any(k.arg == "stream" for k in call.keywords)
    return last in MAKERS or name in OF_MODULES


def found_in_the_code() -> set[tuple[str, str, str]]:
    return {
        (path.relative_to(PACKAGE).as_posix(), function, shortened(ast.unparse(call.func)))
        for path in sorted(PACKAGE.rglob("*.py"))
        for function, call in calls(ast.parse(path.read_text(encoding="utf-8")))
        if writes(call)
    }


def shortened(name: str) -> str:
    """Without what is computed before the last dot."""
    return name if all(c.isidentifier() for c in name.split(".")) else name.rpartition(".")[2]


def test_each_place_that_opens_a_file_for_writing_is_listed():
    found = found_in_the_code()
    assert found - set(WRITES) == set(), "write through replace_file, copy_new or open_in_place; or list the reason"
    # An extra's folder may be missing.
    listed = {place for place in WRITES if (PACKAGE / place[0]).is_file()}
    assert listed - found == set(), "listed, and no longer in the code"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("keep")
    return path


def planted(at: Path, victim: Path) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(victim)


def test_a_replaced_file_takes_the_place_of_a_link(tmp_path, victim):
    planted(tmp_path / "run" / "f", victim)
    replace_file(tmp_path / "run" / "f", "new")
    assert victim.read_text() == "keep" and os.listdir(tmp_path / "run") == ["f"]
    assert (tmp_path / "run" / "f").read_text() == "new" and not (tmp_path / "run" / "f").is_symlink()


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    (tmp_path / "f").mkdir()
    with pytest.raises(OSError) as raised:
        replace_file(tmp_path / "f", b"new")
    assert str(raised.value).endswith(f"directory: '{tmp_path / 'f'}'")
    assert os.listdir(tmp_path) == ["f"]


def test_a_copy_is_made_through_no_link_and_keeps_permissions_and_times(tmp_path, victim):
    (tmp_path / "source").write_text("new")
    os.chmod(tmp_path / "source", 0o640)
    os.utime(tmp_path / "source", (1, 2))
    planted(tmp_path / "link", victim)
    with pytest.raises(FileExistsError):
        copy_new(tmp_path / "source", tmp_path / "link")
    copy_new(tmp_path / "source", tmp_path / "copy")
    found = (tmp_path / "copy").stat()
    assert victim.read_text() == "keep" and (tmp_path / "copy").read_text() == "new"
    assert (found.st_mode & 0o777, found.st_mtime) == (0o640, 2)


def test_weights_are_written_through_no_link(tmp_path, victim):
    path = tmp_path / "model.safetensors"
    planted(path, victim)
    begins = lay_out(path, {"w": (torch.float32, (4,))})
    piece = Piece(path=path, offset=begins["w"], values=torch.ones(4))
    piece.write()
    assert not path.is_symlink()
    path.unlink()
    planted(path, victim)
    with pytest.raises(OSError):
        piece.write()
    assert victim.read_text() == "keep"


@pytest.mark.parametrize(
    "put", [os.symlink, os.link, lambda _victim, at: os.mkfifo(at), lambda _victim, at: os.mkdir(at)]
)
def test_a_file_that_is_changed_in_place_is_a_plain_one_with_one_name(put, tmp_path, victim):
    put(victim, tmp_path / "f")
    with pytest.raises(CheckpointError, match="is a link or not a regular file"):
        open_in_place(tmp_path / "f", os.O_RDWR | os.O_APPEND)
    assert victim.read_text() == "keep"
