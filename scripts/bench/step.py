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
from pathlib import Path

from bounds import broken_bounds
from compare import Comparison, compare
from peers import ALL_PEERS, ENGINES, USUAL_ENGINES, chosen_engines
from record import BENCH_FOLDER, describe_run, write_record
from reports import report_of
from workload import WORKLOADS

# Sums of two terms have one order only; with more ranks an engine may add in another order than DDP's ring.
BITWISE_WORLD_SIZE = 2


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", nargs="+", default=list(USUAL_ENGINES), metavar="ENGINE", help="all, or " + ", ".join(ENGINES)
    )
    parser.add_argument("--model", choices=WORKLOADS, default="30m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--starts", type=int, default=1, help="of each engine's processes, with so many rounds each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each engine in each round")
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True, help="AdamW's fused kernel")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory")
    parser.add_argument("--time-limit-s", type=float, default=1800, help="for each set of ranks")
    parser.add_argument("--json", type=Path, help="where the figures go (default: results/step-<commit>.json)")
    parser.add_argument("--quick", action="store_true", help="the tiny model, two rounds of two steps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.rounds, options.steps = "tiny", 2, 2
    try:
        options.engines = chosen_engines(ALL_PEERS if options.engines == ["all"] else options.engines)
    except ValueError as error:
        parser.error(str(error))
    return options


def comparison_of(options: argparse.Namespace) -> Comparison:
    return Comparison(
        engines=tuple(options.engines),
        workload=WORKLOADS[options.model],
        world_size=options.ranks,
        accumulation=options.accumulation,
        starts=options.starts,
        rounds=options.rounds,
        steps=options.steps,
        warmup_steps=options.warmup_steps,
        fused=options.fused,
        memory=options.memory,
        time_limit_s=options.time_limit_s,
    )


def main() -> int:
    options = parse_options()
    record = {"kind": "steps"} | compare(comparison_of(options))
    record = describe_run(options) | record | {"broken_bounds": broken_bounds(options.model, record["engines"])}
    path = options.json or BENCH_FOLDER / "results" / f"step-{record['commit']}.json"
    write_record(path, record)
    print(report_of(record))
    print(f"written to {path}")
    differing = [
        each["name"] for each in record["engines"] if each["is_ours"] and each["is_exact"] and each["loss_difference"]
    ]
    if differing and options.ranks == BITWISE_WORLD_SIZE:
        print(f"losses are not DDP's bit for bit: {', '.join(differing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
