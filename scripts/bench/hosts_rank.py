"""One rank of hosts.sh: runs in its own network namespace and on its own core; rank 0 prints the table and keeps the figures."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from peers import USUAL_ENGINES, chosen_engines
from ranks import joined_process_group
from rich.console import Console
from rounds import measure_rounds
from step import describe_run
from summary import summarise
from table import hosts_table
from workload import WORKLOADS

WORLD_SIZE = 2
COLLECTIVE_TIME_LIMIT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store-folder", type=Path, required=True)
    parser.add_argument("--rate", required=True, help="the link's rate, for the table's title")
    parser.add_argument("--engines", nargs="+", default=list(USUAL_ENGINES))
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with joined_process_group(options.rank, WORLD_SIZE, options.store_folder, COLLECTIVE_TIME_LIMIT_S):
        figures = measure_rounds(
            options.rank,
            WORLD_SIZE,
            engine_names=chosen_engines(options.engines),
            workload_name=options.model,
            fused=True,
            warmup_steps=2,
            rounds=options.rounds,
            steps=options.steps,
        )
    if options.rank == 0:
        title = (
            f"two hosts at {options.rate}, {options.model} model, medians of {options.rounds} x {options.steps} steps"
        )
        summaries = summarise([figures])
        Console(width=100).print(hosts_table(summaries, title))
        if options.json is not None:
            described = describe_run(options) | {"engines": [asdict(each) for each in summaries]}
            options.json.write_text(json.dumps(described, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
