"""Finds the late or ended rank, and describes its state."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

from ..comm.collective_log import LABEL, STARTED, CollectiveLog
from ..comm.waits import Wait
from .arrivals import RankProcess, in_words
from .rank_state import RankState, ScriptCollective, in_brackets, script_frame

_LISTED = 8
_WHILE_WAITING = " failed while waiting for "
_DETAILED = 2
"""Number of ranks whose stacks are shown."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Describes a rank awaited by others.

    Attributes:
        rank: the described rank.
        process: None before the rank has registered.
        has_ended, is_stopped: as far as this host can see.
        has_left: whether the rank has reached the end of its script.
        words, culprits: its last error, and the ranks blamed by the error; the rank itself if the error is its own.
        where: its state, from its answer; None without an answer.
    """

    rank: int
    process: RankProcess | None
    has_ended: bool
    has_left: bool
    is_stopped: bool
    words: str | None
    culprits: tuple[int, ...]
    where: RankState | None

    @property
    def is_over(self) -> bool:
        return self.has_ended or self.has_left or self.rank in self.culprits

    @property
    def is_waiting(self) -> bool:
        return self.where is not None and self.where.waits_in is not None and not self.is_over

    def waits_for(self, begun: Mapping[str, int]) -> bool:
        """Whether the rank waits in a collective not begun by a rank with these counts of started collectives.

        A barrier of the script counts as well: a rank that left the same barrier seconds ago would have released this rank.
        """
        where = self.where
        if where is None or self.is_over:
            return False
        if where.kind is None:
            return where.is_in_barrier
        return self.is_waiting and where.begun.get(where.kind, 0) > begun.get(where.kind, 0)

    def __str__(self) -> str:
        who = f"rank {self.rank}"
        if self.process is not None:
            who += f" (process {self.process.pid} on {self.process.host})"
        if self.has_left and self.words is None:
            return f"{who} has finished its script"
        if self.is_over:
            return f"{who} has ended{'' if self.words is None else f': {self.words}'}"
        if self.where is not None:
            return f"{who} {self.where}"
        if self.is_stopped:
            return f"{who} does not answer: its process is stopped (SIGSTOP, or a debugger)"
        return f"{who} does not answer: it is busy in a single long call, or its host cannot be reached"


class Standing(Enum):
    """Where another rank is, seen from a rank waiting in a collective."""

    LEFT_STEPS = auto()
    """The rank has reached the end of its script, and the waiting rank is in a collective of training."""
    LEFT_CALL = auto()
    """The rank has reached the end of its script, and the waiting rank is in another call."""
    ENDED = auto()
    """The process has ended, or ends with its own error."""
    SILENT = auto()
    """The rank does not answer."""
    HERE = auto()
    """The rank waits in the same collective."""
    PAST = auto()
    """The rank gave up in a collective begun by the waiting rank as well."""
    IN_ANOTHER = auto()
    """The rank waits in another collective."""
    IN_SCRIPT = auto()
    """The rank is in another collective, which the script called."""
    ELSEWHERE = auto()
    """The rank is in no collective."""


_GONE = (Standing.LEFT_STEPS, Standing.LEFT_CALL, Standing.ENDED)
_OTHER_CALLS = (Standing.IN_ANOTHER, Standing.IN_SCRIPT)
_CULPRITS = (_GONE, (Standing.SILENT,), (Standing.IN_SCRIPT, Standing.ELSEWHERE))
"""Standings of awaited ranks. Each group counts only if no rank is in an earlier one."""

_EVEN = (
    "Give every rank the same number of batches (accelerate's even_batches=True), and `break` at the same step "
    "on all ranks."
)
VERDICTS = (
    (
        (Standing.LEFT_STEPS,),
        "Rank {rank} finished its script while rank {own} is still running: the ranks have different numbers of batches "
        "or steps. " + _EVEN,
    ),
    (
        # The same happens if a loss is gathered in a loop with different numbers of batches.
        (Standing.LEFT_CALL,),
        "Rank {rank} finished its script without the call that rank {own} waits in: {call}. Make this call on every "
        "rank, outside of `if is_main_process`. " + _EVEN,
    ),
    (
        _OTHER_CALLS,
        "Some ranks made a call that other ranks did not make: a forward, a save, a read of parameters, or a step. Make it "
        "on every rank in the same order, outside of `if is_main_process`.",
    ),
    (
        (Standing.ELSEWHERE, Standing.HERE, Standing.PAST),
        "Rank {rank} is at another point of the script. If it is only slow, set a larger `comm.late_s` (0: never late). "
        "Otherwise one rank makes a call that another does not make: call collectives on every rank, outside of `if "
        "is_main_process`.",
    ),
    ((Standing.ENDED,), "Look at {ranks}: its own error is the reason."),
    (
        (Standing.SILENT, None),
        "Look at {ranks}. A rank that is only slow needs a larger `comm.late_s` and `comm.timeout_s`.",
    ),
)
"""Standings of the ranks that a wait failed for (None: unknown ranks), and the advice. The first row with such a rank applies."""


@dataclass(frozen=True, kw_only=True)
class StragglerReport:
    """Compares a wait of this rank with the states of the other ranks.

    Attributes:
        rank, line: this rank, and the line of the script in which it waits.
        wait: a failed or a long wait.
        late: the rank at the other end of the connection, if known.
        silence: the reason why nothing is known about the others.
        phase: the current part of training on this rank, in words.
        begun, starts: see `RankState`; of this rank.
        recent: the last collectives of this rank; empty if they should not be shown.
    """

    rank: int
    wait: Wait
    line: str
    late: int | None = None
    rank_reports: Mapping[int, RankReport] = field(default_factory=dict)
    silence: str | None = None
    phase: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    recent: Sequence[str] = ()

    @cached_property
    def standings(self) -> dict[int, Standing]:
        return {rank: self._standing(each) for rank, each in self.rank_reports.items()}

    def _standing(self, other: RankReport) -> Standing:
        where = other.where
        if other.has_left and other.words is None:
            return Standing.LEFT_CALL if self.wait.kind is None else Standing.LEFT_STEPS
        if other.is_over:
            return Standing.ENDED
        if where is None:
            return Standing.SILENT
        here = (None, self.wait.name) if self.wait.is_of_script else (self.wait.name, None)
        if (where.waits_in, where.torch_call) == here:
            return Standing.HERE
        kind = where.kind
        if where.failure is not None and kind is not None and self.begun.get(kind, 0) >= where.begun.get(kind, 0):
            return Standing.PAST
        if where.waits_in is not None:
            return Standing.IN_ANOTHER
        return Standing.ELSEWHERE if where.torch_call is None else Standing.IN_SCRIPT

    def _ranks_with(self, standings: Sequence[Standing]) -> list[int]:
        return [rank for rank, standing in self.standings.items() if standing in standings]

    @property
    def in_vain(self) -> bool:
        """Whether two ranks each wait in a collective not started by the other, so neither wait can end."""
        mine = self.wait.name
        alive = [each.where for each in self.rank_reports.values() if each.where is not None and not each.is_over]
        return self.wait.kind is not None and any(
            where.starts.get(mine, 0) < self.starts.get(mine, 0) and (where.is_in_barrier or self._is_ahead(where))
            for where in alive
        )

    def _is_ahead(self, where: RankState) -> bool:
        """Whether another rank waits in a collective of training started less often by this rank."""
        theirs = where.waits_in
        if theirs is None or where.kind is None:
            return False
        return self.starts.get(theirs, 0) < where.starts.get(theirs, 0)

    @property
    def ranks_in_other_calls(self) -> list[int]:
        """Lists the ranks waiting in collectives different from this rank's."""
        return self._ranks_with(_OTHER_CALLS)

    @property
    def culprits(self) -> list[int]:
        """Lists the awaited ranks: ended ranks, else silent ranks, else ranks outside of the collective."""
        found = self.rank_reports
        # A rank with an error about another rank has ended too, but is not the reason.
        innocent = {rank for rank, each in found.items() if each.culprits and rank not in each.culprits}
        for standings in _CULPRITS:
            ranks = [rank for rank in self._ranks_with(standings) if rank not in innocent]
            if ranks:
                return ranks
        blamed = {rank for each in found.values() for rank in each.culprits if rank != self.rank}
        if not blamed and self.came_late:
            return [self.rank]
        return sorted(blamed) or ([] if self.late is None else [self.late])

    @property
    def came_late(self) -> bool:
        """Whether other ranks gave up waiting for this rank, in a collective reached by this rank afterwards."""
        gave_up = (
            each.words is not None and _WHILE_WAITING in each.words and self.rank in each.culprits
            for each in self.rank_reports.values()
        )
        return not self.ranks_in_other_calls and any(gave_up)

    @property
    def finding(self) -> str:
        """Returns one line with the failed collective and the ranks responsible for the failure."""
        culprits, at = self.culprits, in_brackets(self.wait.holds, self.phase, self.line)
        if culprits == [self.rank]:
            return f"the {self.wait.what} failed: the other ranks had given up waiting for rank {self.rank}{at}"
        failed = f"{_WHILE_WAITING}{_ranks(culprits)}" if culprits else " failed"
        return f"the {self.wait.what}{failed}: rank {self.rank} had waited {self.wait.seconds:.0f} s{at}"

    @property
    def in_lines(self) -> str:
        """Describes the state of each rank, one line per rank."""
        at = in_brackets(self.wait.holds, self.phase, self.line)
        return "\n".join(
            [f"  rank {self.rank} has waited {self.wait.seconds:.0f} s in the {self.wait.what}{at}", *self._others]
        )

    @property
    def _others(self) -> list[str]:
        culprits = [rank for rank in self.culprits if rank in self.rank_reports]
        listed = [*culprits, *(rank for rank in self.rank_reports if rank not in culprits)]
        lines = [f"  {self.rank_reports[rank]}" for rank in listed[:_LISTED]]
        if len(listed) > _LISTED:
            lines.append(f"  and {len(listed) - _LISTED} other ranks")
        return lines

    def __str__(self) -> str:
        is_told = (self.culprits and self.rank_reports) or self.wait.failure is None
        reason = [] if is_told else [f"  {self.wait.failure}"]
        silence = [] if self.silence is None else [f"  nothing is known about the other ranks: {self.silence}"]
        lines = [*reason, *self._different_calls(), *self._others, *silence]
        return "\n".join([f"hf_zero: {self.finding}.", *lines, *self._details(), self._advice()])

    def _different_calls(self) -> list[str]:
        """Lists the collectives with waiting ranks, if there are several."""
        if not self.ranks_in_other_calls:
            return []
        ranks_in: dict[str, list[int]] = {}
        ranks_in[f"{self.wait.what}{in_brackets(self.wait.holds, self.phase)}"] = [self.rank]
        for rank, each in self.rank_reports.items():
            if each.where is not None and each.where.collective is not None:
                ranks_in.setdefault(each.where.collective, []).append(rank)
        found = (f"{_ranks(sorted(ranks))} {_wait(ranks)} in the {what}" for what, ranks in ranks_in.items())
        return [f"  the ranks are in different collectives: {', '.join(found)}"]

    def _details(self) -> list[str]:
        """Lists stacks and last collectives of living culprits, and the last collectives of this rank."""
        found = []
        for rank in self.culprits[:_DETAILED]:
            where = self.rank_reports[rank].where if rank in self.rank_reports else None
            if where is not None and where.stack and not self.rank_reports[rank].is_over:
                found += [f"rank {rank} is at:", where.stack.rstrip()]
            if where is not None and where.recent:
                found += [f"the last collectives of rank {rank}:", *(f"  {line}" for line in where.recent)]
        if found and self.recent:
            found += [f"the last collectives of rank {self.rank}:", *(f"  {line}" for line in self.recent)]
        return found

    def _advice(self) -> str:
        culprits = self.culprits
        suspects = [*culprits, *self.ranks_in_other_calls]
        found = {self.standings.get(rank): rank for rank in reversed(suspects)} or {None: self.rank}
        standing, advice = next((each, advice) for row, advice in VERDICTS for each in row if each in found)
        return advice.format(
            rank=found[standing],
            own=self.rank,
            call=self.line or f"the {self.wait.what}",
            ranks=_ranks(culprits) if culprits else "the first rank that stopped",
        )


def _wait(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return in_words(ranks, _LISTED)


# [Note: how a wait is ended] Twice a second, a thread of each rank checks the wait of the main thread, which may also be a
# collective called by the script itself. If a wait has taken `comm.late_s`, the thread asks the other ranks for their state. If
# one of them is the reason, all waits of this process are made to fail, and the late wait raises the diagnosis as its error. A
# living culprit is in no wait, so the culprit is informed through the store, and its own thread ends its process.
#
# If two ranks wait in collectives of training, each started by only one of them, both wait forever, for example if one rank calls
# the model more often. So do a rank in such a collective and a rank waiting for all ranks in a barrier of the script. This is
# checked after a few seconds, and such a wait is ended at once.
#
# Some waits for a living rank outside of the collective must not be ended. Ranks meet in barriers and exchanges after long
# work of a single rank (loading, saving). There, a rank is late only if it has ended, does not answer, or has waited as long in a
# different collective. In a collective of training, every rank outside of it is late. In a save, a rank is late if it has begun
# fewer saves, because a rank that has begun this save may write for a long time. Nothing is ended if all ranks wait in the same
# collective, because a slow link is not a late rank.
#
# An accelerator's host does not wait for a collective: its queue does, and the host blocks in its next call that needs a result.
# There the last collective counts as a wait if it was started long enough ago, and a rank is late if it has started fewer.

_IDLE_S, _IDLE_SHARE = 0.05, 0.02
"""The most CPU time of a thread that is blocked in a single call, in seconds and as a share of the time."""
_AS_LONG = 0.5
"""If two ranks wait for each other, the other's wait lasts at least this part of this rank's wait."""


class ScriptCall:
    """Finds a call of the script to a collective of torch.distributed, in the main thread."""

    def __init__(self):
        self._wait: Wait | None = None
        self._line = ""
        self._since_cpu_s = self._last_cpu_s = 0.0

    def look(self) -> Wait | None:
        """Returns the call as a wait. The object stays the same while the thread is blocked in the call."""
        cpu_s = _main_cpu_s()
        is_idle, self._last_cpu_s = cpu_s - self._last_cpu_s < _IDLE_S, cpu_s
        # A computing thread is in no such call, so do not inspect its frames.
        frame, call = script_frame() if is_idle else (None, None)
        if frame is None or call is None:
            self._wait = None
            return None
        line, wait = f"{frame.f_code.co_filename}:{frame.f_lineno}", self._wait
        is_same = wait is not None and (wait.name, self._line) == (call, line)
        # A sequence of such calls needs little CPU time per look, but some in total.
        if wait is None or not is_same or cpu_s - self._since_cpu_s > _IDLE_S + _IDLE_SHARE * wait.seconds:
            wait = self._wait = Wait(ScriptCollective(call))
            self._line, self._since_cpu_s = line, cpu_s
        return wait


class DeviceQueue:
    """Treats the last collective in an accelerator's queue as a wait after a minimum time.

    Args:
        limit_s: minimum time since the start.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._entry: list | None = None
        self._wait: Wait | None = None

    def look(self, log: CollectiveLog) -> Wait | None:
        """Returns the wait. The object stays the same until another collective is started."""
        entry = log.entries[-1] if log.entries else None
        if entry is None or time.monotonic() - entry[STARTED] < self._limit_s:
            return None
        if entry is not self._entry or self._wait is None:
            self._entry, self._wait = entry, Wait(entry[LABEL])
            # Count from the collective's start, not from this look: otherwise `comm.late_s` would count twice.
            self._wait.since_s = entry[STARTED]
        return self._wait


def others_are_behind(report: StragglerReport, begun: Mapping[str, int], kind: str | None) -> bool:
    """Whether a rank is stopped, or has started fewer collectives of the awaited kind.

    An ended or silent rank does not count, because this rank may be busy by itself without a running collective.
    """
    kind = kind or ""
    alive = [each for each in report.rank_reports.values() if not each.is_over]
    return any(
        each.is_stopped or (each.where is not None and each.where.begun.get(kind, 0) < begun.get(kind, 0))
        for each in alive
    )


def _main_cpu_s() -> float:
    main = threading.main_thread().ident
    if main is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(main))


def is_to_end(report: StragglerReport) -> bool:
    """Whether a wait has taken too long and must fail; see [Note: how a wait is ended]."""
    rank_reports, wait = report.rank_reports, report.wait
    culprits = {report.standings.get(rank) for rank in report.culprits}
    if report.silence is not None or not culprits.isdisjoint((*_GONE, Standing.SILENT)):
        return True
    elsewhere = [rank_reports[rank].where for rank in report.ranks_in_other_calls]
    # Two ranks in different collectives wait for each other. If one of these waits has just begun, the rank may still reach this
    # collective.
    if any(where is not None and where.seconds >= _AS_LONG * wait.seconds for where in elsewhere):
        return True
    # Do not end barriers and exchanges, before which one rank may work for long (loading, saving).
    is_of_training = wait.kind is not None or (wait.is_of_script and "barrier" not in str(wait.what))
    return is_of_training and (bool(elsewhere) or Standing.ELSEWHERE in culprits)
