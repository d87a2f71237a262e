"""Runs the command hf-zero in this process, and returns its refusals."""

from click.testing import Result
from typer.testing import CliRunner

from hf_zero.cli.app import app


def hf_zero(*arguments: object) -> Result:
    """Runs a command. Its output must be printable, whatever the command reads."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    # Progress bars of other packages move the cursor on stderr, so check only hf_zero's lines there.
    own = [*result.stdout.splitlines(), *(line for line in result.stderr.splitlines() if "hf_zero" in line)]
    assert all(line.isprintable() for line in own), result.output
    return result


def refusals(*arguments: object) -> list[str]:
    """Returns the lines on stderr of a command that must exit with 1 and print nothing else."""
    result = hf_zero(*arguments)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    return result.stderr.splitlines()
