"""`hf-zero report`."""

from pathlib import Path
from typing import Annotated

import typer

from .output import Json, said_plainly, say, say_error, say_json


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run: Trainer's output_dir, or where its log is.")],
    output: Annotated[
        Path | None, typer.Option(help="The HTML file to write; zero_report.html in the folder by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Writes one HTML page of a training run: loss, speed, where time, memory and bytes went, and what went wrong."""
    from ..report.make_report import make_report
    from ..report.page import write_page
    from ..report.read_run import ReportError

    try:
        with said_plainly():
            if as_json:
                say_json(
                    make_report(folder).as_json() | ({} if output is None else {"page": write_page(folder, output)})
                )
            else:
                say(str(write_page(folder, output)))
    except ReportError as error:
        say_error(str(error))
        raise typer.Exit(1) from error
