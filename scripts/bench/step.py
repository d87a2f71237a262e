"""Compare engines step by step on CPU: CPU time, wall time, bytes on the wire, peak memory, and losses bit for bit.

    python scripts/bench/step.py                        # every engine, 30 M parameters, two ranks: a few minutes
    python scripts/bench/step.py --quick                # a tiny model: does the harness run?
    python scripts/bench/step.py --engines fsdp2 hf_zero2 --rounds 9
    python scripts/bench/step.py --engines all          # and the peers that are installed, and every variant

Each engine has processes of its own, one a rank. They wait while another engine trains; engines that do not fit in memory
together are measured in groups, each with DDP. Peak memory is measured apart from that, one engine at a time.

Exits with status 1 if, on two ranks, a loss of hf_zero's ever differs from DDP's by a single bit where nothing is rounded.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from compare import Comparison, compare
from engines import ENGINES, USUAL_ENGINES, WORKLOADS, chosen_engines
from harness import read_options
from tables import show_and_keep

# Sums of two terms have one order only; with more ranks an engine may add in another order than DDP's ring.
BITWISE_WORLD_SIZE = 2

# Engine → the highest ratio to DDP of CPU time, bytes sent and peak memory. Stages 1 and 2 promise no more CPU time than DDP,
# its bytes (a bucket's framing and the agreements are on top of the payload) and less memory. Stage 0 is DDP's equal within
# what medians of paired rounds move on a busy machine. Stage 3 gathers parameters twice and reduces gradients once,
# 3 x (W-1)/W of their bytes where DDP moves 2, and promises less memory than FSDP2, which holds two thirds of DDP's.
BOUNDS = {
    "hf_zero0": (1.05, 1.02, 1.05),
    "hf_zero1": (1.00, 1.02, 1.00),
    "hf_zero2": (1.00, 1.02, 1.00),
    "hf_zero3": (1.05, 1.53, 0.67),
}


def broken_bounds(model: str, engines: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Engine -> each limit that it did not keep, in words; nothing of the tiny model, whose steps are all fixed costs."""
    if model == "tiny":
        return {}
    return {each["name"]: list(_broken(each)) for each in engines if each["name"] in BOUNDS}


def _broken(row: dict[str, Any]) -> Any:
    ratios = [row.get(name, {}).get("median") for name in ("cpu_ratio", "sent_ratio")]
    for what, ratio, limit in zip(("CPU", "wire", "peak"), (*ratios, row.get("peak_ratio")), BOUNDS[row["name"]]):
        if ratio is not None and ratio > limit:
            yield f"{what} {ratio:.3f} > {limit:.2f}"


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    options = read_options(
        __doc__,
        arguments,
        quick={"model": "tiny", "rounds": 2, "steps": 2},
        engines=(list(USUAL_ENGINES), "all, or " + ", ".join(ENGINES)),
        model=("30m", None, WORKLOADS),
        ranks=2,
        accumulation=(1, "micro-batches a step"),
        starts=(1, "of each engine's processes, with so many rounds each"),
        rounds=5,
        steps=(3, "steps of each engine in each round"),
        warmup_steps=2,
        fused=(True, "AdamW's fused kernel"),
        memory=(True, "measure peak memory"),
        time_limit_s=(1800.0, "for each set of ranks"),
    )
    options.engines = chosen_engines(options.engines)
    return options


def main() -> int:
    options = parse_options()
    settings = {name: value for name, value in vars(options).items() if name in Comparison.__dataclass_fields__}
    settings |= {"engines": tuple(options.engines), "workload": WORKLOADS[options.model], "world_size": options.ranks}
    found = {"kind": "steps"} | compare(Comparison(**settings))
    found["broken_bounds"] = broken_bounds(options.model, found["engines"])
    show_and_keep("step", options, found)
    differing = [
        row["name"] for row in found["engines"] if row["is_ours"] and row["is_exact"] and row["loss_difference"]
    ]
    if differing and options.ranks == BITWISE_WORLD_SIZE:
        print(f"losses are not DDP's bit for bit: {', '.join(differing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
