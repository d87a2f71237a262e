"""Bytes, waits and seconds per step as `zero/...` in Trainer's log: means since the last entry."""

import time

from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from ..config import ConfigError
from ..device import peak_bytes
from ..engine.engine import ZeroEngine
from ..engine.report_tables import CommReport
from ..hooks.weak import engine_attached_to
from ..optimizer.own_step import is_of_torch
from ..optimizer.trial_step import unsaved_state

_MIB = 2**20


def _refuse_unsaved_state(args: TrainingArguments, engine: ZeroEngine) -> None:
    """Raises ConfigError if Trainer is set to save optimizer state that no checkpoint can store."""
    if args.save_strategy == SaveStrategy.NO or args.save_only_model:
        return
    for optimizer, _ in engine.state.groups():
        unsaved = None if is_of_torch(optimizer) else unsaved_state(optimizer)
        if unsaved is not None:
            raise ConfigError(
                f"hf_zero: {unsaved}, so no checkpoint can hold it. Set `save_strategy='no'` or `save_only_model=True`, or use "
                "another optimizer."
            )


class StepFigures(TrainerCallback):
    """Measures a Trainer's figures on the logging rank. A callback, to exclude work before the first step."""

    def __init__(self) -> None:
        self._before: CommReport | None = None
        self._step = 0
        self._rows_of_a_step = 0
        self._clock = _StepClock()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        engine = None if model is None else engine_attached_to(model)
        if engine is not None:
            _refuse_unsaved_state(args, engine)
        self._before = None if engine is None else engine.comm_report()
        self._step = state.global_step
        self._rows_of_a_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._clock = _StepClock()

    def on_step_begin(self, args, state, control, **kwargs):
        self._clock.go_on()

    def on_step_end(self, args, state, control, **kwargs):
        self._clock.step_ended()

    def on_evaluate(self, args, state, control, **kwargs):
        self._clock.stand_still()

    def on_save(self, args, state, control, **kwargs):
        self._clock.stand_still()

    def since_the_last(self, engine: ZeroEngine, step: int, *, all_of_them: bool) -> dict[str, float]:
        """Returns the mean figures of a step since the last call, or since the start of training.

        Figures without meaning in this run are omitted, for example bytes sent with one rank or between nodes with one node.

        Args:
            engine: the engine.
            step: the current step.
            all_of_them: False returns only peak memory and samples per second, to keep Trainer's printed lines short.
        """
        now, before, steps = engine.comm_report(), self._before, step - self._step
        self._before, self._step = now, step
        figures = {"zero/peak_mib": round(peak_bytes(engine.device) / _MIB, 1)}
        if now.gradient_error is not None:
            figures["zero/gradient_error"] = round(now.gradient_error, 6)
        seconds = self._clock.taken()
        if steps > 0 and seconds > 0:
            figures["zero/samples_per_s"] = float(f"{steps * self._rows_of_a_step / seconds:.5g}")
        if not all_of_them:
            return figures
        if steps > 0 and seconds > 0:
            figures["zero/steps_per_s"] = float(f"{steps / seconds:.5g}")
        if before is not None and steps > 0 and now.bytes_sent:
            figures["zero/sent_mib"] = round((now.bytes_sent - before.bytes_sent) / steps / _MIB, 3)
            figures["zero/wait_s"] = round((now.wait_seconds - before.wait_seconds) / steps, 4)
            if now.bytes_between:
                figures["zero/between_nodes_mib"] = round((now.bytes_between - before.bytes_between) / steps / _MIB, 3)
        return figures


class _StepClock:
    """Measures seconds of training, excluding the time between two steps if there was an evaluation or a save."""

    def __init__(self) -> None:
        self._since_s = self._ended_s = time.perf_counter()
        self._untimed_s = 0.0
        self._stands_still = False

    def go_on(self) -> None:
        if self._stands_still:
            self._untimed_s += time.perf_counter() - self._ended_s
            self._stands_still = False

    def step_ended(self) -> None:
        self._ended_s = time.perf_counter()

    def stand_still(self) -> None:
        self._stands_still = True

    def taken(self) -> float:
        """Returns the seconds since the last call."""
        now_s = time.perf_counter()
        seconds = now_s - self._since_s - self._untimed_s
        self._since_s = self._ended_s = now_s
        self._untimed_s = 0.0
        return seconds
