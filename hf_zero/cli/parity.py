"""`hf-zero parity`: compares a script with and without the engine."""

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..extras import extra
from .launching import Cpu, Module, Port, Precision, Processes, Script, SequenceRanks
from .output import Json, console, said_plainly, say, say_error, say_json

_PARAMETERS_SHOWN = 10


def parity(
    script: Script,
    zero: Annotated[
        str | None, typer.Option(help="A stage (0, 1, 2, 3), a YAML file, or settings; default: HF_ZERO_CONFIG.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to compare.")] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Largest relative difference that passes; default: depends on the settings."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for a script that sets none.")] = 0,
    module: Module = False,
    num_processes: Processes = None,
    cpu: Cpu = False,
    mixed_precision: Precision = None,
    port: Port = None,
    sp: SequenceRanks = None,
    as_json: Json = False,
) -> None:
    """Runs an unmodified script without and with the engine and compares the first steps. Exits with 1 if the steps differ."""
    with said_plainly():
        try:
            report = extra("diagnose", "parity_of_script")(
                extra("diagnose", "words_of")(script, zero, is_module=module),
                steps=steps,
                tolerance=tolerance,
                seed=seed,
                processes=num_processes,
                cpu=cpu,
                mixed_precision=None if mixed_precision is None else mixed_precision.value,
                port=port,
                sp=sp,
            )
        except extra("diagnose", "ParityError") as error:
            say_error(str(error))
            # Status 1 means different steps. Here nothing was compared.
            raise typer.Exit(2) from error
    if as_json:
        say_json(report.to_dict())
    else:
        for line in report.lines():
            say(line)
        if not report.equal:
            console.print(_table(report))
    if not report.passed:
        raise typer.Exit(1)


def _table(report: Any) -> Table:
    """Makes a table of the parameters with the largest differences in a `ParityReport`."""
    table = Table("parameter", "largest gradient difference", "largest parameter difference")
    names = sorted(
        report.gradients.keys() | report.parameters.keys(),
        key=lambda name: -max(report.gradients.get(name, 0.0), report.parameters.get(name, 0.0)),
    )
    for name in names[:_PARAMETERS_SHOWN]:
        table.add_row(Text(name), f"{report.gradients.get(name, 0.0):.3g}", f"{report.parameters.get(name, 0.0):.3g}")
    return table
