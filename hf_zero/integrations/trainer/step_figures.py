"""What a step sends and waits for, as `zero/...` in Trainer's log: means over the steps since the last entry."""

from transformers import TrainerCallback

from ...engine.engine import ZeroEngine
from ...engine.engine_reference import engine_attached_to
from ...engine.report_tables import CommReport

_MIB = 2**20


class StepFigures(TrainerCallback):
    """One Trainer's figures, of the rank that logs. A callback so that what comes before the first step counts for none."""

    def __init__(self) -> None:
        self._before: CommReport | None = None
        self._step = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        engine = None if model is None else engine_attached_to(model)
        self._before = None if engine is None else engine.comm_report()
        self._step = state.global_step

    def since_the_last(self, engine: ZeroEngine, step: int) -> dict[str, float]:
        """What a step has taken on average since this was last asked, or since training began.

        A figure that is nothing in this run, such as what one rank sends or what one node sends to others, is left out.
        """
        now, before, steps = engine.comm_report(), self._before, step - self._step
        self._before, self._step = now, step
        figures = {"zero/peak_mib": round(engine.memory_report().peak_bytes / _MIB, 1)}
        if now.gradient_error is not None:
            figures["zero/gradient_error"] = round(now.gradient_error, 6)
        if before is not None and steps > 0 and now.bytes_sent:
            figures["zero/sent_mib"] = round((now.bytes_sent - before.bytes_sent) / steps / _MIB, 3)
            figures["zero/wait_s"] = round((now.wait_seconds - before.wait_seconds) / steps, 4)
            if now.bytes_between:
                figures["zero/between_nodes_mib"] = round((now.bytes_between - before.bytes_between) / steps / _MIB, 3)
        return figures
