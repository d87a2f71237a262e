"""`hf-zero report`: a page about a run."""

from pathlib import Path
from typing import Annotated

import typer

from ..extras import extra
from .output import Json, refuse_special, said_plainly, say, say_error, say_json


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run: Trainer's output_dir, or the folder of zero_log.jsonl.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="HTML file to write; default: zero_report.html in FOLDER.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Writes one HTML page about a training run: loss, speed, time, memory, traffic and faults."""
    with said_plainly():
        refuse_special(output)
        write_page = extra("report", "write_page")
        try:
            if as_json:
                found = extra("report", "make_report")(folder).as_json()
                say_json(found | ({} if output is None else {"page": write_page(folder, output)}))
            else:
                say(str(write_page(folder, output)))
        except extra("report", "ReportError") as error:
            say_error(str(error))
            raise typer.Exit(1) from error
