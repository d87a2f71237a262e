"""Compare engines step by step on CPU: CPU time, wall time, bytes on the wire, peak memory, and losses bit for bit.

    python scripts/bench/step.py                        # every engine, 30 M parameters, two ranks: a few minutes
    python scripts/bench/step.py --quick                # a tiny model: does the harness run?
    python scripts/bench/step.py --engines fsdp2 hf_zero2 --rounds 9

All engines are alive at once in the same ranks, so memory must hold the sum: 0.5 GB an engine and rank for 30 M
parameters, 2 GB for GPT-2's 124 M. Peak memory is measured apart from that, one engine at a time.

Exits with status 1 if, on two ranks, any engine's loss ever differs from DDP's by a single bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bounds import bounds_for, broken_bounds
from memory import measure_peaks
from peers import ENGINES, USUAL_ENGINES, chosen_engines
from ranks import run_ranks
from rich.console import Console
from rounds import measure_rounds
from summary import EngineSummary, summarise
from table import comparison_table
from workload import WORKLOADS

BENCH_FOLDER = Path(__file__).resolve().parent

# Sums of two terms have one order only; with more ranks an engine may add in another order than DDP's ring.
BITWISE_WORLD_SIZE = 2

TABLE_WIDTH_COLUMNS = 190


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(USUAL_ENGINES), metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--model", choices=WORKLOADS, default="30m")
    parser.add_argument("--ranks", type=int, default=2)
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
        options.engines = chosen_engines(options.engines)
    except ValueError as error:
        parser.error(str(error))
    return options


def measure(options: argparse.Namespace) -> list[EngineSummary]:
    """Run the interleaved rounds, then the memory runs."""
    by_rank = run_ranks(
        measure_rounds,
        world_size=options.ranks,
        time_limit_s=options.time_limit_s,
        keyword_arguments={
            "engine_names": options.engines,
            "workload_name": options.model,
            "fused": options.fused,
            "warmup_steps": options.warmup_steps,
            "rounds": options.rounds,
            "steps": options.steps,
        },
    )
    peaks_bytes = None
    if options.memory:
        peaks_bytes = measure_peaks(
            options.engines,
            workload_name=options.model,
            fused=options.fused,
            world_size=options.ranks,
            time_limit_s=options.time_limit_s,
        )
    return summarise(by_rank, peaks_bytes)


def describe_run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything needed to judge or to repeat the run."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD") or "none",
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cpu_model": _cpu_model(),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
    }


def _git(*arguments: str) -> str:
    """git's answer, empty where there is no repository or no commit yet."""
    return subprocess.run(["git", "-C", BENCH_FOLDER, *arguments], capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown"


def main() -> int:
    options = parse_options()
    summaries = measure(options)
    run = describe_run(options)
    title = (
        f"{options.model} model, {options.ranks} ranks, medians of {options.rounds} rounds of {options.steps} steps, "
        f"commit {run['commit']}, torch {run['torch']}, {run['cpu_model']}"
    )
    console = Console(width=TABLE_WIDTH_COLUMNS)
    bounds = bounds_for(options.model)
    console.print(comparison_table(summaries, bounds, title))
    path = options.json or BENCH_FOLDER / "results" / f"step-{run['commit']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    broken = {s.name: broken_bounds(s, bounds[s.name]) for s in summaries if s.name in bounds}
    figures = {"engines": [asdict(summary) for summary in summaries], "broken_bounds": broken}
    path.write_text(json.dumps(run | figures, indent=2) + "\n")
    console.print(f"written to {path}")
    differing = [summary.name for summary in summaries if summary.loss_difference != 0.0]
    if differing and options.ranks == BITWISE_WORLD_SIZE:
        console.print(f"losses are not DDP's bit for bit: {', '.join(differing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
