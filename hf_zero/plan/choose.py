"""Which set-up fits, which of those is fastest, and why, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import PlanError
from .forecast import DDP, Forecast
from .room import CLOSE, FITS, TOO_LARGE, Room, size
from .simulate import StepTime


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A set-up with what it needs and how long its step takes; `step` is None where that is not known."""

    forecast: Forecast
    step: StepTime | None = None

    @property
    def name(self) -> str:
        return self.forecast.name

    @property
    def is_exactly_stage_0(self) -> bool:
        """DDP, or stage 0 by this engine, which shards nothing either."""
        return self.name == DDP or self.forecast.settings.get("stage") == 0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a planner recommends.

    Attributes:
        candidate: the recommended one; None where all are too large.
        rejected: the fastest of those that are too large, if any; where all are, the one that needs least.
        close: the fastest of those that are close and not recommended, if any.
        has_others: others fit, too.
        why: lines.
    """

    candidate: Candidate | None
    rejected: Candidate | None
    close: Candidate | None
    has_others: bool
    why: tuple[str, ...]


_SIMPLER = 0.03
"""A step that is so much shorter is no reason for a higher stage or another tier."""


def choose(candidates: Sequence[Candidate], room: Room) -> Choice:
    """The fastest that fits; of those as fast as it, the one that stands first: the simplest. Where none fits, of those that
    are close the one that needs least.

    Raises:
        PlanError: there is nothing to choose from.
    """
    if not candidates:
        raise PlanError("hf_zero: no set-up goes with the settings that are kept.")
    of_class: dict[str, list[Candidate]] = {FITS: [], CLOSE: [], TOO_LARGE: []}
    for each in candidates:
        of_class[room.fit_of(each.forecast)].append(each)
    fitting, close, too_large = of_class[FITS], of_class[CLOSE], of_class[TOO_LARGE]
    if not fitting and not close:
        least = min(candidates, key=_bytes)
        return Choice(candidate=None, rejected=least, close=None, has_others=False, why=_nothing_fits(least, room))
    if fitting:
        quickest = min(_seconds(each) for each in fitting)
        chosen = next(each for each in fitting if _seconds(each) <= quickest * (1 + _SIMPLER))
    else:
        chosen = min(close, key=_bytes)
    left = [each for each in close if each is not chosen]
    rejected, close_one = min(too_large, key=_speed, default=None), min(left, key=_speed, default=None)
    return Choice(
        candidate=chosen,
        rejected=rejected,
        close=close_one,
        has_others=len(fitting) > 1,
        why=_reasons(chosen, rejected, close_one, fitting, room),
    )


def _bytes(candidate: Candidate) -> int:
    return candidate.forecast.device_bytes


def _seconds(candidate: Candidate) -> float:
    return candidate.step.step_s if candidate.step is not None else 0.0


def _speed(candidate: Candidate) -> tuple[float, int]:
    return _seconds(candidate), _bytes(candidate)


def _reasons(
    chosen: Candidate,
    rejected: Candidate | None,
    close: Candidate | None,
    fitting: Sequence[Candidate],
    room: Room,
) -> tuple[str, ...]:
    needs = f"{size(_bytes(chosen))} of {size(room.device)} a rank"
    if not fitting:
        lines = [f"{chosen.name} may run out of memory: {needs}. Nothing fits, and of what is close it needs least."]
    else:
        name = f"{chosen.name} fits and is fastest" if len(fitting) > 1 else f"{chosen.name} is all that fits"
        lines = [f"{name}: {needs}, {size(room.device - _bytes(chosen))} to spare."]
    lines += [f"{each.name} is {room.describe(each.forecast)}." for each in (close, rejected) if each is not None]
    slower = [each for each in fitting if each is not chosen and each.step is not None]
    if slower and chosen.step is not None:
        other = min(slower, key=_bytes)
        if _bytes(other) < _bytes(chosen):
            lines.append(
                f"Less memory: {other.name} needs {size(_bytes(other))}, with a step of "
                f"{_time(other.step)} in place of {_time(chosen.step)}."
            )
    if chosen.forecast.unknown:
        lines.append(f"Not counted, since not known beforehand: {', '.join(chosen.forecast.unknown)}.")
    return tuple(lines)


def _time(step: Any) -> str:
    return f"{step.step_s:.3g} s" if step is not None else "unknown time"


def _nothing_fits(least: Candidate, room: Room) -> tuple[str, ...]:
    device = least.forecast.device
    largest = max(device, key=lambda kind: device[kind])
    remedies = {
        "activations": "Use fewer rows a micro-batch and more of them, shorter ones, or activation checkpointing.",
        "parameters": "Use more ranks, state and parameters in host memory, or a smaller model.",
    }
    remedy = remedies.get(largest, "Use more ranks, more memory, or state in host memory or in files.")
    return (
        f"Nothing fits. The least is {least.name}, which is {room.describe(least.forecast)}.",
        f"Most of that are {largest}: {size(device[largest])}. {remedy}",
    )
