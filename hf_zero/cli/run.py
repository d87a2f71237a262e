"""`hf-zero run`: trains an unmodified script."""

import os
import shlex
from typing import Annotated

import typer

from .launching import Cpu, Module, Port, Precision, Processes, Script, SequenceRanks
from .output import said_plainly, say_error, say_json

# Words after the script's name belong to the script. An unknown option before the name is an error of `hf-zero run`.
SCRIPT_WORDS = {"allow_interspersed_args": False}


def run(
    script: Script,
    zero: Annotated[
        str | None, typer.Option(help="A stage (0, 1, 2, 3, auto), a YAML file, or settings; default: HF_ZERO_CONFIG.")
    ] = None,
    module: Module = False,
    num_processes: Processes = None,
    cpu: Cpu = False,
    mixed_precision: Precision = None,
    port: Port = None,
    sp: SequenceRanks = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the command and its environment instead of starting it.")
    ] = False,
) -> None:
    """Trains an unmodified script with the engine: `hf-zero run --zero 2 train.py --its-own arguments`.

    If --zero is a YAML file of accelerate, the file also sets the number of ranks and the precision.
    """
    from ..integrations.launcher import launch_of, of_accelerate

    with said_plainly():
        said = of_accelerate(zero)
        zero = said.get("zero", zero)
        words = [*(("--zero", zero) if zero is not None else ()), *(("-m",) if module else ()), *script]
        launch = launch_of(
            words,
            processes=said.get("processes") if num_processes is None else num_processes,
            cpu=cpu,
            mixed_precision=said.get("mixed_precision") if mixed_precision is None else mixed_precision.value,
            port=port,
            sp=said.get("sp") if sp is None else sp,
        )
    if as_json:
        say_json({"command": launch.command, "environment": launch.environment})
        return
    variables = [f"{name}={value}" for name, value in launch.environment.items()]
    say_error(f"hf-zero run: {shlex.join([*variables, *launch.command])}")
    # The launcher replaces this process, so the launcher gets the signals, and its exit status is the command's.
    os.execve(launch.command[0], launch.command, os.environ | launch.environment)
