"""A training script, as it is, run without and with the engine, and compared."""

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...diagnose.parity_report import ParityError, ParityReport, compare, repeats
from ...diagnose.recording import Recording
from .command_line import CONFIG_VARIABLE
from .launcher import launch_of

MODULE = "hf_zero.integrations.unmodified.recorded"


def parity_of_script(
    words: Sequence[str],
    *,
    steps: int = 3,
    tolerance: float | None = None,
    seed: int = 0,
    processes: int | None = None,
    cpu: bool = False,
    mixed_precision: str | None = None,
    port: int | None = None,
) -> ParityReport:
    """Runs a script that knows nothing of hf_zero twice under accelerate's launcher, and compares its first steps.

    Both runs end behind these steps. They write every gradient and parameter to a temporary folder: 8 bytes a float32 parameter
    for each step and run.

    Args:
        words: what follows `-m hf_zero.run`: `--zero 2 script.py --its-own arguments`.
        steps: optimizer steps, those of all optimizers counted.
        tolerance, seed: see `hf_zero.parity`; scripts that seed by themselves have their own.
        processes, cpu, mixed_precision, port: see `launch_of`.

    Raises:
        ParityError: a run failed, or the two cannot be compared.
    """

    def run(name: str, *options: str) -> Recording:
        folder = Path(root, name)
        folder.mkdir()
        launch = launch_of(
            words,
            processes=processes,
            cpu=cpu,
            mixed_precision=mixed_precision,
            port=port,
            module=MODULE,
            options=("--record", str(folder), "--steps", str(steps), "--seed", str(seed), *options),
        )
        environment = os.environ | launch.environment
        # stdout is the report's.
        status = subprocess.run(launch.command, env=environment, stdout=sys.stderr.fileno()).returncode
        if status:
            which = "without" if "--stock" in options else "with"
            raise ParityError(
                f"hf_zero parity: the run {which} the engine ended with status {status}; what it said stands above."
            )
        return Recording(folder)

    with tempfile.TemporaryDirectory(prefix="hf-zero-parity-") as root:
        stock, engine = run("stock", "--stock"), run("engine")
        report = compare(stock, engine, tolerance)
        if report.passed or report.reasons:
            return report
        return dataclasses.replace(report, repeats=repeats(stock, run("again", "--stock")))


def words_of(script: Sequence[str], zero: str | None, *, is_module: bool) -> list[str]:
    """What `parity_of_script` takes, of the parts of a command line; without `zero`, HF_ZERO_CONFIG says it."""
    said = zero if zero is not None else os.environ.get(CONFIG_VARIABLE)
    return [*(("--zero", said) if said else ()), *(("-m",) if is_module else ()), *script]
