"""Counts collectives by kind: calls, bytes that this rank sent and over which links, and seconds.

[Note: exposed communication]
On the host a wait is time in which the host stands still. An accelerator's host goes on, and it is the device's queue that stands
still, from the moment when it comes to the wait to the moment when what it waits for has arrived. So both are moments of
the device's own clock, in its queue before and behind the wait, and how far they are apart is read when the device has passed
them, without stopping it. Where the host itself waits, for a small agreement, the device's clock counts what counts too: how
long the device had nothing to do meanwhile. A moment of a device is an event, which the host has to record, so there are none
before somebody asks for times.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import monotonic
from typing import Any, NamedTuple

import torch

from ..device import Moment, clock
from .watch import ENDED, LABEL, Watch


@dataclass(frozen=True, kw_only=True)
class Label:
    """Names a collective in the ledger and in errors, by kind and bucket.

    `channel` keeps messages of different buckets apart where the transport can: ranks that gather different buckets then
    wait for each other, and are named at the time limit, instead of taking one bucket for another.

    Attributes:
        holds: the module or the parameters that the bucket holds, in words.
    """

    kind: str
    subject: str
    channel: int = 0
    holds: str = field(default="", compare=False)

    @cached_property
    def _words(self) -> str:
        return f"{self.kind} of {self.subject}"

    def __str__(self) -> str:
        return self._words


@dataclass(kw_only=True)
class CommRow:
    """One kind of collective since the ledger was opened.

    Attributes:
        bytes_sent: by this rank.
        bytes_between: of those, the ones to ranks on other nodes.
        wait_seconds: exposed communication: how long training stood still for it, see [Note: exposed communication].
        under_way_seconds: how long at least one was between its start and the moment when somebody needed its end.
        timed_bytes: of those sent, the ones that `under_way_seconds` is of.
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
        """Achieved 1e9 bytes a second: a lower bound where collectives end long before somebody needs them."""
        return self.timed_bytes / self.under_way_seconds / 1e9 if self.under_way_seconds else 0.0


class _Span(NamedTuple):
    """A span of time, and the attribute of a row that grows by it."""

    row: CommRow
    attribute: str
    start: Moment
    end: Moment

    @property
    def is_past(self) -> bool:
        return self.start.is_past and self.end.is_past


class _Waiting(AbstractContextManager):
    """Times a wait. No generator, which is slower: each collective of a step makes one.

    Args:
        entry: in the log, of a collective whose end this is and whose start `Ledger.began` has noted.
        ends: the wait is for the end of that collective.
    """

    __slots__ = ("_ends", "_entry", "_is_exposed", "_is_part", "_kind", "_ledger", "_start")

    def __init__(
        self,
        ledger: "Ledger",
        kind: str,
        *,
        entry: list[Any] | None = None,
        ends: bool = False,
        is_exposed: bool = True,
    ):
        self._ledger, self._kind, self._is_exposed = ledger, kind, is_exposed
        self._entry, self._ends = entry, ends

    def __enter__(self) -> None:
        ledger = self._ledger
        # Of a collective that is made of others, the time is theirs.
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
            ledger.ended(self._kind, self._entry, end)


class _Rows(dict[str, CommRow]):
    """Rows by kind, each made when first asked for."""

    def __missing__(self, kind: str) -> CommRow:
        row = self[kind] = CommRow(kind=kind)
        return row


class Ledger:
    """Counts collectives by kind: calls, bytes, seconds. Each transport has one.

    Args:
        now: gives moments of the device that is trained on; by default the host's.
        watch: is told of each wait, and names one that fails.
        is_timed: False counts no times before somebody asks for them.

    Attributes:
        now: gives the present moment.
        is_timed: times are counted.
        timed_from: the optimizer step from which on they are, where collectives before it have none; else None.
        traced: where somebody follows a step, each span of time that is counted, as (kind, attribute of its row, start, end);
            else None.
        is_waiting: in a wait that counts; others, until its end, are parts of it.
    """

    def __init__(self, now: Callable[[], Moment] | None = None, watch: Watch | None = None, *, is_timed: bool = True):
        self.watch = watch or Watch()
        self._log = self.watch.log
        self._record = self._log.entries.append
        self.now = now or clock(torch.device("cpu"))
        self.is_timed = is_timed
        self.timed_from: int | None = None
        self.is_waiting = False
        self.traced: list[tuple[str, str, Moment, Moment]] | None = None
        self._rows = _Rows()
        self._under_way: dict[str, int] = {}
        self._since: dict[str, Moment] = {}
        self._unread: deque[_Span] = deque()

    def start_timing(self) -> None:
        """Counts times from now on."""
        if not self.is_timed:
            self.is_timed = True
            self.timed_from = self._log.step if self._rows else None

    def count(self, label: Label, bytes_sent: int, bytes_between: int) -> list[Any]:
        """Counts a collective that is about to start; returns its entry in the log."""
        kind, log = label.kind, self._log
        entry = [label, log.site, log.step, bytes_sent, monotonic(), None]
        self._record(entry)
        row = self._rows[kind]
        row.calls += 1
        self.watch.begun[kind] += 1
        self.watch.starts[str(label)] += 1
        row.bytes_sent += bytes_sent
        row.bytes_between += bytes_between
        # A span that began before timing has no start and is not counted: its bytes would raise the rate.
        if self.is_timed and (kind in self._since or not self._under_way.get(kind)):
            row.timed_bytes += bytes_sent
        return entry

    def began(self, label: Label) -> list[Any] | None:
        """Notes the start of a collective; returns its entry in the log, for `ended`."""
        kind, entries = label.kind, self._log.entries
        if self.is_timed and not self._under_way.get(kind):
            self._since[kind] = self.now()
        self._under_way[kind] = self._under_way.get(kind, 0) + 1
        if not entries:
            return None
        # Nearly always the last one.
        return entries[-1] if entries[-1][LABEL] is label else self._log.latest(label)

    def ended(self, kind: str, entry: list[Any] | None, end: Moment | None = None) -> None:
        """Notes the end of a collective of this kind. `end`: the present moment, where it is known."""
        if entry is not None:
            entry[ENDED] = monotonic()
        self._under_way[kind] -= 1
        if not self._under_way[kind] and kind in self._since:
            self.add(kind, "under_way_seconds", self._since.pop(kind), end or self.now())

    def waiting(self, kind: str) -> AbstractContextManager[None]:
        """Times a wait for a collective of this kind."""
        return _Waiting(self, kind)

    def finishing(self, kind: str, entry: list[Any] | None, *, is_exposed: bool = True) -> AbstractContextManager[None]:
        """Times the wait for a collective that `began` returned, and notes its end.

        Args:
            is_exposed: False counts the end but no wait.
        """
        return _Waiting(self, kind, entry=entry, ends=True, is_exposed=is_exposed)

    def rows(self) -> tuple[CommRow, ...]:
        """Returns the counts by kind. Times cover the part that the device has passed."""
        self._read()
        return tuple(replace(row) for _, row in sorted(self._rows.items()) if row.calls)

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
        """Adds up the spans that the device has passed, in order: those that wait here are no more than the device is behind."""
        while self._unread and self._unread[0].is_past:
            span = self._unread.popleft()
            seconds = getattr(span.row, span.attribute) + span.start.seconds_until(span.end)
            setattr(span.row, span.attribute, seconds)
