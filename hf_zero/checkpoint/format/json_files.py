"""JSON files that somebody else may have written: read with a limit on their size, and with one kind of error."""

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError

LARGEST_BYTES = 256 * 2**20
"""Far above any config, index, trainer state or card data; what is larger is no such file."""


def read_json(path: Path, *, most_bytes: int = LARGEST_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        CheckpointError: it cannot be read, is larger than `most_bytes`, or is no JSON.
    """
    return parse_json(read_text(path, most_bytes=most_bytes), path)


def read_text(path: Path, *, most_bytes: int = LARGEST_BYTES) -> str:
    """A UTF-8 file's text. Raises `CheckpointError` when it cannot be read or is larger than `most_bytes`."""
    try:
        nbytes = path.stat().st_size
        if nbytes > most_bytes:
            raise CheckpointError(f"hf_zero: {path} has {nbytes} bytes, and at most {most_bytes} are read.")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"hf_zero: {path} cannot be read ({error}).") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"hf_zero: {path} is damaged: it is no text ({error.reason}).") from error


def parse_json(text: str, path: Path) -> Any:
    """The value that a file's text stands for. Raises `CheckpointError` for what is no JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"hf_zero: {path} is damaged: its values are nested too deeply.") from error
    except ValueError as error:
        # Also a number of more digits than Python converts.
        raise CheckpointError(f"hf_zero: {path} is damaged ({error}).") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file. Raises `CheckpointError` when it cannot be read or holds something else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"hf_zero: {path} holds a {type(content).__name__}, where a mapping is due.")
    return content
