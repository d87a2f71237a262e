"""What a GPU does in a step: how long it is busy, how long it communicates, and how much of that lies behind other work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class DeviceTrace:
    """Milliseconds of a step on the device.

    Attributes:
        busy_ms: in which any kernel or copy runs.
        comm_ms: in which a kernel of NCCL runs.
        hidden_ms: of those, the ones in which a kernel that is not NCCL's runs, too.
    """

    busy_ms: float
    comm_ms: float
    hidden_ms: float


def trace_of(run: Callable[[], object], steps: int) -> DeviceTrace:
    """Traces `run`, which takes so many steps on the current CUDA device."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        run()
        torch.cuda.synchronize()
    events = [event for event in traced.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
    return summarise(spans, steps)


def summarise(spans: Iterable[tuple[str, Span]], steps: int) -> DeviceTrace:
    """`spans`: name, begin and end in microseconds of all that ran on the device in so many steps."""
    comm, other = [], []
    for name, span in spans:
        (comm if "nccl" in name.lower() else other).append(span)
    comm, other = united(comm), united(other)
    scale = 1e-3 / steps
    both = length(comm) + length(other) - length(united([*comm, *other]))
    return DeviceTrace(
        busy_ms=scale * length(united([*comm, *other])), comm_ms=scale * length(comm), hidden_ms=scale * both
    )


def united(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def length(spans: Iterable[Span]) -> float:
    """Of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)
