"""The command hf-zero in this process, and the lines in which it refuses."""

from click.testing import Result
from typer.testing import CliRunner

from hf_zero.cli.app import app


def hf_zero(*arguments: object) -> Result:
    """Runs a command. Whatever it reads, it prints nothing that a terminal obeys."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    # Progress bars of other packages move the cursor, on the error output.
    own = [*result.stdout.splitlines(), *(line for line in result.stderr.splitlines() if "hf_zero" in line)]
    assert all(line.isprintable() for line in own), result.output
    return result


def refusals(*arguments: object) -> list[str]:
    """The lines on the error output of a command that exits with 1 and prints nothing else."""
    result = hf_zero(*arguments)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    return result.stderr.splitlines()
