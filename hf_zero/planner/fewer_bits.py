"""Estimates whether sending gradients and parameters in fewer bits shortens a step on the given links."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..config import ConfigError
from ..device import rounded
from .search import SIMPLER, Machine, StepTime, duration

Timed = Callable[[Mapping[str, Any], Machine], StepTime]
"""Estimates the step of a set-up with these settings on a machine. Raises `ConfigError` if settings exclude each other."""

_WAYS: tuple[Mapping[str, Any], ...] = (
    {"reduce_dtype": "bfloat16"},
    {"comm": {"gradients": "int8"}},
    {"comm": {"gradients": "int8", "weights": "int8"}},
)
"""Settings that send fewer bytes, the most exact first."""

_LEAST_BYTES_A_SECOND = 10e6
"""Rate of a slow home network. If fewer bits do not pay off at this rate, no limit is named."""


def fewer_bits(settings: Mapping[str, Any], machine: Machine, timed: Timed) -> str:
    """Returns a sentence on whether fewer bits pay off, with the underlying estimates; "" if they cannot be tried.

    Args:
        settings: settings of the recommended set-up. Fewer bits need a stage above 0, so for DDP and stage 0 the estimates are
            for stage 1.
        machine: the machine with the links.
        timed: estimates a step.
    """
    stage = {} if settings.get("stage") else {"stage": 1}
    settings = {**settings, **stage}
    if "reduce_dtype" in settings or {"gradients", "weights"} & set(settings.get("comm") or {}):
        return ""
    found = [(way, step) for way in _WAYS if (step := _tried(settings, way, machine, timed)) is not None]
    if not found:
        return ""
    usual_s = timed(settings, machine).step_s
    way, fastest = min(found, key=lambda each: each[1].step_s)
    rate = f"{rounded(_slowest(machine) / 1e9)} GB/s"
    if fastest.step_s < usual_s * (1 - SIMPLER):
        # The first way that is nearly as fast is the most exact one.
        way, step = next(each for each in found if each[1].step_s <= fastest.step_s * (1 + SIMPLER))
        ways = " and ".join(_lines({**stage, **way}))
        return f"Links of {rate}: with {ways}, a step takes {duration(step.step_s)} instead of {duration(usual_s)}."
    limit = _limit(settings, machine, timed)
    below = f"below about {rounded(limit / 1e9, 2)} GB/s they do" if limit else "nor do they on slower ones"
    return f"Links of {rate}: gradients in fewer bits do not pay off; {below}."


def _tried(settings: Mapping[str, Any], way: Mapping[str, Any], machine: Machine, timed: Timed) -> StepTime | None:
    comm = {**(settings.get("comm") or {}), **way.get("comm", {})}
    try:
        return timed({**settings, **way, **({"comm": comm} if comm else {})}, machine)
    except (ConfigError, ValueError):
        return None


def _limit(settings: Mapping[str, Any], machine: Machine, timed: Timed) -> float | None:
    """Returns the rate, in bytes per second, below which fewer bits shorten a step; None if there is no such rate.

    Bisects the rate of all links: on slower links, a larger part of a step is communication.
    """

    def pays(rate: float) -> bool:
        slower = _with_links(machine, rate)
        steps = [_tried(settings, way, slower, timed) for way in _WAYS]
        fastest_s = min(step.step_s for step in steps if step is not None)
        return fastest_s < timed(settings, slower).step_s * (1 - SIMPLER)

    low, high = _LEAST_BYTES_A_SECOND, _slowest(machine)
    if not pays(low):
        return None
    while high > 1.1 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _slowest(machine: Machine) -> float:
    return machine.bytes_a_second(machine.ranks, machine.nodes)


def _with_links(machine: Machine, bytes_a_second: float) -> Machine:
    factor = bytes_a_second / _slowest(machine)
    return replace(
        machine,
        node_bytes_a_second=machine.node_bytes_a_second * factor,
        link_bytes_a_second=machine.link_bytes_a_second * factor,
    )


def _lines(way: Mapping[str, Any]) -> list[str]:
    """Returns the settings as a user writes them, such as "comm.gradients: int8"."""
    flat = {name: value for name, value in way.items() if name != "comm"}
    flat |= {f"comm.{name}": value for name, value in way.get("comm", {}).items()}
    return [f"`{name}: {value}`" for name, value in flat.items()]
