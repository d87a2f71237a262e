"""The collectives that a rank waits in, its last ones and its last error; and counts of them: calls, bytes, links, seconds.

[Note: exposed communication]
On the host a wait is time in which the host stands still. An accelerator's host goes on, and it is the device's queue that stands
still, from the moment when it comes to the wait to the moment when what it waits for has arrived. So both are moments of
the device's own clock, in its queue before and behind the wait, and how far they are apart is read when the device has passed
them, without stopping it. Where the host itself waits, for a small agreement, the device's clock counts what counts too: how
long the device had nothing to do meanwhile. A moment of a device is an event, which the host has to record, so there are none
before somebody asks for times.
"""

import json
import os
import sys
import time
import traceback
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import profiler

from ..config import ConfigError
from ..device import Moment, clock
from .arrivals import CommunicationError
from .rank_state import ScriptCollective, line_in, script_line, torch_call_in

# ---- A bounded log of a rank's last collectives: name, part of training, bytes, start and end ----

_LENGTH = 256
_SHOWN = 6

LABEL, SITE, STEP, BYTES, STARTED, ENDED = range(6)
"""What stands where in an entry. A list, and not an object: each collective of a step makes one."""


class CollectiveLog:
    """A ring of the last collectives.

    Attributes:
        entries: `[label, site, step, bytes sent, start, end]`, the oldest first; times on the monotonic clock. The end, None at
            first, is when the host had waited for it: an accelerator may still be at work then.
        site: where training is: forward, backward, evaluate, ...
        step: optimizer steps taken since the engine was built.
        part: which part of which copy of the model this rank has, in words; "" of a model that is not split.
    """

    def __init__(self):
        self.entries: deque[list[Any]] = deque(maxlen=_LENGTH)
        self.site = "setting up"
        self.step = 0
        self.part = ""

    @property
    def place(self) -> str:
        """Says where training is."""
        return f"{self.site}, step {self.step}" + (f", {self.part}" if self.part else "")

    def latest(self, label: object) -> list[Any] | None:
        """Returns the entry of the last collective with this label."""
        # Over a copy: a deque raises where another thread appends during the walk.
        return next((entry for entry in reversed(list(self.entries)) if entry[LABEL] is label), None)

    @contextmanager
    def at(self, site: str) -> Iterator[None]:
        """Names a part of the run that is no training step, for its duration."""
        before, self.site = self.site, site
        try:
            yield
        finally:
            self.site = before

    def site_of(self, label: object) -> str:
        """Says where training was at the last start of this label; "" for one that is not in the log."""
        entry = self.latest(label)
        return "" if entry is None else entry[SITE]

    def last_lines(self) -> list[str]:
        # A copy, in one operation: other threads may start collectives meanwhile.
        now_s = time.monotonic()
        return [_entry_in_words(entry, now_s) for entry in list(self.entries)[-_SHOWN:]]


def _entry_in_words(entry: list[Any], now_s: float) -> str:
    label, site, step, nbytes, started_s, ended_s = entry
    holds = f" ({label.holds})" if getattr(label, "holds", "") else ""
    how = f"not ended for {now_s - started_s:.1f} s" if ended_s is None else f"ended after {ended_s - started_s:.3f} s"
    return f"{label}{holds}, {nbytes:,} bytes sent, {site}, step {step}: {how}"


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# ---- Ends this process with a reason, even while its main thread hangs, and tells the launcher ----

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun, and so `accelerate launch`, looks for what it shows under "Root Cause"."""


def write_error_file(summary: str, said: str) -> bool:
    """Leaves an error for the launcher, unless another one is there. Returns whether one is there now."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return False
    # As torch.distributed.elastic reads it; of the two texts, it shows `py_callstack`.
    extra = {"py_callstack": said, "timestamp": str(int(time.time()))}
    try:
        # Mode "x": an error that is there stays, and no link is followed.
        with open(path, "x") as file:
            json.dump({"message": {"message": summary, "extraInfo": extra}}, file)
    except FileExistsError:
        return True
    except OSError as error:
        print(f"hf_zero: the error could not be written for the launcher: {error}", file=sys.stderr)
        return False
    return True


def end_process(said: str) -> None:
    """Prints the reason and ends the process with status 1."""
    # Not by an exception: a thread that stands in a call sees none.
    write_error_file(said.partition("\n")[0], said)
    # Past Python's own buffers, whose locks the main thread may hold.
    os.write(2, f"{said}\n".encode())
    os._exit(1)


# ---- The waits of this rank, and the error of a failed one ----

SAVE = "save"
"""Where training is in a save, and the kind of collective that a save is as a whole."""


class Wait(AbstractContextManager):
    """A collective that a thread of this rank is starting or waiting for, and the context in which the thread does.

    No generator, which is slower: each collective of a step makes two of these.

    Args:
        watch: knows the wait inside of the context. None for a wait that is found from outside, and is no context.

    Attributes:
        what: names it in words.
        since_s: on the monotonic clock.
        failure, line: why it failed, once it has, and the line of the script that it failed in.
        end: the error that it is to fail with; set before it has failed where a rank is late.
    """

    # Of the class until a wait fails: nearly none does.
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
        """Names the collective; for a call of the script, torch's function."""
        return self.what[:] if isinstance(self.what, ScriptCollective) else str(self.what)

    @property
    def is_of_script(self) -> bool:
        """Whether the script called this collective itself."""
        return isinstance(self.what, ScriptCollective)

    @property
    def kind(self) -> str | None:
        """Returns the kind of a collective of training; None of others."""
        return getattr(self.what, "kind", None)

    @property
    def seconds(self) -> float:
        """Returns the duration, up to a failure."""
        return time.monotonic() - self.since_s if self.seconds_at_failure is None else self.seconds_at_failure

    def fail(self, error: RuntimeError) -> None:
        """Notes the reason and the line of a failure."""
        if self.failure is None:
            self.seconds_at_failure = self.seconds
            self.failure = first_line(error).removeprefix("hf_zero: ")
            self.line = script_line()[0]

    def __enter__(self) -> "Wait":
        waits = self._watch.waits
        thread = self._thread = get_ident()
        # None, or the wait that this one is a part of.
        self._outer = waits.get(thread)
        waits[thread] = self
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # A report keeps the wait that has failed, and must not keep the watch: a watchdog's threads end with the last reference
        # to the watchdog.
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


class Watch:
    """Knows the collectives that this rank's threads wait in.

    Attributes:
        begun: how often each kind of collective has been started on this rank.
        starts: how often each collective has been, by its name.
        given_up: the last wait that failed.
        log: the last collectives.
        ended: the error about a rank that was late, once waits have been ended for it.
        is_left_by_others: `leave` is called at the end of Python.
        waits: the innermost wait of each thread, by the thread's number.
    """

    def __init__(self):
        self.begun: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self.given_up: Wait | None = None
        self.log = CollectiveLog()
        self.ended: CommunicationError | None = None
        self.is_left_by_others = False
        self.waits: dict[int, Wait] = {}

    def inside(self, what: object) -> Wait:
        """Marks a wait. An error of the backend becomes a `CommunicationError` that names the wait.

        Args:
            what: a `Label`, or words.
        """
        return Wait(what, self)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Marks a save, which all ranks must come to. A nested save counts as part of the outer one."""
        if self.log.site == SAVE:
            yield
            return
        self.begun[SAVE] += 1
        with self.log.at(SAVE):
            yield

    def kind_of(self, wait: Wait) -> str | None:
        """Returns the kind of a collective of training, or `SAVE` inside a save; None of others."""
        return wait.kind or (SAVE if self.log.site == SAVE else None)

    def fail(self, wait: Wait, error: RuntimeError) -> None:
        wait.fail(error)
        self.given_up = wait

    @property
    def longest(self) -> Wait | None:
        """Returns the oldest unfinished wait of this rank."""
        # Over a copy: other threads begin and end waits meanwhile.
        return min(list(self.waits.values()), key=lambda wait: wait.since_s, default=None)

    def explain(self, wait: Wait, error: RuntimeError) -> CommunicationError:
        return CommunicationError(
            f"hf_zero: the {wait.what} failed: {wait.failure}\nA peer ended, or did not reach this collective in time. Look at "
            "the first rank that stopped: its own error is the reason."
        )

    def explain_call(self, call: str, line: str, error: RuntimeError) -> CommunicationError | None:
        """Explains the error of a collective of torch.distributed that the script called itself.

        Args:
            call: torch's function.
            line: of the script.

        Returns:
            An error that names the ranks that have ended or given up; None without any.
        """
        return None

    def leave_reason(self, words: str) -> None:
        """Leaves this process's reason to end for ranks that will miss it."""

    def leave(self, patience_s: float) -> list[int]:
        """Waits for the other ranks to finish too; returns those that have not."""
        return []


# ---- An error that ends a rank: told to the other ranks, to the launcher, and once on the screen ----


def lost_ranks(error: BaseException, watches: Iterable[Watch]) -> CommunicationError | None:
    """Returns the error that names the lost ranks, if `error` is torch.distributed's own; None for other errors."""
    if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
        return None
    call = torch_call_in(error.__traceback__)
    if call is None:
        return None
    line = line_in(error.__traceback__)
    return next((found for watch in watches if (found := watch.explain_call(call, line, error)) is not None), None)


@contextmanager
def naming_lost_ranks(accelerator: Any) -> Iterator[None]:
    """Raises an error that names the ranks that ended in place of torch.distributed's own, which names an address.

    `ErrorHook` runs neither if the script catches the error, nor in a process that multiprocessing started, nor in a notebook.

    Args:
        accelerator: with the `zero_engines` of this rank.
    """
    try:
        yield
    except RuntimeError as error:
        found = lost_ranks(error, watches_of(accelerator))
        if found is None:
            raise
        raise found from error


def watches_of(accelerator: Any) -> list[Watch]:
    return [engine.transport.watch for engine in accelerator.zero_engines]


class ErrorHook:
    """A rank's `sys.excepthook`: tells the others of the error, and prints it once.

    Args:
        former: the hook that prints the traceback.
    """

    def __init__(self, former: Callable):
        self._former = former
        self._accelerators: list[weakref.ref[Any]] = []

    @classmethod
    def installed(cls) -> "ErrorHook":
        """Returns the hook of this process, and installs one first if need be."""
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls(sys.excepthook)
        return sys.excepthook

    def follow(self, accelerator: Any) -> None:
        """Tells the ranks of this Accelerator's `zero_engines` of an error that ends this process, from now on."""
        self._accelerators.append(weakref.ref(accelerator))

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        summary = "".join(traceback.format_exception_only(kind, error)).strip()
        reason = _reason(error)
        losses = lost_ranks(error, self._watches())
        if losses is None and not isinstance(error, CommunicationError):
            # Of a collective that failed, the ranks have told each other.
            # Before the traceback is printed: the others wait for this rank, and may reach their limit meanwhile.
            for watch in self._watches():
                watch.leave_reason(summary.partition("\n")[0])
        said = str(losses or reason or "".join(traceback.format_exception(kind, error, trace)))
        is_left = write_error_file(summary, said)
        if isinstance(error, ConfigError):
            # Where in hf_zero a setting is refused does not matter to who has set it.
            trace, error.__cause__, error.__suppress_context__ = _line_of_the_script(trace), None, True
        if reason is not None and _is_told_by_the_main_rank(error):
            if is_left and isinstance(error, ConfigError):
                # The launcher shows it once more by itself.
                return
            print(f"hf_zero: rank {_own_rank()} ends too: {reason.splitlines()[0]}", file=sys.stderr, flush=True)
            return
        if isinstance(error, CommunicationError):
            # What the backend said, of addresses, stands in the way of what is wrong.
            error.__cause__, error.__suppress_context__ = None, True
        # Python shows the error's own.
        self._former(kind, error.with_traceback(trace), trace)
        if losses is not None and losses not in [watch.ended for watch in self._watches()]:
            # A late rank has been reported when its wait was ended.
            print(losses, file=sys.stderr, flush=True)

    def _watches(self) -> Iterator[Watch]:
        for reference in self._accelerators:
            accelerator = reference()
            if accelerator is not None:
                yield from watches_of(accelerator)


def _line_of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Keeps only the innermost frame of `__main__`; the whole traceback without one."""
    found = None
    inner = trace
    while inner is not None:
        if inner.tb_frame.f_globals.get("__name__") == "__main__":
            found = TracebackType(None, inner.tb_frame, inner.tb_lasti, inner.tb_lineno)
        inner = inner.tb_next
    return found or trace


def _reason(error: BaseException) -> str | None:
    """Returns the text of an error that hf_zero raised."""
    text = str(error)
    return text if text.startswith("hf_zero") else None


def _is_told_by_the_main_rank(error: BaseException) -> bool:
    """Whether the main rank has the same error, and shows it with its traceback."""
    if _own_rank() == 0:
        return False
    if isinstance(error, ConfigError):
        return True
    return isinstance(error, CommunicationError) and bool(error.culprits) and 0 not in error.culprits


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


# ---- Collectives under torch.profiler: ranges that name them, and no crash where one outlasts the profile ----

_NOTHING = nullcontext()


def shown(does: str, what: object) -> AbstractContextManager:
    """Opens a range "hf_zero: `does` `what`" in a running profile; nothing without one."""
    return profiler.record_function(f"hf_zero: {does} {what}") if profiler._is_profiler_enabled else _NOTHING


def hidden_from_profiler() -> AbstractContextManager:
    """Suppresses profiler events of work that starts inside.

    `shown` ranges stand in their place.
    """
    # gloo's work objects note their end in the event of their start. If the profile has ended in between, as behind its last
    # step, that event is freed memory, and the process crashes then or later.
    return _hidden() if profiler._is_profiler_enabled else _NOTHING


@contextmanager
def _hidden() -> Iterator[None]:
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


# ---- The ledger: collectives by kind, their bytes and seconds ----


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
    def words(self) -> str:
        """What `str` returns, without a call in Python: each collective needs it twice."""
        return f"{self.kind} of {self.subject}"

    def __str__(self) -> str:
        return self.words


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
        self._under_way: defaultdict[str, int] = defaultdict(int)
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
        self.watch.starts[label.words] += 1
        row.bytes_sent += bytes_sent
        row.bytes_between += bytes_between
        # A span that began before timing has no start and is not counted: its bytes would raise the rate.
        if self.is_timed and (kind in self._since or not self._under_way.get(kind)):
            row.timed_bytes += bytes_sent
        return entry

    def began(self, label: Label, entry: list[Any] | None = None) -> list[Any] | None:
        """Notes the start of a collective; returns its entry in the log, for `ended`.

        Args:
            entry: as `count` returned it; None for the last one with this label.
        """
        kind, under_way = label.kind, self._under_way
        if self.is_timed and not under_way[kind]:
            self._since[kind] = self.now()
        under_way[kind] += 1
        return entry or self._log.latest(label)

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
