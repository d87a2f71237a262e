"""Links that lead out of a folder: what is reached by one belongs to somebody else and is neither read nor copied."""

import os
from collections.abc import Iterable
from pathlib import Path

from .errors import CheckpointError


def leads_out(root: Path, path: Path) -> bool:
    """Whether `path`, somewhere below `root`, is in truth a file or folder elsewhere.

    A snapshot in the Hub's cache is made of links to the `blobs` folder beside it, which is a part of it.
    """
    here, real = os.path.realpath(root), os.path.realpath(path)
    if real == here or real.startswith(here + os.sep):
        return False
    snapshots = Path(here).parent
    return snapshots.name != "snapshots" or Path(real).parent != snapshots.parent / "blobs"


def links_out_of(root: Path) -> list[str]:
    """Names of links below `root`, to files or folders, that lead out of it, relative and sorted."""
    found = []
    for folder, folders, files in os.walk(root):
        paths = [Path(folder, name) for name in (*folders, *files)]
        found += [path.relative_to(root).as_posix() for path in paths if path.is_symlink() and leads_out(root, path)]
    return sorted(found)


def entry_faults(root: Path) -> list[str]:
    """What below `root` is never read, in words: links that lead out of it, and what is neither a file nor a folder."""
    faults = [f"{name} is a link that leads out of the folder" for name in links_out_of(root)]
    # A pipe would be waited for, and a device has no end. A link to nowhere leads out or is no file to anybody.
    odd = (path for path in sorted(root.rglob("*")) if path.exists() and not path.is_file() and not path.is_dir())
    return faults + [f"{path.relative_to(root).as_posix()} is no plain file" for path in odd]


def refuse_links(root: Path, paths: Iterable[Path]) -> None:
    """Raises `CheckpointError` if one of these paths below `root` leads out of it."""
    for path in paths:
        if leads_out(root, path):
            raise CheckpointError(
                f"hf_zero: {path} leads out of {root} (to {os.path.realpath(path)}), and nothing outside of the folder is read "
                "or copied. Put the file itself there, or take the link away."
            )
