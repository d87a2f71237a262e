"""Output of the commands: lines and tables or one JSON document on stdout, each error in one line on stderr."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderHook
from rich.segment import Segment

from ..checkpoint.faults import CheckpointError, shown
from ..config import ConfigError
from ..config.checks import spelled
from ..extras import MissingExtraError


class _Spelled:
    """Escapes control characters in the printed text, and leaves the codes of the console itself."""

    def __init__(self, printed: Any):
        self._printed = printed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._printed, options):
            yield segment if segment.control else Segment(spelled(segment.text), segment.style)


class _SpelledOut(RenderHook):
    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [_Spelled(each) for each in renderables]


console = Console()
_errors = Console(stderr=True, soft_wrap=True)
for each in (console, _errors):
    # Both consoles print names from files.
    each.push_render_hook(_SpelledOut())

LONGEST_LINE = 2000
"""Length limit of a line which may quote names from a file."""

Folder = Annotated[Path, typer.Argument(help="A checkpoint or a model folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


class Dtype(str, Enum):
    """The dtypes in which weights can be written."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def say(line: str) -> None:
    """Prints one line on stdout, without wrapping or colors; a line break in a name is escaped."""
    # Without markup: rich would read brackets in a name as styles.
    console.print(line.replace("\n", "\\n"), markup=False, highlight=False, soft_wrap=True)


def say_json(document: Any) -> None:
    """Prints a JSON document on stdout; paths become text."""
    # Without rich, which wraps long lines at the width of the terminal, even inside strings.
    # JSON escapes every control character except DEL.
    typer.echo(json.dumps(document, indent=2, default=str).replace("\x7f", "\\u007f"))


def say_error(line: str) -> None:
    """Prints one line on stderr; a line break in a name is escaped."""
    _errors.print(shown(line, LONGEST_LINE), markup=False, highlight=False)


@contextmanager
def said_plainly() -> Iterator[None]:
    """Turns errors of hf_zero and of the file system into one line and exit status 1."""
    try:
        yield
    except (CheckpointError, ConfigError, MissingExtraError) as error:
        say_error(str(error))
        raise typer.Exit(1) from error
    except OSError as error:
        name = f": {error.filename!r}" if error.filename is not None else ""
        say_error(f"hf_zero: {error.strerror}{name}." if error.strerror else f"hf_zero: {error}")
        raise typer.Exit(1) from error


def refuse_special(*paths: Path | None) -> None:
    """Raises `ConfigError` for a link, pipe or device, because the command's output file would replace it."""
    for path in paths:
        if path is not None and (path.is_symlink() or (path.exists() and not path.is_file())):
            raise ConfigError(
                f"hf_zero: {path} is a link or not a regular file, so nothing was written. Name a new file."
            )
