"""Files in folders with other writers: no link is followed, and no name belongs to a partial file."""

import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from .faults import CheckpointError


def leads_out(root: Path, path: Path) -> bool:
    """Whether `path`, somewhere below `root`, resolves to a file or folder outside of `root`.

    A snapshot in the Hub's cache consists of links to the `blobs` folder of its repository, which counts as inside.
    """
    here, real = os.path.realpath(root), os.path.realpath(path)
    # Compare with the separator: `/runs/model-2` starts with `/runs/model` and is outside.
    if real == here or real.startswith(here + os.sep):
        return False
    snapshots = Path(here).parent
    return snapshots.name != "snapshots" or Path(real).parent != snapshots.parent / "blobs"


def entry_faults(root: Path) -> list[str]:
    """Describes the entries below `root` which are never read: links to outside, pipes, devices."""
    walk = os.walk(root)
    paths = sorted(Path(folder, name) for folder, folders, files in walk for name in (*folders, *files))
    links = [path for path in paths if path.is_symlink() and leads_out(root, path)]
    # Reading a pipe would wait, and a device has no end. A dangling link leads out, or exists for no reader.
    odd = [path for path in paths if path.exists() and not path.is_file() and not path.is_dir()]
    return [
        *(f"{path.relative_to(root).as_posix()} is a link that leads out of the folder" for path in links),
        *(f"{path.relative_to(root).as_posix()} is not a regular file" for path in odd),
    ]


def refuse_links(root: Path, paths: Iterable[Path]) -> None:
    """Raises `CheckpointError` if one of these paths leads out of `root`."""
    for path in paths:
        if leads_out(root, path):
            raise CheckpointError(
                f"hf_zero: {path} leads out of {root} (to {os.path.realpath(path)}), but only files inside that folder are "
                "read or copied. Replace the link with the file itself, or remove the link."
            )


MARK = ".hf_zero-"
"""Prefix of the names of short-lived files. A killed run may leave some; the next run removes them."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes `content` to a temporary file and renames the file to `path`. A link at `path` is replaced, not followed."""
    # Others cannot guess the temporary name and put a link there. Mode "x" would refuse a link anyway.
    temporary = path.with_name(f"{MARK}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # The rename may reach the disk before the content: after a power cut, the name would belong to an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # Name the final path, which the reader of the error knows.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def copy_new(source: Path, target: Path) -> None:
    """Copies a file's content, permissions and times. Raises `FileExistsError` if `target` exists, even as a link."""
    with source.open("rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written)
        written.flush()
        found = os.fstat(read.fileno())
        os.fchmod(written.fileno(), stat.S_IMODE(found.st_mode))
        os.utime(written.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))


def open_in_place(path: Path, flags: int) -> int:
    """Opens a file for changes in place, or makes one. Returns the handle.

    Raises:
        CheckpointError: it is a link, a file with several names (hard links), or no plain file.
    """
    refusal = f"{path} is a link or not a regular file, so hf_zero did not create it. Remove it"
    # O_NONBLOCK: opening a pipe would otherwise wait for its other end.
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(refusal) from error
        raise
    # The flags accept a hard link, which may be another file of this user, and a pipe. Use `fstat`, as the file at the path may
    # have been replaced since.
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        raise CheckpointError(refusal)
    return file


_LONGEST_PATH = 1024


_LONGEST_PART = 255
"""Limit of file systems for one name between two slashes, in bytes."""


def no_folder(path: Path) -> str:
    """Explains why `path` is not a folder."""
    return f"{path} is a file; pass the folder that contains it" if path.exists() else f"there is no folder {path}"


def files_below(folder: Path) -> list[str]:
    """Lists all files below a folder as relative paths with forward slashes, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def is_inside(name: str) -> bool:
    """Whether a recorded name stays inside its folder: relative, without `..`, printable, and not too long."""
    path = PurePosixPath(name)
    return (
        0 < len(name) <= _LONGEST_PATH
        and name.isprintable()
        and "\\" not in name
        and not path.is_absolute()
        and ".." not in path.parts
        and all(len(part.encode()) <= _LONGEST_PART for part in path.parts)
    )


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of names, from the system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
