"""When waits for a rank that is late are ended, long before the backend's own limit.

[Note: how a wait is ended]
A thread of each rank looks twice a second at what the main thread waits in, a collective that the script called by itself
included. A wait that has taken `comm.late_s` has the other ranks asked where they are. If one is the reason, all waits of this
process are made to fail, and the error of the one that was late is what has been found. A rank that is alive and is the reason
is in no wait that could fail: it is told by way of the store, and its own thread ends its process.

Two ranks that wait in collectives of training which each has started and the other has not wait for each other for ever, as where
they run different layers at stage 3. That is looked for after a few seconds, and ended at once.

Not every wait may be ended for a rank that is elsewhere and alive. Ranks meet in barriers and in exchanges of words behind work
that a single rank may do for long (loading, saving). There a rank is late only if it has ended, does not answer, or
waits as long in another collective; in a collective of training it is late wherever it is. In a save a rank is late that has not
begun as many saves, wherever it is: one that has begun this one may write for long. Nothing is ended where all ranks wait in the
same collective: a slow link is no late rank.

An accelerator's host does not wait for a collective: its queue does, and the host stands in the next call that asks for a
result. There the last collective that was started so long ago is taken for a wait, and a rank is late that has not started as
many.
"""

import threading
import time
from collections.abc import Mapping

from .collective_log import LABEL, STARTED, CollectiveLog
from .verdict import Verdict
from .watch import ScriptCollective, Wait
from .whereabouts import script_frame

_IDLE_S, _IDLE_SHARE = 0.05, 0.02
"""The most that a thread computes that stands in a single call: so long, and so much of the time."""
_AS_LONG = 0.5
"""Of this rank's wait, the part that another one's takes at least where the two wait for each other."""


class ScriptCall:
    """A collective of torch.distributed that the main thread is in, called by the script."""

    def __init__(self):
        self._wait: Wait | None = None
        self._line = ""
        self._since_cpu_s = self._last_cpu_s = 0.0

    def look(self) -> Wait | None:
        """That call as a wait: the same object for as long as the thread has stood still in it."""
        cpu_s = _main_cpu_s()
        is_idle, self._last_cpu_s = cpu_s - self._last_cpu_s < _IDLE_S, cpu_s
        # A thread that computes is in no such call, and its frames are not asked for.
        frame, call = script_frame() if is_idle else (None, None)
        if frame is None or call is None:
            self._wait = None
            return None
        line, wait = f"{frame.f_code.co_filename}:{frame.f_lineno}", self._wait
        is_same = wait is not None and (wait.name, self._line) == (call, line)
        # One such call after the other takes little time of the processor in each look, and some in all.
        if wait is None or not is_same or cpu_s - self._since_cpu_s > _IDLE_S + _IDLE_SHARE * wait.seconds:
            wait = self._wait = Wait(ScriptCollective(call))
            self._line, self._since_cpu_s = line, cpu_s
        return wait


class DeviceQueue:
    """The last collective that an accelerator's queue was given, as a wait, once it was given long ago.

    Args:
        limit_s: how long ago.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._entry: list | None = None
        self._wait: Wait | None = None

    def look(self, log: CollectiveLog) -> Wait | None:
        """That wait: the same object until another collective is started."""
        entry = log.entries[-1] if log.entries else None
        if entry is None or time.monotonic() - entry[STARTED] < self._limit_s:
            return None
        if entry is not self._entry or self._wait is None:
            self._entry, self._wait = entry, Wait(entry[LABEL])
            self._wait.since_s = entry[STARTED]
        return self._wait


def others_are_behind(verdict: Verdict, begun: Mapping[str, int], kind: str | None) -> bool:
    """Whether a rank is stopped, or has started fewer collectives of the kind that is waited for.

    Of one that has come to its end, or is silent, nothing follows: this one may be busy by itself, with no collective under way.
    """
    kind = kind or ""
    alive = [each for each in verdict.absences.values() if not each.is_over]
    return any(
        each.is_stopped or (each.where is not None and each.where.begun.get(kind, 0) < begun.get(kind, 0))
        for each in alive
    )


def _main_cpu_s() -> float:
    main = threading.main_thread().ident
    if main is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(main))


def is_to_end(verdict: Verdict) -> bool:
    """Whether a wait that has taken too long is to fail; see [Note: how a wait is ended]."""
    absences, wait = verdict.absences, verdict.wait
    if verdict.silence is not None:
        return True
    if any(absences[rank].is_over or absences[rank].where is None for rank in verdict.culprits if rank in absences):
        return True
    waits_as_long = (
        each.where is not None and each.where.seconds >= _AS_LONG * wait.seconds
        for rank, each in absences.items()
        if rank in verdict.others_apart
    )
    if any(waits_as_long):
        return True
    is_of_training = wait.kind is not None or (wait.is_of_script and "barrier" not in str(wait.what))
    return is_of_training and verdict.is_late
