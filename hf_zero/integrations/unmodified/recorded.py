"""Runs a training script with or without the engine and records its first steps: what each rank of `hf-zero parity` runs."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ...diagnose.parity import seed_everything
from ...diagnose.parity_report import ParityError
from ...diagnose.recorder import Recorder
from ...diagnose.split_copies import is_split
from ..accelerator_mixin import ZeroAcceleratorMixin
from ..seams import replaced
from .command_line import script_call
from .script import run_as_main, run_script


def main(words: list[str] | None = None) -> None:
    """`--record FOLDER --steps 3 --seed 0 [--stock]`, and then what `hf_zero.run` takes."""
    parser = argparse.ArgumentParser(prog="hf_zero.integrations.unmodified.recorded", allow_abbrev=False)
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
    """Records the first steps of all optimizers that accelerate prepares; ends the script behind them by SystemExit."""
    accelerators: list[Accelerator] = []

    def models() -> list[nn.Module]:
        prepared = [(a, model) for a in accelerators for model in a._models]
        found = list(dict.fromkeys(a.unwrap_model(model, keep_torch_compile=False) for a, model in prepared))
        for model in filter(is_split, found):
            raise ParityError(
                f"hf_zero parity: {type(model).__name__} is split over ranks (tensor or expert parallel), and a script is "
                "compared with DDP, which holds whole models. Call hf_zero.parity(model, batches, config) in a script under "
                "torchrun: it compares with a plain all-reduce over the copies."
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
