"""The collectives a rank waits in, and the error of a failed wait."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Lock, get_ident
from time import monotonic
from typing import Any, TypeVar

from ..presence.arrivals import CommunicationError
from ..presence.rank_state import ScriptCollective, script_line
from .collective_log import CollectiveLog, first_line

_Result = TypeVar("_Result")


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

    def leave_reason(self, words: str, culprits: Sequence[int] = ()) -> None:
        """Publishes why this rank gives up, for ranks waiting for this one. Without `culprits`, by its own error."""

    def leave(self, patience_s: float) -> list[int]:
        """Waits for the other ranks to finish as well; returns the unfinished ones."""
        return []


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


class Labels(dict[str, Label]):
    """Maps kinds of collectives on one subject to labels, each made once. Arguments as in `Label`."""

    def __init__(self, *, subject: str, channel: int, holds: str):
        self._of = partial(Label, subject=subject, channel=channel, holds=holds)

    def __missing__(self, kind: str) -> Label:
        label = self[kind] = self._of(kind=kind)
        return label
