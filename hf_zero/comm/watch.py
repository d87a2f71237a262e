"""The collectives that this rank waits in, its last ones, and its last error."""

import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..config import ConfigError
from .arrivals import CommunicationError
from .rank_state import ScriptCollective, script_line

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
    if not path or Path(path).exists():
        return bool(path)
    # As torch.distributed.elastic reads it; of the two texts, it shows `py_callstack`.
    extra = {"py_callstack": said, "timestamp": str(int(time.time()))}
    try:
        Path(path).write_text(json.dumps({"message": {"message": summary, "extraInfo": extra}}))
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

    __slots__ = ("_outer", "_thread", "_watch", "end", "failure", "line", "seconds_at_failure", "since_s", "what")

    def __init__(self, what: object, watch: "Watch | None" = None):
        self.what = what
        self.since_s = time.monotonic()
        self.failure: str | None = None
        self.line = ""
        self.seconds_at_failure: float | None = None
        self.end: CommunicationError | None = None
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
        self._thread = threading.get_ident()
        # None, or the wait that this one is a part of.
        self._outer = waits.get(self._thread)
        waits[self._thread] = self
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # A report keeps the wait that has failed, and must not keep the watch: a watchdog's threads end with the last reference
        # to the watchdog.
        watch, self._watch = self._watch, None
        try:
            if isinstance(error, RuntimeError):
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
        ended: what was found of a rank that was late, once waits have been ended for it.
        is_left_by_others: `leave` is called at the end of Python.
        waits: the innermost wait of each thread, by the thread's number.
    """

    def __init__(self):
        self.begun: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self.given_up: Wait | None = None
        self.log = CollectiveLog()
        self.ended: str | None = None
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

    def losses(self) -> str | None:
        """Names the ranks that have ended or given up; None without any."""
        return None

    def leave_reason(self, words: str) -> None:
        """Leaves this process's reason to end for ranks that will miss it."""

    def leave(self, patience_s: float) -> list[int]:
        """Waits for the other ranks to finish too; returns those that have not."""
        return []


# ---- An error that ends a rank: told to the other ranks, to the launcher, and once on the screen ----


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
        if not isinstance(error, CommunicationError):
            # Of a collective that failed, the ranks have told each other.
            # Before the traceback is printed: the others wait for this rank, and may reach their limit meanwhile.
            for watch in self._watches():
                watch.leave_reason(summary.partition("\n")[0])
        losses = self._losses(error)
        said = losses or reason or "".join(traceback.format_exception(kind, error, trace))
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
            print(losses, file=sys.stderr, flush=True)

    def _losses(self, error: BaseException) -> str | None:
        """Names the ranks that have gone, for an error of torch.distributed's own."""
        is_torchs = isinstance(error, RuntimeError) and any(
            Path(frame.filename).name == "distributed_c10d.py" for frame in traceback.extract_tb(error.__traceback__)
        )
        if not is_torchs or isinstance(error, CommunicationError):
            return None
        for watch in self._watches():
            losses = watch.losses()
            if losses is not None and losses.startswith("hf_zero: "):
                return losses
            if losses is not None:
                return f"hf_zero: a collective that the script called by itself failed, for want of a rank: {losses}."
        return None

    def _watches(self) -> Iterator[Watch]:
        for reference in self._accelerators:
            accelerator = reference()
            for engine in accelerator.zero_engines if accelerator is not None else ():
                yield engine.transport.watch


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
