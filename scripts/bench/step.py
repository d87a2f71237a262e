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

from compare import Comparison, compare
from engines import ENGINES, USUAL_ENGINES, WORKLOADS, chosen_engines
from harness import read_options
from tables import show_and_keep

# Sums of two terms have one order only; with more ranks an engine may add in another order than DDP's ring.
BITWISE_WORLD_SIZE = 2


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
