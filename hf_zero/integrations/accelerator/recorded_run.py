"""`report: true` behind accelerate's and Trainer's doors: which folder the log is in, when it begins, and when it ends."""

import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ...config import ConfigError, ZeroConfig
from ...engine.engine import ZeroEngine
from ...report.recorder import RunRecorder, in_one_line
from ..frames import find_in_callers
from .announce import ddp_state, state_plan
from .batch import micro_batches_of
from .leaving import leave

if TYPE_CHECKING:
    # Mixed into Accelerator's subclasses: a type checker takes their methods for inherited.
    from accelerate import Accelerator as _AcceleratorBase
else:
    _AcceleratorBase = object


class RecordedAccelerator(_AcceleratorBase):
    """The part of an Accelerator that keeps the log of a run.

    Attributes:
        zero_recorder: of the run that goes on, on rank 0 and with `report` only.
    """

    zero_config: ZeroConfig
    zero_recorder: RunRecorder | None = None

    def begin_report(self, engine: ZeroEngine, run_folder: str | Path | None, step: int = 0) -> None:
        """Starts the log of a run, where the settings ask for one and none is open.

        Args:
            run_folder: where the run's files go; None is not known.
            step: that the run goes on from.

        Raises:
            ConfigError: on all ranks, where the settings name no folder and neither does the run.
        """
        asked = self.zero_config.report
        folder = asked if isinstance(asked, str) else run_folder
        if not asked or (self.zero_recorder is not None and self.zero_recorder.is_open):
            return
        if folder is None:
            raise ConfigError(
                "hf_zero config: `report: true` writes to the run's folder, and this Accelerator has none. Build it with "
                "`project_dir=...` (or a ProjectConfiguration with `logging_dir`), or name a folder: `report: runs/first`."
            )
        if engine.groups.rank == 0:
            accumulates = micro_batches_of(self) > 1
            self.zero_recorder = recorder = RunRecorder(engine, folder, step=step, plan=_planned(engine, accumulates))
            # A script need not call end_training.
            weakref.finalize(self, _end_at_exit, recorder)

    def end_report(self, how: str = "finished") -> None:
        """Ends the log and writes the page, if there is a log."""
        recorder, self.zero_recorder = self.zero_recorder, None
        if recorder is not None:
            recorder.end(how)

    def record_save(self, began_s: float, folder: Path) -> None:
        """Notes that a save, begun at that moment of `time.perf_counter`, has held training up."""
        if self.zero_recorder is not None:
            self.zero_recorder.stall(time.perf_counter() - began_s, "save", folder)

    def resume_report(self, folder: Path) -> None:
        """Steps are counted on from those of a state that this log tells of."""
        if self.zero_recorder is not None:
            self.zero_recorder.go_on_from(folder)

    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        recorder = self.zero_recorder
        if recorder is not None:
            recorder.log(values, step)
            values = values | recorder.figures()
        super().log(values, step=step, log_kwargs=log_kwargs or {})

    def end_training(self) -> None:
        self.end_report()
        if dist.is_initialized():
            leave(self.zero_engines)
        super().end_training()


def begin_in_loop(accelerator: RecordedAccelerator, engine: ZeroEngine) -> None:
    """Starts the log of a script's own loop. Trainer's begins when Trainer knows the step that it goes on from."""
    if not (accelerator.zero_config.report and engine.optimizers) or _trainer() is not None:
        return
    accelerator.begin_report(engine, accelerator.logging_dir or accelerator.project_dir)


def _trainer() -> Any:
    if "transformers.trainer" not in sys.modules:
        return None
    from transformers import Trainer

    return find_in_callers(lambda candidate: isinstance(candidate, Trainer))


def _planned(engine: ZeroEngine, accumulates: bool) -> dict[str, dict[str, int]]:
    """Bytes a rank by kind, as the plan says."""
    plan, ddp = state_plan(engine, accumulates=accumulates), ddp_state(engine)
    ours = {
        "parameters": plan.parameters,
        "frozen": plan.frozen,
        "masters": plan.masters,
        "gradients": plan.gradients,
        "residuals": plan.residuals,
        "gradient buffers": plan.gradient_buffers,
        "optimizer state": plan.optimizer,
        "copies for early steps": plan.beside,
    }
    return {
        "plan": {kind: nbytes for kind, nbytes in ours.items() if nbytes is not None},
        "ddp": {"total": ddp.total},
    }


def _end_at_exit(recorder: RunRecorder) -> None:
    error = getattr(sys, "last_value", None)
    recorder.end("finished" if error is None else in_one_line(error))
