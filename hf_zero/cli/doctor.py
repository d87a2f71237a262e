"""`hf-zero doctor`: checks a machine."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..extras import extra
from .output import Json, console, said_plainly, say, say_json

_STYLES = {"good": "green", "hint": "yellow", "bad": "bold red", "absent": "dim"}


def doctor(
    folder: Annotated[Path, typer.Option(help="Measure the disk of this folder.")] = Path("."),
    processes: Annotated[
        int | None, typer.Option(min=2, help="Number of ranks to start for measuring the links.")
    ] = None,
    tp_size: Annotated[int, typer.Option(min=1, help="Number of ranks that hold one copy of the model together.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the measurements of disk and links.")] = False,
    as_json: Json = False,
) -> None:
    """Checks versions, devices, limits, disk, links and conflicting settings, and advises on each. Exits with 1 on a fault."""
    with said_plainly():
        found = extra("diagnose", "doctor")(folder, processes, tp_size=tp_size, measure=not quick)
    if as_json:
        say_json(json.loads(found.to_json()))
    else:
        table = Table(title="hf-zero doctor", title_justify="left")
        for column in ("what", "", "found", "what to do"):
            table.add_column(column, overflow="fold")
        for finding in found.findings:
            status = Text(finding.status, style=_STYLES[finding.status])
            table.add_row(Text(finding.subject), status, Text(finding.value), Text(finding.advice))
        console.print(table)
        faults = [finding.subject for finding in found.faults]
        say(f"{len(faults)} fault{'s' * (len(faults) != 1)}: {', '.join(faults)}" if faults else "no faults")
    if not found.is_good:
        raise typer.Exit(1)
