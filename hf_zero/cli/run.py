"""`hf-zero run`."""

import os
import shlex
from typing import Annotated

import typer

from .output import said_plainly, say_error, say_json

# All that follows the script's name is the script's own.
SCRIPT_WORDS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def run(
    script: Annotated[
        list[str], typer.Argument(help="A Python file, or a module's name behind -m, and its own arguments.")
    ],
    zero: Annotated[
        str | None, typer.Option(help="A stage (0, 1, 2, 3, auto), a YAML file, or settings; else HF_ZERO_CONFIG.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    num_processes: Annotated[
        int | None, typer.Option(help="Ranks; one for each GPU by default, or one on a CPU.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU, whatever GPUs there are.")] = False,
    mixed_precision: Annotated[str | None, typer.Option(help="no, fp16 or bf16.")] = None,
    port: Annotated[int | None, typer.Option(help="Where the ranks meet.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the command and its environment instead of starting it.")
    ] = False,
) -> None:
    """Trains an unmodified script with the engine: `hf-zero run --zero 2 train.py --its-own arguments`."""
    from ..integrations.unmodified.launcher import launch_of

    words = [*(("--zero", zero) if zero is not None else ()), *(("-m",) if module else ()), *script]
    with said_plainly():
        launch = launch_of(words, processes=num_processes, cpu=cpu, mixed_precision=mixed_precision, port=port)
    if as_json:
        say_json({"command": launch.command, "environment": launch.environment})
        return
    variables = [f"{name}={value}" for name, value in launch.environment.items()]
    say_error(f"hf-zero run: {shlex.join([*variables, *launch.command])}")
    # In place of this process: the launcher gets its signals, and its exit status is the command's.
    os.execve(launch.command[0], launch.command, os.environ | launch.environment)
