"""What the commands of `hf-zero` print: lines and tables or one JSON document, errors in one line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..checkpoint.format.errors import CheckpointError
from ..checkpoint.format.text import shown
from ..config import ConfigError
from ..integrations.reasons import HubError

console = Console()
_errors = Console(stderr=True, soft_wrap=True)

LONGEST_LINE = 2000
"""Characters of a line that may quote names out of a file."""

Folder = Annotated[Path, typer.Argument(help="A checkpoint or a model folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


class Dtype(str, Enum):
    """What weights can be written in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def say(line: str) -> None:
    """One line on stdout, as it is: not wrapped, not coloured."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def say_json(document: Any) -> None:
    """A JSON document on stdout; paths in it become text."""
    typer.echo(json.dumps(document, indent=2, default=str))


def say_error(line: str) -> None:
    """One line on stderr, whatever names out of a file are in it."""
    _errors.print(shown(line, LONGEST_LINE), markup=False, highlight=False)


@contextmanager
def said_plainly() -> Iterator[None]:
    """Turns our own errors, and a disk's, into one line and exit status 1."""
    try:
        yield
    except (CheckpointError, ConfigError, HubError, OSError) as error:
        say_error(str(error))
        raise typer.Exit(1) from error
