"""What a step sends, waits for and takes, as `zero/...` in Trainer's log: means over the steps since the last entry."""

import time

from transformers import TrainerCallback

from ...device import peak_bytes
from ...engine.engine import ZeroEngine
from ...engine.report_tables import CommReport
from ...engine_reference import engine_attached_to

_MIB = 2**20


class StepFigures(TrainerCallback):
    """One Trainer's figures, of the rank that logs. A callback so that what comes before the first step counts for none."""

    def __init__(self) -> None:
        self._before: CommReport | None = None
        self._step = 0
        self._rows_of_a_step = 0
        self._clock = _StepClock()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        engine = None if model is None else engine_attached_to(model)
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
        """What a step has taken on average since this was last asked, or since training began.

        A figure that is nothing in this run, such as what one rank sends or what one node sends to others, is left out.

        Args:
            all_of_them: else peak memory and rows a second alone: each figure is a part of every line that Trainer prints.
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
    """Seconds of training, without those from the end of a step to the next where an evaluation or a save is between."""

    def __init__(self) -> None:
        self._since_s = self._ended_s = time.perf_counter()
        self._aside_s = 0.0
        self._stands_still = False

    def go_on(self) -> None:
        if self._stands_still:
            self._aside_s += time.perf_counter() - self._ended_s
            self._stands_still = False

    def step_ended(self) -> None:
        self._ended_s = time.perf_counter()

    def stand_still(self) -> None:
        self._stands_still = True

    def taken(self) -> float:
        """Since this was last asked."""
        now_s = time.perf_counter()
        seconds = now_s - self._since_s - self._aside_s
        self._since_s = self._ended_s = now_s
        self._aside_s = 0.0
        return seconds
