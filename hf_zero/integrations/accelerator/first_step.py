"""Optimizer steps without the engine that was asked for: found at the first of them, when all has been set up.

torch calls a hook before the step of any optimizer. Nothing else tells that accelerate has left a plugin aside, or that a script
has read HF_ZERO_CONFIG nowhere.
"""

import os
import sys
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

CONFIG_VARIABLE = "HF_ZERO_CONFIG"


class StepWatch:
    """Calls `judge` before each step that an optimizer takes, until it is closed or `judge` is done.

    Args:
        judge: is given the optimizer and the engine that steps it, or None; returns True when it has seen enough.
    """

    def __init__(self, judge: Callable[[torch.optim.Optimizer, object | None], bool]):
        self._judge = judge
        self._is_done = False
        self._handle = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._is_done = True
        self._handle.remove()

    def _look(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        # The hook stays when it is done: torch goes through its hooks at this moment.
        if not self._is_done:
            # Here, not above: what imports hf_zero need not import the engine.
            from ...optimizer.state.optimizer import engine_stepped_by

            # What raises has said it; a notebook may go on.
            self._is_done = True
            self._is_done = self._judge(optimizer, engine_stepped_by(optimizer))


def watch_for_the_variable() -> None:
    """Says once, on rank 0, that HF_ZERO_CONFIG is set and an optimizer steps without an engine all the same."""
    asked = os.environ[CONFIG_VARIABLE]

    def judge(optimizer: torch.optim.Optimizer, engine: object | None) -> bool:
        if engine is None and os.environ.get("RANK", "0") == "0":
            print(
                f"hf_zero: {CONFIG_VARIABLE} is {asked!r}, and {type(optimizer).__name__} steps without the engine: nothing is "
                "sharded. The variable is what ZeroPlugin() and ZeroCallback() without arguments read. Give "
                "one of these to the Accelerator or the Trainer, or say `--zero`; or unset the variable.",
                file=sys.stderr,
                flush=True,
            )
        return True

    StepWatch(judge)
