"""Which set-up fits, which of those is fastest, and why, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import PlanError
from .forecast import DDP, Forecast
from .simulate import StepTime


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes that a rank may take. None: not limited, as far as is known.

    Attributes:
        host: for each rank of a node. `disk` likewise.
        margin: the part of the device that a forecast leaves free.
    """

    device: int
    host: int | None = None
    disk: int | None = None
    margin: float = 0.08


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

    def lacks(self, room: Room) -> str | None:
        """What is too small for it, in words; None where it fits."""
        needs = (
            ("the device", self.forecast.device_bytes, int(room.device * (1 - room.margin))),
            ("host memory", max(self.forecast.host_bytes, 0), room.host),
            ("the disk", self.forecast.disk_bytes, room.disk),
        )
        for what, needed, there in needs:
            if there is not None and needed > there:
                return f"{what}: {size(needed)} of {size(there)}"
        return None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a planner recommends.

    Attributes:
        candidate: the recommended one; None where nothing fits.
        rejected: the one before it in speed that does not fit, if any.
        why: lines.
    """

    candidate: Candidate | None
    rejected: Candidate | None
    why: tuple[str, ...]


_SIMPLER = 0.03
"""A step that is so much shorter is no reason for a higher stage or another tier."""


def size(nbytes: float) -> str:
    """In words: 12.3 MB, 4.56 GB."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e9 else f"{gb(nbytes)} GB"


def gb(nbytes: float) -> str:
    """A number of GB."""
    return f"{nbytes / 1e9:.2f}" if nbytes < 10e9 else f"{nbytes / 1e9:.1f}"


def choose(candidates: Sequence[Candidate], room: Room) -> Choice:
    """The fastest that fits; of those as fast as it, the one that stands first: the simplest.

    Raises:
        PlanError: there is nothing to choose from.
    """
    if not candidates:
        raise PlanError("hf_zero: no set-up goes with the settings that are kept.")
    fitting = [each for each in candidates if each.lacks(room) is None]
    if not fitting:
        least = min(candidates, key=lambda each: each.forecast.device_bytes)
        return Choice(candidate=None, rejected=least, why=_nothing_fits(least, room))
    quickest = min(_seconds(each) for each in fitting)
    chosen = next(each for each in fitting if _seconds(each) <= quickest * (1 + _SIMPLER))
    too_large = [each for each in candidates if each.lacks(room) is not None]
    simpler = candidates[: candidates.index(chosen)]
    rejected = next((each for each in reversed(simpler) if each in too_large), None)
    return Choice(candidate=chosen, rejected=rejected, why=_reasons(chosen, rejected, fitting, room))


def _seconds(candidate: Candidate) -> float:
    return candidate.step.step_s if candidate.step is not None else 0.0


def _reasons(
    chosen: Candidate, rejected: Candidate | None, fitting: Sequence[Candidate], room: Room
) -> tuple[str, ...]:
    free = room.device - chosen.forecast.device_bytes
    name = f"{chosen.name} fits and is fastest" if len(fitting) > 1 else f"{chosen.name} is all that fits"
    lines = [f"{name}: {size(chosen.forecast.device_bytes)} of {size(room.device)} a rank, {size(free)} to spare."]
    if rejected is not None:
        lines.append(f"{rejected.name} does not fit {rejected.lacks(room)}.")
    slower = [each for each in fitting if each is not chosen and each.step is not None]
    if slower and chosen.step is not None:
        other = min(slower, key=lambda each: each.forecast.device_bytes)
        if other.forecast.device_bytes < chosen.forecast.device_bytes:
            lines.append(
                f"Less memory: {other.name} needs {size(other.forecast.device_bytes)}, with a step of "
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
        f"Nothing fits. The least is {least.name}, which lacks {least.lacks(room)}.",
        f"Most of that are {largest}: {size(device[largest])}. {remedy}",
    )
