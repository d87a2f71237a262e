"""Runs an unchanged script twice, with and without the engine, for `hf-zero parity`."""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..hooks.replaced import replaced
from ..integrations.accelerator import ZeroAcceleratorMixin
from ..integrations.launcher import CONFIG_VARIABLE, launch_of, ranks_of, script_call
from ..integrations.unmodified import run_as_main, run_script
from .parity import Recorder, is_split, seed_everything
from .parity_report import ParityError, ParityReport, Recording, compare, repeats

# ---- Runs an unchanged training script without and with the engine, and compares the runs ----

MODULE = "hf_zero.diagnose.recorded"


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
    sp: int | None = None,
) -> ParityReport:
    """Runs a script without hf_zero twice under accelerate's launcher, and compares its first steps.

    Both runs end after these steps. They write all gradients and parameters to a temporary folder: 8 bytes for each float32
    parameter, step and run.

    Args:
        words: the arguments of `-m hf_zero.run`: `--zero 2 script.py --its-own arguments`.
        steps: number of optimizer steps, summed over all optimizers.
        tolerance, seed: see `hf_zero.parity`; scripts that set a seed use their own.
        processes, cpu, mixed_precision, port: see `launch_of`.
        sp: number of ranks that compute a sequence together. The run without the engine has one rank for each of these sets.

    Raises:
        ParityError: a run failed, or the two cannot be compared.
    """

    ranks = ranks_of(processes, cpu=cpu)

    def run(name: str, *options: str) -> Recording:
        folder = Path(root, name)
        folder.mkdir()
        in_sequences = None if "--stock" in options else sp
        launch = launch_of(
            words,
            processes=ranks if in_sequences else ranks // (sp or 1),
            sp=in_sequences,
            cpu=cpu,
            mixed_precision=mixed_precision,
            port=port,
            module=MODULE,
            options=("--record", str(folder), "--steps", str(steps), "--seed", str(seed), *options),
        )
        environment = os.environ | launch.environment
        # stdout is reserved for the report.
        status = subprocess.run(launch.command, env=environment, stdout=sys.stderr.fileno()).returncode
        if status:
            which = "without" if "--stock" in options else "with"
            raise ParityError(
                f"hf_zero parity: the run {which} the engine ended with status {status}; its output is above."
            )
        return Recording(folder, every=in_sequences or 1)

    # First check whether `sp` divides the ranks, because the run takes several minutes.
    launch_of(words, processes=processes, cpu=cpu, sp=sp)
    with tempfile.TemporaryDirectory(prefix="hf-zero-parity-") as root:
        stock, engine = run("stock", "--stock"), run("engine")
        report = compare(stock, engine, tolerance)
        if report.passed or report.reasons:
            return report
        return dataclasses.replace(report, repeats=repeats(stock, run("again", "--stock")))


def words_of(script: Sequence[str], zero: str | None, *, is_module: bool) -> list[str]:
    """Splits a command line into the arguments of `parity_of_script`; without `zero`, HF_ZERO_CONFIG is used."""
    said = zero if zero is not None else os.environ.get(CONFIG_VARIABLE)
    return [*(("--zero", said) if said else ()), *(("-m",) if is_module else ()), *script]


# ---- A rank of `hf-zero parity`: runs a script with or without the engine, and records its first steps ----


def main(words: list[str] | None = None) -> None:
    """Parses `--record FOLDER --steps 3 --seed 0 [--stock]`, followed by the arguments of `hf_zero.run`."""
    parser = argparse.ArgumentParser(prog="hf_zero.diagnose.recorded", allow_abbrev=False)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true")
    said, rest = parser.parse_known_args(sys.argv[1:] if words is None else words)
    call = script_call(rest)
    seed_everything(said.seed)
    with recording(said.record, said.steps):
        if said.stock:
            run_as_main(call)
        else:
            run_script(call)


@contextmanager
def recording(folder: Path, steps: int) -> Iterator[None]:
    """Records the first steps of all optimizers prepared by accelerate, then ends the script with SystemExit."""
    accelerators: list[Accelerator] = []

    def models() -> list[nn.Module]:
        prepared = [(a, model) for a in accelerators for model in a._models]
        found = list(dict.fromkeys(a.unwrap_model(model, keep_torch_compile=False) for a, model in prepared))
        for model in filter(is_split, found):
            raise ParityError(
                f"hf_zero parity: {type(model).__name__} is split over ranks (tensor or expert parallel), but a script is "
                "compared with DDP, which needs whole models. Call hf_zero.parity(model, batches, config) in a script under "
                "torchrun."
            )
        return found

    def end() -> None:
        raise SystemExit(0)

    recorder = Recorder(folder, steps, models, end)
    prepare = Accelerator.prepare_optimizer

    def prepare_optimizer(accelerator: Accelerator, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(accelerator, optimizer, *args, **kwargs)
        if accelerator not in accelerators:
            accelerators.append(accelerator)
        recorder.watch(prepared.optimizer)
        return prepared

    with ExitStack() as entered:
        entered.enter_context(replaced(Accelerator, "prepare_optimizer", prepare_optimizer))
        for kind in (Accelerator, ZeroAcceleratorMixin):
            entered.enter_context(replaced(kind, "clip_grad_norm_", _recorded_clip(kind, recorder)))
        entered.enter_context(recorder.watching_backward())
        try:
            yield
        finally:
            recorder.close()


def _recorded_clip(kind: type, recorder: Recorder) -> Any:
    clip = vars(kind)["clip_grad_norm_"]

    def clip_grad_norm_(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        norm = clip(accelerator, *args, **kwargs)
        recorder.norm(norm)
        return norm

    return clip_grad_norm_


if __name__ == "__main__":
    main()
