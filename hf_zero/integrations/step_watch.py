"""Detects optimizer steps without the requested engine, at the first step, when set-up is complete."""

import os
import sys
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .launcher import CONFIG_VARIABLE


# torch calls a global hook before the step of any optimizer. There is no other sign of a plugin ignored by accelerate, or of
# HF_ZERO_CONFIG ignored by a script.
class StepWatch:
    """Calls `judge` before each optimizer step, until `judge` returns True or the watch is closed.

    Args:
        judge: called with the optimizer and the engine that steps it, or None; returns True to end the watch.
    """

    def __init__(self, judge: Callable[[torch.optim.Optimizer, object | None], bool]):
        self._judge = judge
        self._is_done = False
        self._handle = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._is_done = True
        self._handle.remove()

    def _look(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        # The hook stays registered when done, because torch is iterating over its hooks at this moment.
        if not self._is_done:
            # Imported here, so importing hf_zero does not import the engine.
            from ..step.sharded_optimizer import engine_stepped_by

            # Mark as done first: if `judge` raises, the user has seen the error, and a notebook may go on.
            self._is_done = True
            self._is_done = self._judge(optimizer, engine_stepped_by(optimizer))


def watch_for_the_variable() -> None:
    """Warns once, on rank 0, if HF_ZERO_CONFIG is set but an optimizer steps without an engine."""
    asked = os.environ[CONFIG_VARIABLE]

    def judge(optimizer: torch.optim.Optimizer, engine: object | None) -> bool:
        # Rank 0 according to the variable RANK, because a script without the engine may have no process group.
        if engine is None and os.environ.get("RANK", "0") == "0":
            print(
                f"hf_zero: {CONFIG_VARIABLE} is {asked!r}, and {type(optimizer).__name__} steps without the engine: nothing is "
                "sharded. Only ZeroPlugin() and ZeroCallback() without arguments read the variable. Pass one "
                "of them to the Accelerator or the Trainer, or pass `--zero`, or unset the variable.",
                file=sys.stderr,
                flush=True,
            )
        return True

    StepWatch(judge)
