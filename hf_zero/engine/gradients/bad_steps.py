"""What is done about a step whose gradients are NaN or infinite: the run stops, or the step is skipped."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from ...config import ZeroConfig
from .nonfinite import NonFiniteGradientError

_log = logging.getLogger(__name__)


class BadSteps(ABC):
    """Chosen once for an engine. The ranks find the same norm, and so come to the same answers.

    Attributes:
        skipped: steps that were not taken.
        was_skipped: whether the last step was not taken.
    """

    skipped = 0
    was_skipped = False

    @abstractmethod
    def found(self, norm: float, said: Callable[[], str]) -> None:
        """Called when the gradients of the coming step have a norm that is not finite.

        Args:
            said: where it comes from, in sentences. Collective.

        Raises:
            NonFiniteGradientError: the run is to end.
        """

    @abstractmethod
    def forget(self) -> None:
        """Called behind each backward: the gradients are others."""

    @property
    @abstractmethod
    def skips(self) -> bool:
        """Whether the step that is about to be taken is to be skipped."""

    @property
    @abstractmethod
    def has_skipped(self) -> bool:
        """Whether another optimizer of this engine has come to the same step, and skipped it."""

    @abstractmethod
    def skip(self) -> None:
        """Called in a step that is skipped, when its gradients have been dropped."""

    @abstractmethod
    def taken(self) -> None:
        """Called behind each step that was taken."""


class Stop(BadSteps):
    """The run ends."""

    skips = has_skipped = False

    def forget(self) -> None:
        """There is no next step."""

    def skip(self) -> None:
        """None is."""

    def taken(self) -> None:
        """All are."""

    def found(self, norm: float, said: Callable[[], str]) -> None:
        raise NonFiniteGradientError(
            f"hf_zero: the gradient norm is {norm}: a gradient is NaN or infinite, so this step is refused and the "
            f"parameters stay as they were. {said()}Usual reasons: a learning rate too high, a NaN in the data, log or "
            "division of zero in the loss. `nonfinite: skip` in the hf_zero config leaves such steps out and goes on; to "
            "step all the same, set `nonfinite: ignore`."
        )


class Skip(BadSteps):
    """The step is left out, and its gradients are dropped.

    Args:
        limit: bad steps in a row that are left out; one more ends the run.
        speaks: whether this rank tells of them.
    """

    def __init__(self, limit: int, *, speaks: bool):
        self._limit = limit
        self._speaks = speaks
        self._in_a_row = 0
        self._is_bad = False
        self._has_skipped = False

    def found(self, norm: float, said: Callable[[], str]) -> None:
        if self._is_bad:
            # Measured again, after a clip of some of the parameters.
            return
        self._is_bad = True
        self._in_a_row += 1
        where = said()
        if self._in_a_row > self._limit:
            raise NonFiniteGradientError(
                f"hf_zero: the gradient norm is {norm}, and {self._limit} bad steps in a row have been left out before "
                f"(`nonfinite_limit`). {where}The model is likely to be beyond repair: resume from a checkpoint with a lower "
                "learning rate, or without the data that brings this."
            )
        # The 1st, 2nd, 4th, 8th...: a run with thousands of them is not to drown in them.
        count = self.skipped + 1
        if self._speaks and count & (count - 1) == 0:
            _log.warning(
                "hf_zero: the gradient norm is %s: this step is skipped and its gradients are dropped (`nonfinite: skip`; %d so "
                "far). %s",
                norm,
                count,
                where,
            )

    def forget(self) -> None:
        self._is_bad = self._has_skipped = False

    @property
    def skips(self) -> bool:
        return self._is_bad

    @property
    def has_skipped(self) -> bool:
        return self._has_skipped

    def skip(self) -> None:
        self.skipped += 1
        self.was_skipped = self._has_skipped = True

    def taken(self) -> None:
        self.was_skipped = False
        self._in_a_row = 0


def choose_bad_steps(config: ZeroConfig, *, speaks: bool) -> BadSteps:
    """By `nonfinite`."""
    if config.nonfinite == "skip":
        return Skip(config.nonfinite_limit, speaks=speaks)
    return Stop()
