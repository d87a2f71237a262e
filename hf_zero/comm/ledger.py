"""The ledger: collectives by kind, with their calls, bytes, links and seconds.

[Note: exposed communication]
On the host, a wait is time in which the host is blocked. With an accelerator, the host continues and the device's queue is
blocked instead: from the moment when the queue reaches the wait until the awaited data has arrived. Both moments are therefore
recorded by the device's clock, in its queue before and after the wait. Their difference is read after the device has passed
them, without stopping the device. If the host itself waits for a small agreement, the device's clock still measures the relevant
time: how long the device had no work. Recording a moment costs the host an event on the device, so no moments are recorded
before somebody asks for times.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, NamedTuple

import torch

from ..queues import Moment, clock
from .collective_log import ENDED, LABEL
from .waits import Label, Tally, Watch


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
        # Counted while times are counted. Collectives in progress at the start are listed by their log entries.
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
