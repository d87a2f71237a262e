"""Preemption: after a signal or by the clock, all ranks save after the same step, then exit or continue."""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate.data_loader import DataLoaderAdapter
from accelerate.logging import get_logger

from ..checkpoint.commit import discard, find_disk
from ..checkpoint.files import CheckpointError
from ..comm.ledger import Label
from ..config import AUTO, ConfigError
from ..config.zero import CheckpointConfig
from ..engine.engine import ZeroEngine
from ..hooks.guards import mix_in
from ..hooks.weak import WeakHook
from .environment import trainer_in_callers
from .save_clock import SAVE_DUE, TIME_UP, SaveClock
from .state_folder import numbered_states

if TYPE_CHECKING:
    # Mixed into data loaders at run time; the type checker treats their methods as inherited.
    from torch.utils.data import DataLoader as _LoaderBase
else:
    _LoaderBase = object

logger = get_logger(__name__)

# ---- The signals of one process ----
#
# [Note: who stops when] Signals arrive at some ranks, at any moment. A handler only notes the signal's number, because Python
# may call a handler between any two lines, including the lines of a save. Each backward already ends with an agreement between
# the ranks, and one byte of its message is the number. So all ranks know of a signal in the same step, finish the step, save,
# and end. A rank that waits in a collective runs its handler once the other ranks have joined the collective. A signal that
# arrives after the agreement counts for the next step.

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_EVALUATION = Label(kind="agreement on a stop", subject="the evaluation")


class StopSignals:
    """Notes SIGTERM and SIGUSR1 in this process, replacing the former handlers.

    Attributes:
        clock: asks for saves by time; None if the settings ask for none.
        received: the number of the first signal received; 0 before.
        ends: whether this process is saving and ends afterwards.
    """

    def __init__(self) -> None:
        self.clock: SaveClock | None = None
        self.received = 0
        self.ends = False
        self._received_s = 0.0
        self._process = os.getpid()
        self._former: dict[int, Any] = {}

    def asked(self) -> int:
        """Returns `received`, or the clock's request if no signal was received."""
        return self.received or (self.clock.asked() if self.clock is not None else 0)

    def follow_clock(self, settings: CheckpointConfig, step: Callable[[], int], *, decides: bool) -> None:
        """Also saves and ends at the times in the settings.

        Args:
            step: returns the number of steps taken.
            decides: whether this is rank 0.
        """
        if settings.is_timed:
            self.clock = SaveClock(settings, step, decides=decides)

    def install(self) -> None:
        """Replaces the handlers of both signals.

        Raises:
            ConfigError: this is not the main thread; Python sets handlers only there.
        """
        for number in _SIGNALS:
            if signal.getsignal(number) is None:
                logger.warning(
                    f"hf_zero: {number.name} has a handler that is not Python's, which stays: no stop for it."
                )
                continue
            try:
                self._former[number] = signal.signal(number, self._note)
            except ValueError as error:
                raise ConfigError(
                    "hf_zero: training runs in another thread than the main one, where Python cannot note signals. Leave "
                    "`checkpoint.on_signal` and `enable_jit_checkpoint` out, or train in the main thread."
                ) from error

    def release(self) -> None:
        """Restores the former handlers of both signals, except for a signal whose handler the script has set since.

        A process that is ending keeps its handlers: a second signal would end this rank while others wait for it.
        """
        if self.ends:
            return
        for number, former in self._former.items():
            # `==` instead of `is`: Python makes a new bound method at each access.
            if signal.getsignal(number) == self._note:
                signal.signal(number, former)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._in_child(number)
        elif not self.received:
            # Only the first signal counts: the logged time starts with it, and the former handler of its number is called
            # after the save.
            self.received, self._received_s = number, time.monotonic()

    def _in_child(self, number: int) -> None:
        """Handles a signal in a forked child, such as a data loader's worker, which inherits this process's handlers.

        SIGUSR1, which SLURM sends to all processes of a job, is ignored: the current step needs the workers. SIGTERM ends the
        child, because process pools rely on it.
        """
        if number == signal.SIGTERM:
            signal.signal(number, self._former[number])
            os.kill(os.getpid(), number)

    def end(self, engine: ZeroEngine, number: int, step: int, save: Callable[[], Path]) -> NoReturn:
        """Saves, prints the folder, and raises SystemExit with status 128 + `number` (SIGTERM's if time is up). Collective.

        If this rank got the signal, the script's own handler is called after the save, and may end the process. If the save
        fails, the reason is printed in one line, and the status is 1.
        """
        # Set first, because the save below may run the model and its hooks, which would otherwise end the run again.
        self.ends = True
        is_time_up, speaks = number == TIME_UP, engine.world_groups.rank == 0
        # Launchers restart a run ended by SIGTERM.
        number = signal.SIGTERM if is_time_up else number
        name = "checkpoint.budget is used up" if is_time_up else signal.Signals(number).name
        try:
            folder = save()
        except CheckpointError as error:
            if speaks:
                reason = str(error).removeprefix("hf_zero: ")
                _say(f"{name}, and step {step} is not saved, so all ranks end with status 1. {reason}")
            raise SystemExit(1) from error
        waited_s = time.monotonic() - self._received_s if self.received else 0.0
        # The maximum over all ranks, because the printing rank may not have received the signal.
        waited_s = max(engine.world.exchange(waited_s, "signals"))
        if speaks:
            _say(
                f"{name}: all ranks have saved step {step} in {folder}, and end with status {128 + number}"
                + ("." if is_time_up else f", {waited_s:.1f} s after the signal.")
            )
        former = self._former.get(self.received)
        if callable(former):
            former(self.received, None)
        raise SystemExit(128 + number)


def _say(what: str) -> None:
    print(f"hf_zero: {what}", file=sys.stderr, flush=True)


# ---- Data loaders: the point at which a plain loop stops, and workers protected from a launcher's signal ----


class FollowedLoader(_LoaderBase):
    """A prepared data loader that notifies the Accelerator when the script asks for the next batch."""

    _zero_batch: WeakHook

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            followed = self._zero_batch()
            # The Accelerator was deleted, or the loader is a copy, which has no Accelerator.
            if followed is None:
                yield batch
                continue
            with followed:
                yield batch


def follow_loader(loader: Any, batch: WeakHook) -> None:
    """Turns one of accelerate's data loaders into a `FollowedLoader` and moves its workers to their own process groups.

    Other loaders are not changed: a loop without a followed loader stops at its next training forward.

    Args:
        loader: the data loader.
        batch: returns the context that is active while the script uses a batch.
    """
    if not isinstance(loader, DataLoaderAdapter):
        return
    mix_in(loader, FollowedLoader)
    loader._zero_batch = batch
    # accelerate's loaders forward reads of attributes to the inner loader, but not assignments.
    bare = loader.base_dataloader
    if bare.num_workers and not isinstance(bare.worker_init_fn, _Apart):
        bare.worker_init_fn = _Apart(bare.worker_init_fn)


class _Apart:
    """Moves a loader's worker out of the rank's process group: torchrun's signals to the group would end the worker.

    Args:
        then: the loader's own `worker_init_fn`.
    """

    def __init__(self, then: Callable[[int], None] | None):
        self._then = then

    def __call__(self, worker: int) -> None:
        os.setpgid(0, 0)
        if self._then is not None:
            self._then(worker)


# ---- A plain loop: stops at the request for the next batch ----


class LoopStop(StopSignals):
    """Saves and ends a loop written with accelerate.

    The stop waits until the loop asks for its next batch: by then it has stepped its schedule, counted, logged and evaluated.
    A loop without prepared data loaders stops at its next training forward.

    Raises:
        ConfigError: the settings name no folder in which the Accelerator would save.
    """

    def __init__(self, accelerator: Any):
        super().__init__()
        self._accelerator = accelerator
        asked = accelerator.zero_config.checkpoint.on_signal
        self._asked = AUTO if asked == "none" else asked
        self._with_batches = 0
        self._is_put_off = self._saves = False
        self._by_clock: Path | None = None
        self._refuse_folder()

    def _refuse_folder(self) -> None:
        names_itself = self._accelerator.project_configuration.automatic_checkpoint_naming
        if self._asked == AUTO and self._accelerator.project_dir is None:
            raise ConfigError(
                "hf_zero config: `checkpoint.on_signal: auto`, `every_minutes` and `budget` save in `checkpoints` of the "
                "Accelerator's project_dir, which is None. Give the Accelerator a project_dir, or on_signal a folder: "
                "`runs/first/step_{step}`."
            )
        if self._asked != AUTO and names_itself:
            raise ConfigError(
                f"hf_zero config: `checkpoint.on_signal` is {self._asked}, and the Accelerator names its states by itself "
                "(automatic_checkpoint_naming). Set `checkpoint.on_signal: auto`."
            )

    def follow(self, engine: ZeroEngine) -> None:
        """Announces signals to the other ranks in this engine's backward."""
        engine.stop_when(self.asked)
        engine.entry.register_forward_pre_hook(WeakHook(self, LoopStop._before_forward))

    def _before_forward(self, module: torch.nn.Module, _args: tuple) -> None:
        # Inside a batch of a followed loader, the stop waits for the end of the batch. Otherwise the script's work after its
        # step would be lost.
        if not self._with_batches and module.training and torch.is_grad_enabled():
            self.end_if_due()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Active while the script uses a batch of a prepared data loader. If a stop is due, the run ends after the batch."""
        before = self._backwards()
        self._with_batches += 1
        try:
            yield
        finally:
            self._with_batches -= 1
        # Only after a backward: an evaluation loop may run on one rank only, inside the training loop. Not in the `finally`
        # above: a loop may break or fail on one rank only, and a save needs all ranks.
        if self._backwards() > before:
            self.end_if_due()

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Delays the stop while ranks without data join the steps of other ranks, so no rank ends early."""
        self._is_put_off = True
        try:
            yield
        finally:
            self._is_put_off = False
        self.end_if_due()

    def _backwards(self) -> int:
        return sum(engine.ended_backwards for engine in self._accelerator.zero_engines)

    def end_if_due(self) -> None:
        """Saves and ends if all ranks have agreed on a stop; collective in this case."""
        engines = self._accelerator.zero_engines
        number = max((engine.stop_due for engine in engines), default=0)
        # Hooks of the save may run the model, which calls this method again.
        if not number or self.ends or self._saves or self._is_put_off:
            return
        for engine in engines:
            engine.drop_stop()
        if number == SAVE_DUE:
            self._save_by_time(engines[0])
            return
        self.end(engines[0], number, self._accelerator.zero_steps, partial(self._save, engines[0]))

    def _save_by_time(self, engine: ZeroEngine) -> None:
        """Saves, and removes the previous state if only the clock asked for the previous one."""
        former, self._saves = self._by_clock, True
        try:
            self._by_clock = self._save(engine)
        finally:
            self._saves = False
        automatic = self._accelerator.project_configuration.automatic_checkpoint_naming
        # With automatic naming, accelerate itself limits the number of checkpoints.
        if former is not None and former != self._by_clock and not automatic:
            discard_on_its_disk(former, engine)

    def _save(self, engine: ZeroEngine) -> Path:
        accelerator = self._accelerator
        naming = accelerator.project_configuration
        if naming.automatic_checkpoint_naming:
            # A script resumed without `last_good_state` has not advanced the number.
            taken = [int(path.name.rpartition("_")[2]) for path in numbered_states(accelerator)[-1:]]
            naming.iteration = max(naming.iteration, *engine.world.exchange(max(taken, default=-1) + 1, "signals"))
            return accelerator.save_state()
        named = f"{accelerator.project_dir}/checkpoints/checkpoint_{{step}}" if self._asked == AUTO else self._asked
        return accelerator.save_state(named.replace("{step}", str(accelerator.zero_steps)))


def discard_on_its_disk(state: Path, engine: ZeroEngine) -> None:
    """Removes a saved state from each disk. Collective."""
    disk = find_disk(state.parent, engine.world_groups.rank, engine.world.exchange, then="Nothing was removed.")
    if disk.leads and state.is_dir():
        discard(state)


def may_stop(settings: CheckpointConfig) -> bool:
    """Whether a run saves on a signal or by the clock."""
    return settings.on_signal != "none" or settings.is_timed


def follow_signals(accelerator: Any, engine: ZeroEngine) -> None:
    """Follows signals in a script's own loop if `checkpoint.on_signal` is set. Trainer's `train()` follows its own."""
    stop, settings = accelerator.zero_stop, accelerator.zero_config.checkpoint
    if stop is None and may_stop(settings) and trainer_in_callers() is None:
        stop = accelerator.zero_stop = LoopStop(accelerator)
        stop.follow_clock(settings, lambda: accelerator.zero_steps, decides=accelerator.is_main_process)
        if settings.on_signal != "none":
            stop.install()
    if isinstance(stop, LoopStop):
        stop.follow(engine)
    # Trainer's stop exists before its engine, which has to announce the signals to the other ranks.
    elif stop is not None:
        engine.stop_when(stop.asked)


# ---- Trainer: stops after a step, after a save, or inside an evaluation ----


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
        self._is_behind_step = self._is_put_off = self._evaluates = False
        self._left_for = self._number = 0
        self._evaluation_s = 0.0

    def behind_step(self, engine: ZeroEngine, stock: Callable[[], None]) -> None:
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
            self._is_behind_step = True
            try:
                stock()
            except _EvaluationLeft:
                number = self._left_for
            finally:
                self._is_behind_step = self.saves_by_time = False
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
            raise CheckpointError(f"hf_zero: {folder} could not be written. The former checkpoints are as they were.")
        return folder

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Wraps Trainer's evaluation. If a stop interrupts the evaluation, the random states from before are restored."""
        # At the start of training (`eval_on_start`), no step's checkpoint records this evaluation as due, so a resumed run
        # would not repeat the evaluation.
        if not self._is_behind_step:
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
            f"hf_zero config: `checkpoint.on_signal` is the folder {asked}, and Trainer saves in output_dir. Set "
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
