"""Chooses the folder of the log for `report: true` in accelerate and Trainer, and starts and ends the log."""

import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..checkpoint.faults import in_one_line
from ..config import ConfigError, ZeroConfig
from ..engine.engine import ZeroEngine
from ..extras import extra
from .callers import trainer_in_callers

if TYPE_CHECKING:
    # Mixed into Accelerator's subclasses at run time; the type checker treats their methods as inherited.
    from accelerate import Accelerator as _AcceleratorBase
else:
    _AcceleratorBase = object
from .announce import ddp_state, state_plan
from .clean_end import leave
from .global_batch import micro_batches_of


class RecordedAccelerator(_AcceleratorBase):
    """The part of an Accelerator that keeps the log of a run.

    Attributes:
        zero_recorder: the `RunRecorder` of the current run, only on rank 0 with `report`; None otherwise.
    """

    zero_config: ZeroConfig
    zero_recorder: Any | None = None

    def begin_report(self, engine: ZeroEngine, run_folder: str | Path | None, step: int = 0) -> None:
        """Starts the log of a run, if the settings request one and none is open.

        Args:
            engine: the engine.
            run_folder: the folder of the run's files; None if unknown.
            step: the step from which the run continues.

        Raises:
            ConfigError: on all ranks, if neither the settings nor the run name a folder.
        """
        asked = self.zero_config.report
        folder = asked if isinstance(asked, str) else run_folder
        if not asked or (self.zero_recorder is not None and self.zero_recorder.is_open):
            return
        if folder is None:
            raise ConfigError(
                "hf_zero config: `report: true` writes to the run's folder, but this Accelerator has none. Build it with "
                "`project_dir=...` (or a ProjectConfiguration with `logging_dir`), or name a folder: `report: runs/first`."
            )
        # After the error above, which all ranks raise: if only rank 0 raised, the others would wait in their first collective.
        if engine.world_groups.rank == 0:
            accumulates = micro_batches_of(self) > 1
            plan = _planned(engine, accumulates)
            self.zero_recorder = recorder = extra("report", "RunRecorder")(engine, folder, step=step, plan=plan)
            # Ended at exit, because a script may not call end_training.
            weakref.finalize(self, _end_at_exit, recorder)

    def end_report(self, how: str = "finished") -> None:
        """Ends the log, if there is one, and writes the page."""
        recorder, self.zero_recorder = self.zero_recorder, None
        if recorder is not None:
            recorder.end(how)

    def record_save(self, began_s: float, folder: Path) -> None:
        """Notes the time for which a save, begun at `began_s` of `time.perf_counter`, has blocked training."""
        if self.zero_recorder is not None:
            self.zero_recorder.stall(time.perf_counter() - began_s, "save", folder)

    def resume_report(self, folder: Path) -> None:
        """Continues the step count from a loaded state recorded in this log."""
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
            # Before accelerate destroys the process group, which the last gathers and the ranks' goodbye need.
            leave(self.zero_engines)
        super().end_training()


def begin_in_loop(accelerator: RecordedAccelerator, engine: ZeroEngine) -> None:
    """Starts the log of a script's own loop. Trainer's log starts once Trainer knows its first step."""
    if not (accelerator.zero_config.report and engine.optimizers) or trainer_in_callers() is not None:
        return
    accelerator.begin_report(engine, accelerator.logging_dir or accelerator.project_dir)


def _planned(engine: ZeroEngine, accumulates: bool) -> dict[str, dict[str, int]]:
    """Returns the plan's bytes per rank, by kind."""
    plan, ddp = state_plan(engine, accumulates=accumulates), ddp_state(engine)
    ours = {
        "parameters": plan.parameters,
        "frozen": plan.frozen,
        "masters": plan.masters,
        "gradients": plan.gradients,
        "residuals": plan.residuals,
        "gradient buffers": plan.gradient_buffers,
        "optimizer state": plan.optimizer,
    }
    return {
        "plan": {kind: nbytes for kind, nbytes in ours.items() if nbytes is not None},
        "ddp": {"total": ddp.total},
    }


def _end_at_exit(recorder: Any) -> None:
    error = getattr(sys, "last_value", None)
    recorder.end("finished" if error is None else in_one_line(error))
