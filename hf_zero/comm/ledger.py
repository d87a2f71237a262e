"""The collectives a rank waits in, its last collectives and its last error, and counts: calls, bytes, links, seconds.

[Note: exposed communication]
On the host, a wait is time in which the host is blocked. With an accelerator, the host continues and the device's queue is
blocked instead: from the moment when the queue reaches the wait until the awaited data has arrived. Both moments are therefore
recorded by the device's clock, in its queue before and after the wait. Their difference is read after the device has passed
them, without stopping the device. If the host itself waits for a small agreement, the device's clock still measures the relevant
time: how long the device had no work. Recording a moment costs the host an event on the device, so no moments are recorded
before somebody asks for times.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock, get_ident
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import torch

from ..presence.arrivals import CommunicationError
from ..presence.rank_state import ScriptCollective, script_line
from ..queues import Moment, clock
from .collective_log import ENDED, LABEL, CollectiveLog, first_line

_Result = TypeVar("_Result")

# ---- The waits of this rank, and the error of a failed wait ----

SAVE = "save"
"""The part of training inside a save, and the kind of a save as one collective."""
_MADE = 64
"""Waits remembered after another thread has asked for them: more than threads wait at a time, one wait inside another."""


class Wait(AbstractContextManager):
    """A collective which a thread is starting or waiting for. Also the context around the start or the wait.

    This is a class instead of a generator for speed. `Watch.during` creates one only if the wait fails or another thread asks.

    Args:
        watch: knows the wait inside the context. None for a wait that was detected from outside and is not a context.

    Attributes:
        what: the label, or words.
        since_s: start on the monotonic clock.
        failure, line: the reason of a failure, and the failing line of the script; empty before a failure.
        end: the error to be raised when the wait fails. Set before the failure if a rank is late.
    """

    # Class attributes until a wait fails, which is rare.
    failure: str | None = None
    line = ""
    seconds_at_failure: float | None = None
    end: CommunicationError | None = None

    def __init__(self, what: object, watch: "Watch | None" = None):
        self.what = what
        self.since_s = monotonic()
        self._watch: Any = watch

    @property
    def holds(self) -> str:
        """Names the module or the parameters of the bucket; empty without a bucket."""
        return getattr(self.what, "holds", "")

    @property
    def name(self) -> str:
        """Names the collective. For a call of the script, this is torch's function."""
        return self.what[:] if isinstance(self.what, ScriptCollective) else str(self.what)

    @property
    def is_of_script(self) -> bool:
        """Whether the script called this collective itself."""
        return isinstance(self.what, ScriptCollective)

    @property
    def kind(self) -> str | None:
        """Returns the kind of a collective of training; None for other waits."""
        return getattr(self.what, "kind", None)

    @property
    def seconds(self) -> float:
        """Returns the duration, up to a failure."""
        return time.monotonic() - self.since_s if self.seconds_at_failure is None else self.seconds_at_failure

    def fail(self, error: RuntimeError) -> None:
        """Records the reason and the line of a failure."""
        if self.failure is None:
            self.seconds_at_failure = self.seconds
            self.failure = first_line(error).removeprefix("hf_zero: ")
            self.line = script_line()[0]

    def __enter__(self) -> "Wait":
        waits = self._watch.waits
        thread = self._thread = get_ident()
        # None, or the enclosing wait.
        self._outer = waits.get(thread)
        waits[thread] = self
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # A report keeps the failed wait, but must not keep the watch alive: the threads of a watchdog end with the last
        # reference to the watchdog.
        watch, self._watch = self._watch, None
        try:
            if error is not None and isinstance(error, RuntimeError):
                watch.fail(self, error)
                if not isinstance(error, CommunicationError):
                    raise watch.explain(self, error) from error
        finally:
            if self._outer is None:
                watch.waits.pop(self._thread, None)
            else:
                watch.waits[self._thread] = self._outer


class Tally:
    """Counts the starts of one collective and the bytes sent. A start adds to a single number: nearly all send the same bytes.

    Attributes:
        kind: the kind of the collective.
        sent, between: the bytes that each start sends, to all ranks and to ranks on other nodes.
        group, nbytes: the ranks and the bytes of the tensor from which a transport has computed these; None and 0 if it has not.
        number: starts since these bytes changed.
        sends: another object after each change of these bytes.
    """

    __slots__ = ("_before", "between", "group", "kind", "nbytes", "number", "sends", "sent")

    def __init__(self, kind: str):
        self.kind = kind
        self.sent = self.between = self.nbytes = self.number = 0
        self.group: object = None
        self.sends: object = object()
        self._before = (0, 0, 0)

    def send(self, sent: int, between: int, group: object = None, nbytes: int = 0) -> None:
        """Sets the bytes of the next starts."""
        self._before = self.totals
        self.sent, self.between, self.group, self.nbytes, self.number = sent, between, group, nbytes, 0
        self.sends = object()

    @property
    def totals(self) -> tuple[int, int, int]:
        """Returns the number of all starts, and their bytes sent, in all and between nodes."""
        starts, sent, between = self._before
        return starts + self.number, sent + self.number * self.sent, between + self.number * self.between


class Watch:
    """Knows which collectives this rank's threads are waiting in.

    Attributes:
        tallies: the counts of each collective, by its name.
        given_up: the last wait that failed.
        log: the last collectives.
        ended: the error about a rank that was late, once waits have been ended for it.
        is_left_by_others: `leave` is called at the end of Python.
        waits: the innermost wait of each thread, by the thread's number. Inside `during`, a tuple of label and start instead,
            because most waits end before anybody asks for them.
    """

    def __init__(self):
        self.tallies: dict[str, Tally] = {}
        self._saves = 0
        self.given_up: Wait | None = None
        self.log = CollectiveLog()
        self.ended: CommunicationError | None = None
        self.is_left_by_others = False
        self.waits: dict[int, Wait | tuple[object, float]] = {}
        # The waits made of tuples, each with its tuple, because a watchdog marks the wait that later fails.
        self._made: deque[tuple[tuple[object, float], Wait]] = deque(maxlen=_MADE)
        self._making = Lock()

    @property
    def begun(self) -> Counter[str]:
        """Counts how often each kind of collective has been started on this rank."""
        found = Counter({SAVE: self._saves} if self._saves else {})
        # Iterate over a copy, because another thread may start a collective and change the dict.
        for tally in list(self.tallies.values()):
            found[tally.kind] += tally.totals[0]
        return found

    @property
    def starts(self) -> Counter[str]:
        """Counts how often each collective has been started, by its name."""
        return Counter({name: tally.totals[0] for name, tally in dict(self.tallies).items()})

    def during(self, what: object, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls a function inside `inside(what)`. No context, for speed: each collective of a step calls this twice."""
        waits, thread = self.waits, get_ident()
        outer = waits.get(thread)
        begun = waits[thread] = what, monotonic()
        try:
            return call(*arguments)
        except RuntimeError as error:
            wait = self._wait_of(begun)
            self.fail(wait, error)
            if isinstance(error, CommunicationError):
                raise
            raise self.explain(wait, error) from error
        finally:
            if outer is None:
                del waits[thread]
            else:
                waits[thread] = outer

    def inside(self, what: object) -> Wait:
        """Marks a wait. An error of the backend becomes a `CommunicationError` with the name of the wait.

        Args:
            what: a `Label`, or words.
        """
        return Wait(what, self)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Marks a save, which all ranks must reach. A nested save counts as part of the outer one."""
        if self.log.site == SAVE:
            yield
            return
        self._saves += 1
        with self.log.at(SAVE):
            yield

    def kind_of(self, wait: Wait) -> str | None:
        """Returns the kind of a collective of training, or `SAVE` inside a save; None for other waits."""
        return wait.kind or (SAVE if self.log.site == SAVE else None)

    def fail(self, wait: Wait, error: RuntimeError) -> None:
        wait.fail(error)
        self.given_up = wait

    @property
    def longest(self) -> Wait | None:
        """Returns the oldest unfinished wait of this rank."""
        # Iterate over a copy, because other threads begin and end waits in the meantime.
        return min(map(self._wait_of, list(self.waits.values())), key=lambda wait: wait.since_s, default=None)

    def _wait_of(self, begun: Wait | tuple[object, float]) -> Wait:
        """Returns the wait of an entry of `waits`, always the same one for the same entry."""
        if isinstance(begun, Wait):
            return begun
        # Locked, because the waiting thread may ask for its own wait, after a failure, at the same time as a watchdog.
        with self._making:
            for made_of, wait in self._made:
                if made_of is begun:
                    return wait
            what, since_s = begun
            made = Wait(what)
            made.since_s = since_s
            self._made.append((begun, made))
            return made

    def explain(self, wait: Wait, error: RuntimeError) -> CommunicationError:
        return CommunicationError(
            f"hf_zero: the {wait.what} failed: {wait.failure}\nA peer ended, or did not reach this collective in time. Look at "
            "the first rank that stopped: its own error is the reason."
        )

    def explain_call(self, call: str, line: str, error: RuntimeError) -> CommunicationError | None:
        """Explains the error of a collective of torch.distributed called by the script itself.

        Args:
            call: torch's function.
            line: the line of the script.

        Returns:
            An error that names the ranks that have ended or given up; None if there are none.
        """
        return None

    def leave_reason(self, words: str) -> None:
        """Publishes why this process ends, for the ranks which will miss this one."""

    def leave(self, patience_s: float) -> list[int]:
        """Waits for the other ranks to finish as well; returns the unfinished ones."""
        return []


# ---- The ledger: collectives by kind, their bytes and seconds ----


@dataclass(frozen=True, kw_only=True)
class Label:
    """Names a collective in the ledger and in errors, by kind and bucket.

    `channel` separates the messages of different buckets if the transport supports channels. Ranks that gather different buckets
    then wait for each other, and are named after the time limit, instead of confusing the buckets.

    Attributes:
        holds: the module or the parameters of the bucket, in words.
    """

    kind: str
    subject: str
    channel: int = 0
    holds: str = field(default="", compare=False)

    @cached_property
    def words(self) -> str:
        """The result of `str`, cached, because each collective needs the text twice."""
        return f"{self.kind} of {self.subject}"

    def __str__(self) -> str:
        return self.words


@dataclass(kw_only=True)
class CommRow:
    """The counts of one kind of collective since the ledger was opened.

    Attributes:
        bytes_sent: bytes sent by this rank.
        bytes_between: the part of `bytes_sent` to ranks on other nodes.
        wait_seconds: exposed communication, the time that training was blocked; see [Note: exposed communication].
        under_way_seconds: time during which at least one collective was between its start and the wait for its end.
        timed_bytes: the part of `bytes_sent` to which `under_way_seconds` applies.
    """

    kind: str
    calls: int = 0
    bytes_sent: int = 0
    bytes_between: int = 0
    wait_seconds: float = 0.0
    under_way_seconds: float = 0.0
    timed_bytes: int = 0

    @property
    def gb_per_second(self) -> float:
        """Achieved rate in 1e9 bytes per second. A lower bound if collectives end long before their waits."""
        return self.timed_bytes / self.under_way_seconds / 1e9 if self.under_way_seconds else 0.0


class _Span(NamedTuple):
    """A span of time, to be added to an attribute of a row."""

    row: CommRow
    attribute: str
    start: Moment
    end: Moment

    @property
    def is_past(self) -> bool:
        return self.start.is_past and self.end.is_past


class _Waiting(AbstractContextManager):
    """Times a wait. A class instead of a generator for speed, because each collective of a step creates one.

    Args:
        entry: the log entry of a collective.
        ends: whether the wait is for the end of this collective.
        has_begun: as of `Ledger.ended`.
    """

    __slots__ = ("_ends", "_entry", "_has_begun", "_is_exposed", "_is_part", "_kind", "_ledger", "_start")

    def __init__(
        self,
        ledger: "Ledger",
        kind: str,
        *,
        entry: list[Any] | None = None,
        ends: bool = False,
        has_begun: bool = False,
        is_exposed: bool = True,
    ):
        self._ledger, self._kind, self._is_exposed = ledger, kind, is_exposed
        self._entry, self._ends, self._has_begun = entry, ends, has_begun

    def __enter__(self) -> None:
        ledger = self._ledger
        # Inside another wait, the time already belongs to the outer wait.
        self._is_part = ledger.is_waiting
        ledger.is_waiting = True
        counts = self._is_exposed and ledger.is_timed and not self._is_part
        self._start = ledger.now() if counts else None

    def __exit__(self, *_error: object) -> None:
        ledger, end = self._ledger, None
        if not self._is_part:
            ledger.is_waiting = False
        if self._start is not None:
            end = ledger.now()
            ledger.add(self._kind, "wait_seconds", self._start, end)
        if self._ends:
            ledger.ended(self._kind, self._entry, end, has_begun=self._has_begun)


class _Rows(dict[str, CommRow]):
    """Rows by kind, each created on first access."""

    def __missing__(self, kind: str) -> CommRow:
        row = self[kind] = CommRow(kind=kind)
        return row


class Ledger:
    """Counts collectives by kind: calls, bytes, seconds. Each transport has one ledger.

    Args:
        now: returns a moment of the training device; by default, the host's.
        watch: is notified of each wait, and names failed waits.
        is_timed: False to record no times before `start_timing`.

    Attributes:
        now: returns the present moment.
        is_timed: whether times are recorded.
        timed_from: the optimizer step at which timing started, if earlier collectives were not timed; else None.
        traced: if a step is being traced, its timed spans as (kind, attribute of the `CommRow`, start, end); else None.
        is_waiting: whether this rank is inside a counted wait. Further waits until its end are parts of it.
        log: the last collectives.
    """

    def __init__(self, now: Callable[[], Moment] | None = None, watch: Watch | None = None, *, is_timed: bool = True):
        self.watch = watch or Watch()
        self.log = self.watch.log
        self._record = self.log.entries.append
        self._tallies = self.watch.tallies
        self.now = now or clock(torch.device("cpu"))
        self.is_timed = is_timed
        self.timed_from: int | None = None
        self.is_waiting = False
        self.traced: list[tuple[str, str, Moment, Moment]] | None = None
        self._rows = _Rows()
        # Counted while times are. Collectives that were under way before are in the list, by their log entries.
        self._under_way: defaultdict[str, int] = defaultdict(int)
        self._untimed: list[list[Any]] = []
        self._since: dict[str, Moment] = {}
        self._unread: deque[_Span] = deque()

    def start_timing(self) -> None:
        """Records times from now on."""
        if not self.is_timed:
            # Listed first: another thread may start a collective.
            self._untimed = [entry for entry in list(self.log.entries) if entry[ENDED] is None]
            self.is_timed = True
            self.timed_from = self.log.step if self._tallies else None

    def count(self, label: Label, bytes_sent: int, bytes_between: int) -> list[Any]:
        """Counts a collective that is about to start; returns its entry in the log."""
        tally = self.tally_of(label)
        if tally.sent != bytes_sent or tally.between != bytes_between:
            tally.send(bytes_sent, bytes_between)
        return self.note(label, tally)

    def tally_of(self, label: Label) -> Tally:
        """Returns the counts of a collective."""
        return self._tallies.get(label.words) or self._tallies.setdefault(label.words, Tally(label.kind))

    def note(self, label: Label, tally: Tally) -> list[Any]:
        """As `count`, for a collective that sends the bytes of its tally."""
        log = self.log
        entry = [label, log.site, log.step, tally.sent, monotonic(), None]
        self._record(entry)
        tally.number += 1
        # A span which began before timing has no start, so its time is not counted. Counting its bytes would raise the rate.
        if self.is_timed and (label.kind in self._since or not self._is_under_way(label.kind)):
            self._rows[label.kind].timed_bytes += tally.sent
        return entry

    def began(self, label: Label) -> bool:
        """Notes the start of a collective for the times, if these are counted. Returns whether they are, for `ended`."""
        if not self.is_timed:
            return False
        kind = label.kind
        if not self._is_under_way(kind):
            self._since[kind] = self.now()
        self._under_way[kind] += 1
        return True

    def _is_under_way(self, kind: str) -> bool:
        """Whether a collective of this kind is between its start and the wait for its end."""
        if self._untimed:
            self._untimed = [entry for entry in self._untimed if entry[ENDED] is None]
        return self._under_way[kind] > 0 or any(entry[LABEL].kind == kind for entry in self._untimed)

    def ended(self, kind: str, entry: list[Any] | None, end: Moment | None = None, *, has_begun: bool) -> None:
        """Notes the end of a collective of this kind.

        Args:
            entry: the entry in the log; None if there is none.
            end: the present moment, if the caller knows it already.
            has_begun: the result of `began`.
        """
        if entry is not None:
            entry[ENDED] = monotonic()
        if has_begun:
            self._under_way[kind] -= 1
            if not self._under_way[kind] and kind in self._since:
                self.add(kind, "under_way_seconds", self._since.pop(kind), end or self.now())

    def waiting(self, kind: str) -> AbstractContextManager[None]:
        """Times a wait for a collective of this kind."""
        return _Waiting(self, kind)

    def finishing(
        self, kind: str, entry: list[Any] | None, *, has_begun: bool, is_exposed: bool = True
    ) -> AbstractContextManager[None]:
        """Times the wait for a collective, and notes the end as `ended` does.

        Args:
            is_exposed: False counts the end but no wait.
        """
        return _Waiting(self, kind, entry=entry, ends=True, has_begun=has_begun, is_exposed=is_exposed)

    def rows(self) -> tuple[CommRow, ...]:
        """Returns the counts by kind. Times cover the spans which the device has passed."""
        self._read()
        found: dict[str, CommRow] = {}
        for tally in sorted(list(self._tallies.values()), key=lambda each: each.kind):
            kind, (calls, bytes_sent, bytes_between) = tally.kind, tally.totals
            row = found[kind] = found.get(kind) or replace(self._rows[kind])
            row.calls += calls
            row.bytes_sent += bytes_sent
            row.bytes_between += bytes_between
        return tuple(found.values())

    def add(self, kind: str, attribute: str, start: Moment, end: Moment) -> None:
        """Adds the time from `start` to `end` to a row."""
        row = self._rows[kind]
        if self.traced is not None:
            self.traced.append((kind, attribute, start, end))
        if not self._unread and start.is_past and end.is_past:
            # The host's clock has always passed.
            setattr(row, attribute, getattr(row, attribute) + start.seconds_until(end))
            return
        self._unread.append(_Span(row, attribute, start, end))
        self._read()

    def _read(self) -> None:
        """Adds up the spans the device has passed, in order. The spans left waiting are the device's backlog."""
        while self._unread and self._unread[0].is_past:
            span = self._unread.popleft()
            seconds = getattr(span.row, span.attribute) + span.start.seconds_until(span.end)
            setattr(span.row, span.attribute, seconds)
