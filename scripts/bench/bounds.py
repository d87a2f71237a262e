"""What this package's engine promises against DDP, and whether a run kept it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The highest ratio to DDP that is allowed, for CPU time, bytes sent and peak memory."""

    cpu_ratio: float
    sent_ratio: float
    peak_ratio: float


# Stages 1 and 2 promise no more CPU time than DDP, its bytes (a bucket's framing and the agreements are on top of the
# payload) and less memory. Stage 0 is DDP's equal within what medians of paired rounds move on a busy machine.
# Stage 3 gathers parameters twice and reduces gradients once, 3 x (W-1)/W of their bytes where DDP moves 2, and promises
# less memory than FSDP2, which holds two thirds of DDP's on these models.
BOUNDS = {
    "hf_zero0": Bound(cpu_ratio=1.05, sent_ratio=1.02, peak_ratio=1.05),
    "hf_zero1": Bound(cpu_ratio=1.00, sent_ratio=1.02, peak_ratio=1.00),
    "hf_zero2": Bound(cpu_ratio=1.00, sent_ratio=1.02, peak_ratio=1.00),
    "hf_zero3": Bound(cpu_ratio=1.05, sent_ratio=1.53, peak_ratio=0.67),
}


def bounds_for(workload_name: str) -> dict[str, Bound]:
    """The bounds by engine; none for the tiny model, whose steps are all fixed costs."""
    return {} if workload_name == "tiny" else BOUNDS


def broken_bounds(workload_name: str, engines: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Engine -> each limit that it did not keep, in words; empty where it kept all that was measured."""
    bounds = bounds_for(workload_name)
    return {each["name"]: _broken(each, bounds[each["name"]]) for each in engines if each["name"] in bounds}


def _broken(engine: dict[str, Any], bound: Bound) -> list[str]:
    checks = [
        *(
            (what, engine[ratio]["median"], limit)
            for what, ratio, limit in (("CPU", "cpu_ratio", bound.cpu_ratio), ("wire", "sent_ratio", bound.sent_ratio))
            if ratio in engine
        ),
        ("peak", engine.get("peak_ratio"), bound.peak_ratio),
    ]
    return [f"{what} {ratio:.3f} > {limit:.2f}" for what, ratio, limit in checks if ratio is not None and ratio > limit]
