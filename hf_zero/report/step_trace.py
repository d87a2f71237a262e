"""One step followed span by span: what was computed, what was under way between ranks, and where training stood still."""

from itertools import pairwise
from typing import Any

from ..comm.ledger import Ledger
from ..device import Moment


class StepTrace:
    """From the end of one optimizer step to the end of the next, by the clock of the device that is trained on.

    It costs that step two moments a collective and one a phase; nothing waits for them.

    Args:
        step: that is followed.
    """

    def __init__(self, ledger: Ledger, step: int):
        self.step = step
        self._ledger = ledger
        ledger.start_timing()
        self._begin = ledger.now()
        self._phases: list[tuple[str, Moment]] = []
        self._spans: list[tuple[str, str, Moment, Moment]] = []
        ledger.traced = self._spans

    def enter(self, phase: str) -> None:
        """What came before ends here, and `phase` begins."""
        self._phases.append((phase, self._ledger.now()))

    def end(self) -> None:
        """The step has been taken."""
        self._phases.append(("", self._ledger.now()))
        self._ledger.traced = None

    @property
    def is_past(self) -> bool:
        """Whether the device has come to the end of it. Asking does not stop it."""
        return self._phases[-1][1].is_past

    def as_line(self) -> dict[str, Any]:
        """Seconds since the step before: phases, spans under way, and waits, as [name, start, end]."""
        marks = [(phase, self._seconds(moment)) for phase, moment in self._phases]
        total_s = marks[-1][1]
        spans: dict[str, list[list[Any]]] = {"under_way_seconds": [], "wait_seconds": []}
        for kind, attribute, start, end in self._spans:
            # What was started in the step before has run since its end, too.
            began_s, ended_s = max(0.0, self._seconds(start)), min(total_s, self._seconds(end))
            if ended_s > began_s:
                spans[attribute].append([kind, round(began_s, 7), round(ended_s, 7)])
        first = [["between steps", 0.0, round(marks[0][1], 7)]]
        phases = [[name, round(start, 7), round(end, 7)] for (name, start), (_, end) in pairwise(marks)]
        return {
            "seconds": round(total_s, 7),
            "phases": first + phases,
            "under_way": spans["under_way_seconds"],
            "waits": spans["wait_seconds"],
        }

    def _seconds(self, moment: Moment) -> float:
        return self._begin.seconds_until(moment)
