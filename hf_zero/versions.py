"""The version of hf_zero, and the oldest supported releases of its libraries."""

import functools
import importlib.metadata
import re

__version__ = "0.1.0"

OLDEST = {"torch": (2, 11), "transformers": (5, 16), "accelerate": (1, 13)}
"""Maps each library to its oldest supported release. `pyproject.toml` asks pip for the same releases."""


def release_of(library: str) -> str | None:
    """Returns the installed version of `library`; None for a missing library."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_older(found: str, oldest: tuple[int, ...]) -> bool:
    """Whether the version `found`, such as "2.13.0+cpu", is before the release `oldest`, such as (2, 11)."""
    return tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest


def in_words(release: tuple[int, ...]) -> str:
    """Returns "2.11" for (2, 11)."""
    return ".".join(map(str, release))


@functools.cache
def refuse_old_libraries() -> None:
    """Raises `ImportError` if a library is too old, before its missing names and arguments raise less clear errors.

    pip warns about such an environment but leaves it in place, for example after another package pinned an old accelerate.
    """
    for library, oldest in OLDEST.items():
        found = release_of(library)
        if found is not None and is_older(found, oldest):
            wanted = f"{library}>={in_words(oldest)}"
            raise ImportError(f"hf_zero needs {wanted}, and {library} {found} is installed: pip install -U '{wanted}'.")
