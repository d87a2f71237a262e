"""`hf-zero parity`."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .output import console, said_plainly, say, say_error, say_json

if TYPE_CHECKING:
    from ..diagnose.parity_report import ParityReport

_PARAMETERS_SHOWN = 10


def parity(
    script: Annotated[
        list[str], typer.Argument(help="A Python file, or a module's name behind -m, and its own arguments.")
    ],
    zero: Annotated[
        str | None, typer.Option(help="A stage (0, 1, 2, 3), a YAML file, or settings; else HF_ZERO_CONFIG.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Relative difference that passes; by default what is to be expected.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random numbers of a script that does not seed.")] = 0,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    num_processes: Annotated[
        int | None, typer.Option(help="Ranks; one for each GPU by default, or one on a CPU.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU, whatever GPUs there are.")] = False,
    mixed_precision: Annotated[str | None, typer.Option(help="no, fp16 or bf16.")] = None,
    port: Annotated[int | None, typer.Option(help="Where the ranks meet.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Runs an unmodified script without and with the engine, and compares its first steps. Exits with 1 where they differ."""
    from ..diagnose.parity_report import ParityError
    from ..integrations.unmodified.parity import parity_of_script, words_of

    with said_plainly():
        try:
            report = parity_of_script(
                words_of(script, zero, is_module=module),
                steps=steps,
                tolerance=tolerance,
                seed=seed,
                processes=num_processes,
                cpu=cpu,
                mixed_precision=mixed_precision,
                port=port,
            )
        except ParityError as error:
            say_error(str(error))
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


def _table(report: "ParityReport") -> Table:
    """The parameters that are furthest apart."""
    table = Table("parameter", "largest difference of a gradient", "of the parameter itself")
    names = sorted(
        report.gradients.keys() | report.parameters.keys(),
        key=lambda name: -max(report.gradients.get(name, 0.0), report.parameters.get(name, 0.0)),
    )
    for name in names[:_PARAMETERS_SHOWN]:
        table.add_row(name, f"{report.gradients.get(name, 0.0):.3g}", f"{report.parameters.get(name, 0.0):.3g}")
    return table
