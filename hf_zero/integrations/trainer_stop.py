"""Trainer saves and stops after a step, after a save, or inside an evaluation."""

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..checkpoint.faults import CheckpointError
from ..comm.waits import Label
from ..config import AUTO, ConfigError
from ..engine.engine import ZeroEngine
from .loop_stop import may_stop
from .save_clock import SAVE_DUE
from .signals import StopSignals

_EVALUATION = Label(kind="agreement on a stop", subject="the evaluation")


class _EvaluationLeft(BaseException):
    """Leaves an evaluation after a signal. A BaseException, because a metric's `except Exception` must not catch this error."""


class TrainerStop(StopSignals):
    """Saves and ends a Trainer's run.

    Attributes:
        saved_step: the step of the last save; -1 before.
        saves_by_time: whether only the clock asked for the current save.
    """

    def __init__(self, trainer: Any, trial: Any = None):
        super().__init__()
        self._trainer = trainer
        self._trial = trial
        self.saved_step = -1
        self.saves_by_time = False
        self._is_after_step = self._is_put_off = self._evaluates = False
        self._left_for = self._number = 0
        self._evaluation_s = 0.0

    def after_step(self, engine: ZeroEngine, stock: Callable[[], None]) -> None:
        """Calls `stock` to log, evaluate and save if due, and ends the run if a stop is due. Collective."""
        before, number = self.saved_step, engine.stop_due
        # Handle the stop only once. Trainer calls this method again at the end of an epoch, after the same step.
        engine.drop_stop()
        is_due, number = number == SAVE_DUE, 0 if number == SAVE_DUE else number
        if number and not self._is_put_off and _ends_epoch(self._trainer):
            # The end of the epoch follows and calls this method again, so the stop waits for the logs and saves due there.
            self._is_put_off, self._number = True, number
            return
        number = number or self._number
        if not number:
            self._save_by_time(engine, stock, is_due=is_due)
            self._is_after_step = True
            try:
                stock()
            except _EvaluationLeft:
                number = self._left_for
            finally:
                self._is_after_step = self.saves_by_time = False
        if not number and self.saved_step != before:
            # The save may have taken longer than all steps since the last check, so ask all ranks now instead of after the
            # next step.
            number = self._of_all_ranks(engine)
        if number:
            self._log(stock)
            self.end_run(engine, number)

    def _save_by_time(self, engine: ZeroEngine, stock: Callable[[], None], *, is_due: bool) -> None:
        """Saves if due by the clock. Before an evaluation, also saves if the clock would be due during the evaluation."""
        if self.clock is None:
            return
        control = self._trainer.control
        evaluates = control.should_evaluate
        if evaluates and not is_due:
            is_due = any(engine.world.exchange(self.clock.is_due_within(self._evaluation_s), "saves by time"))
        if not is_due or self.saved_step == self._trainer.state.global_step:
            return
        if not evaluates:
            self.saves_by_time = not control.should_save
            control.should_save = True
            return
        # The checkpoint records the evaluation as still due, like a checkpoint of a stopped run.
        if control.should_log:
            saves_later = control.should_save
            self._log(stock)
            self._trainer.control.should_save = saves_later
        self.saves_by_time = True
        try:
            self._save(engine, waits=False)
        finally:
            self.saves_by_time = False

    def _log(self, stock: Callable[[], None]) -> None:
        """Logs the steps since the last log, because a checkpoint does not keep their losses. A due evaluation stays due."""
        control = self._trainer.control
        is_owed = control.should_evaluate
        control.should_log, control.should_evaluate, control.should_save = True, False, False
        stock()
        # Read `control` from the Trainer again: callbacks may have returned a new control object.
        self._trainer.control.should_evaluate = is_owed

    def at_the_end(self, engine: ZeroEngine) -> None:
        """Ends the run if a signal was received since the last step. Collective."""
        number = self._of_all_ranks(engine)
        if number:
            self.end_run(engine, number)

    def _of_all_ranks(self, engine: ZeroEngine) -> int:
        return max(engine.world.exchange(self.received, "signals"))

    def end_run(self, engine: ZeroEngine, number: int) -> NoReturn:
        """Saves unless this step is already saved, and ends. Collective."""
        self.end(engine, number, self._trainer.state.global_step, partial(self._save, engine))

    def _save(self, engine: ZeroEngine, *, waits: bool = True) -> Path:
        trainer = self._trainer
        step = trainer.state.global_step
        folder = Path(trainer._get_output_dir(trial=self._trial)) / f"checkpoint-{step}"
        if self.saved_step != step:
            trainer._save_checkpoint(trainer.model, trial=self._trial)
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        if not waits:
            return folder
        # A save may continue in a background thread while training goes on, and this process is about to end.
        if trainer._checkpoint_saver is not None:
            trainer._checkpoint_saver.finish()
        # With `checkpoint.on_failure: continue`, a failed save only warns.
        if not all(engine.world.exchange(folder.is_dir(), "signals")):
            raise CheckpointError(f"hf_zero: {folder} could not be written. The earlier checkpoints are unchanged.")
        return folder

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Wraps Trainer's evaluation. If a stop interrupts the evaluation, the random states from before are restored."""
        # At the start of training (`eval_on_start`), no step's checkpoint records this evaluation as due, so a resumed run
        # would not repeat the evaluation.
        if not self._is_after_step:
            yield
            return
        with tempfile.TemporaryDirectory() as folder:
            self._trainer._save_rng_state(folder)
            self._evaluates, began_s = True, time.monotonic()
            try:
                yield
                self._evaluation_s = max(self._evaluation_s, time.monotonic() - began_s)
                if self.clock is not None:
                    self.clock.hold_up()
            except _EvaluationLeft:
                # The following save stores these states, so the resumed run evaluates with the same random numbers as a run
                # without a stop.
                self._trainer._load_rng_state(folder)
                raise
            finally:
                self._evaluates = False

    def before_prediction(self, engine: ZeroEngine) -> None:
        """Leaves an evaluation if any rank has received a signal. Collective, before each batch."""
        if self._evaluates:
            asked = self.asked()
            mine = torch.tensor([0 if asked == SAVE_DUE else asked], dtype=torch.uint8)
            self._left_for = int(engine.world.agree_max(mine, _EVALUATION).item())
            if self._left_for:
                raise _EvaluationLeft


def begin_in_trainer(trainer: Any, trial: Any = None) -> TrainerStop | None:
    """Follows signals in a Trainer's run if `enable_jit_checkpoint` or `checkpoint.on_signal` is set.

    Removes Trainer's own callback, with which each rank would save at its own signal.

    Raises:
        ConfigError: `checkpoint.on_signal` is a folder.
    """
    settings = trainer.accelerator.zero_config.checkpoint
    asked = settings.on_signal
    if not may_stop(settings) and not trainer.args.enable_jit_checkpoint:
        return None
    if asked not in ("none", AUTO):
        raise ConfigError(
            f"hf_zero config: `checkpoint.on_signal` is the folder {asked}, but Trainer saves in output_dir. Set "
            "`checkpoint.on_signal: auto`."
        )
    stop = TrainerStop(trainer, trial)
    stop.follow_clock(settings, lambda: trainer.state.global_step, decides=trainer.is_world_process_zero())
    if trainer.args.enable_jit_checkpoint:
        from transformers.trainer_jit_checkpoint import JITCheckpointCallback

        for callback in [c for c in trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback)]:
            # The callback's handler received any signal from before `train()`, and the signal is not sent again.
            if callback.jit_manager is not None and _is_asked_of(callback.jit_manager):
                stop._note(signal.SIGTERM, None)
            # Restores the signal handler from before the callback.
            callback.on_train_end(trainer.args, trainer.state, trainer.control)
            trainer.remove_callback(callback)
    if asked != "none" or trainer.args.enable_jit_checkpoint:
        stop.install()
    for engine in trainer.accelerator.zero_engines:
        engine.stop_when(stop.asked)
    return stop


def _is_asked_of(manager: Any) -> bool:
    """Whether transformers' handler has received a SIGTERM; a timer reports the signal to the callback seconds later."""
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    # Look at the timers before the attribute: a timer that ends in between has set the attribute.
    return (
        any(getattr(timer.function, "__self__", None) is manager for timer in timers) or manager.is_checkpoint_requested
    )


def _ends_epoch(trainer: Any) -> bool:
    control = trainer.control
    # `state.epoch` counts passes over the data and is a whole number after the last step of a pass.
    return control.should_epoch_stop or control.should_training_stop or float(trainer.state.epoch).is_integer()


def evaluation_is_owed(trainer: Any) -> bool:
    """Whether the checkpoint resumed from was saved by a stop before its step's evaluation."""
    saved = trainer.state.stateful_callbacks.get("TrainerControl", {})
    return isinstance(saved, dict) and bool(saved.get("args", {}).get("should_evaluate"))
