"""The command `hf-zero`: the list of its commands."""

import importlib.metadata
from typing import Annotated

import typer

from ..config.checks import cut_name
from .consolidate import consolidate
from .convert import convert
from .doctor import doctor
from .inspect_folder import inspect
from .migrate import migrate
from .output import console, say_error
from .parity import parity
from .plan import plan
from .push import push
from .rendezvous import rendezvous
from .report import report
from .run import SCRIPT_WORDS, run
from .verify import verify

app = typer.Typer(help="Training with hf_zero, and its checkpoints.", no_args_is_help=True, add_completion=False)
for command in (verify, inspect, consolidate, push, convert, migrate, plan, report, doctor, rendezvous):
    app.command()(command)
app.command(context_settings=SCRIPT_WORDS)(run)
app.command(context_settings=SCRIPT_WORDS)(parity)


@app.command("card", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def _card() -> None:
    say_error(cut_name("hf-zero card"))
    raise typer.Exit(1)


def _tell_version(wanted: bool) -> None:
    if wanted:
        console.print(f"hf-zero {importlib.metadata.version('hf-zero')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Training with hf_zero, and its checkpoints."""


def main() -> None:
    app()
