"""Reads JSON files of unknown origin: their size is limited, and all faults raise one kind of error."""

import json
import math
from pathlib import Path
from typing import Any

from .faults import CheckpointError

LARGEST_BYTES = 256 * 2**20
"""Far larger than any config, index, trainer state or card data."""


def read_text(path: Path, *, most_bytes: int = LARGEST_BYTES) -> str:
    """Reads a UTF-8 file. Raises `CheckpointError` if the file is unreadable or larger than `most_bytes`."""
    try:
        # Check the size first: a folder from the Hub may contain a file large enough to fill the host's memory.
        nbytes = path.stat().st_size
        if nbytes > most_bytes:
            raise CheckpointError(f"hf_zero: {path} has {nbytes} bytes; allowed: at most {most_bytes}.")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"hf_zero: {path} cannot be read ({error}).") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"hf_zero: {path} is damaged: it is not text ({error.reason}).") from error


def parse_json(text: str, path: Path) -> Any:
    """Parses a file's text. Raises `CheckpointError` for invalid JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"hf_zero: {path} is damaged: its values are nested too deeply.") from error
    except ValueError as error:
        # Python also raises this for an integer with too many digits.
        raise CheckpointError(f"hf_zero: {path} is damaged ({error}).") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON file with a mapping. Raises `CheckpointError` for any other content."""
    content = parse_json(read_text(path), path)
    if not isinstance(content, dict):
        raise CheckpointError(f"hf_zero: {path} holds a {type(content).__name__}; expected: a mapping.")
    return content


_MOST_COUNTED = 2**63
"""Larger than any size that torch supports."""


def is_size(value: object) -> bool:
    """Whether a JSON value is a number of elements or bytes within torch's limits."""
    return type(value) is int and 0 <= value < _MOST_COUNTED


def is_shape(value: object) -> bool:
    """Whether a JSON value is a list of sizes whose product torch can count."""
    if not isinstance(value, list) or not all(is_size(size) for size in value):
        return False
    # Leave out zeros: torch also multiplies the remaining sizes.
    return math.prod(size for size in value if size) < _MOST_COUNTED
