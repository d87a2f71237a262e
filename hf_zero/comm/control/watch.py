"""What this rank waits in, and the error that names it where the wait fails."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ..groups.failures import CommunicationError
from .collective_log import CollectiveLog
from .whereabouts import script_line

SAVE = "save"
"""Where training is in a save, and the kind of collective that a save is as a whole."""


class ScriptCollective(str):
    """The name of a function of torch.distributed that the script called by itself."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"script's own torch.distributed.{self[:]}"


class Wait:
    """A collective that a thread of this rank is starting or waiting for.

    Attributes:
        what: names it in words.
        since_s: on the monotonic clock.
        failure, line: why it failed, once it has, and the line of the script that it failed in.
        end: the error that it is to fail with; set before it has failed where a rank is late.
    """

    __slots__ = ("end", "failure", "line", "seconds_at_failure", "since_s", "what")

    def __init__(self, what: object):
        self.what = what
        self.since_s = time.monotonic()
        self.failure: str | None = None
        self.line = ""
        self.seconds_at_failure: float | None = None
        self.end: CommunicationError | None = None

    @property
    def holds(self) -> str:
        """The module or the parameters of its bucket, in words; empty where it is of no bucket."""
        return getattr(self.what, "holds", "")

    @property
    def name(self) -> str:
        """Of the collective; of one that the script called by itself, torch's function."""
        return self.what[:] if isinstance(self.what, ScriptCollective) else str(self.what)

    @property
    def is_of_script(self) -> bool:
        """Whether it is a collective of torch.distributed that the script called by itself."""
        return isinstance(self.what, ScriptCollective)

    @property
    def kind(self) -> str | None:
        """Of a collective of training; None of others."""
        return getattr(self.what, "kind", None)

    @property
    def seconds(self) -> float:
        """How long it has taken, up to its failure."""
        return time.monotonic() - self.since_s if self.seconds_at_failure is None else self.seconds_at_failure

    def fail(self, error: RuntimeError) -> None:
        """Notes why and where it failed."""
        if self.failure is None:
            self.seconds_at_failure = self.seconds
            self.failure = str(error).strip().partition("\n")[0].removeprefix("hf_zero: ")
            self.line = script_line()[0]


class Watch:
    """Knows what this rank's threads wait in.

    Attributes:
        begun: how often each kind of collective has been started on this rank.
        starts: how often each collective has been, by its name.
        given_up: the last wait that failed.
        log: the last collectives.
        ended: what was found of a rank that was late, once waits have been ended for it.
        is_left_by_others: `leave` is called at the end of Python.
    """

    def __init__(self):
        self.begun: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self.given_up: Wait | None = None
        self.log = CollectiveLog()
        self.ended: str | None = None
        self.is_left_by_others = False
        # By thread.
        self._inside: dict[int, Wait] = {}

    def inside(self, what: object) -> AbstractContextManager[Wait]:
        """For the duration of a wait: what a backend raises becomes a `CommunicationError` that names the wait.

        Args:
            what: a `Label`, or words.
        """
        return _Inside(self, self._inside, what)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """For the duration of a save, which all ranks have to come to; one inside another is a part of it."""
        if self.log.site == SAVE:
            yield
            return
        self.begun[SAVE] += 1
        with self.log.at(SAVE):
            yield

    def kind_of(self, wait: Wait) -> str | None:
        """Of a collective of training, or of a save that a wait is a part of; None of others."""
        return wait.kind or (SAVE if self.log.site == SAVE else None)

    def fail(self, wait: Wait, error: RuntimeError) -> None:
        """Notes that a wait has failed."""
        wait.fail(error)
        self.given_up = wait

    @property
    def longest(self) -> Wait | None:
        """The oldest wait of this rank that has not ended."""
        return min(list(self._inside.values()), key=lambda wait: wait.since_s, default=None)

    def explain(self, wait: Wait, error: RuntimeError) -> CommunicationError:
        """The error of a wait that failed."""
        return CommunicationError(
            f"hf_zero: the {wait.what} failed: {wait.failure}\nA peer ended, or did not reach this collective in time. Look at "
            "the first rank that stopped: its own error is the reason."
        )

    def losses(self) -> str | None:
        """The ranks that have ended, have come to their end or have given up, in words; None where there are none."""
        return None

    def say_last(self, words: str) -> None:
        """Leaves a reason for the end of this process to ranks that will miss it."""

    def leave(self, patience_s: float) -> list[int]:
        """Waits for the other ranks to come to their end too; returns those that have not."""
        return []


class _Inside(AbstractContextManager):
    """One wait of one thread. Not by a generator: each collective of a step makes two of these."""

    __slots__ = ("_outer", "_thread", "_wait", "_waits", "_watch")

    def __init__(self, watch: Watch, waits: dict[int, Wait], what: object):
        self._watch, self._waits, self._wait = watch, waits, Wait(what)
        self._thread = threading.get_ident()

    def __enter__(self) -> Wait:
        # None, or the wait that this one is a part of.
        self._outer = self._waits.get(self._thread)
        self._waits[self._thread] = self._wait
        return self._wait

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if isinstance(error, RuntimeError):
                self._watch.fail(self._wait, error)
                if not isinstance(error, CommunicationError):
                    raise self._watch.explain(self._wait, error) from error
        finally:
            if self._outer is None:
                self._waits.pop(self._thread, None)
            else:
                self._waits[self._thread] = self._outer
