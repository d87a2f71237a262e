"""One rank of hosts.sh: runs in its own network namespace and on its own core; rank 0 prints the table and keeps the figures."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from peers import USUAL_ENGINES, chosen_engines
from ranks import joined_process_group
from record import describe_run, write_record
from reports import links
from rounds import measure_rounds
from shaped_links import record_of, runs_in
from summary import summarise_ranks
from workload import WORKLOADS

WORLD_SIZE = 2
COLLECTIVE_TIME_LIMIT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store-folder", type=Path, required=True)
    parser.add_argument("--rate", required=True, help="the link's rate, for the table's title")
    parser.add_argument("--delay", default="0ms", help="of the link, one way")
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
        record = describe_run(options) | {"engines": [asdict(each) for each in summarise_ranks([figures])]}
        print(
            f"two hosts at {options.rate}, {options.model} model, medians of {options.rounds} x {options.steps} steps"
        )
        print(links(record_of(runs_in(record)))["links"])
        if options.json is not None:
            write_record(options.json, record)


if __name__ == "__main__":
    main()
