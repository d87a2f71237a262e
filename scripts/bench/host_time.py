"""What a step costs the host where there is next to nothing to compute: 12 layers of BERT, 32 wide, clipped, two ranks.

    python scripts/bench/host_time.py                   # a minute
    python scripts/bench/host_time.py --engines hf_zero2 --rounds 9
    python scripts/bench/host_time.py --quick           # two layers: does the harness run?

On an accelerator such a step is launch-bound: the device waits for Python. Here the arithmetic is nearly nothing, so that
what is left is Python and the dispatch of operations, for the model and for the engine around it. The figure is the
process's CPU time, of all its threads. Beside it is that of the thread that runs Python alone: on the CPU, gloo's threads
send and receive on the host's own time, which they would not do on an accelerator. All engines are alive at once in the
same ranks, and visited in turn.
"""

from __future__ import annotations

import gc
import sys
from statistics import median
from typing import Any

from compare import Station, loss_difference, visit_in_turn
from engines import BASELINE, ENGINES, ClippedSteps, LaunchBound, adamw_arguments, chosen_engines
from harness import describe_run, keep, read_options
from ranks import run_ranks
from tables import report_of

SHARDED_PEER = "fsdp2"
USUAL = ("ddp", "fsdp2", "hf_zero0", "hf_zero1", "hf_zero2", "hf_zero3")

# Engine → (the ratio, the most that it may be). Stages 1 and 2 replace DDP, and stage 3 replaces FSDP2.
GOALS = {"hf_zero1": ("to_ddp", 1.05), "hf_zero2": ("to_ddp", 1.05), "hf_zero3": ("to_fsdp2", 0.4)}


def measure_rounds(
    rank: int, world_size: int, *, engines: list[str], n_layer: int, warmup_steps: int, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """This rank's visits and losses, by engine."""
    workload, stations = LaunchBound(n_layer=n_layer), {}
    for name in engines:
        engine = ENGINES[name](workload.make_model, adamw_arguments(fused=True))
        stations[name] = Station(ClippedSteps(engine), workload, rank)
        stations[name].train(warmup_steps)
    # What an engine leaves to Python's collector is to be its own cost, and not a walk through all models here.
    gc.collect()
    gc.freeze()
    return visit_in_turn(stations, rounds, steps)


def summarise(by_rank: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row an engine: medians over rounds of a rank's CPU time a step, and of its ratio to a peer's in the same round.

    `thread_` figures are of the thread that runs Python; `loss_difference` is the largest from DDP's.
    """
    rounds = {name: list(zip(*(rank[name]["visits"] for rank in by_rank))) for name in by_rank[0]}

    def means(key: str) -> dict[str, list[float]]:
        """Engine → the mean over the ranks, by round."""
        return {n: [sum(v[key] for v in visits) / len(visits) for visits in each] for n, each in rounds.items()}

    def ratio(times: dict[str, list[float]], name: str, peer: str) -> float | None:
        return median(one / other for one, other in zip(times[name], times[peer])) if peer in times else None

    cpu_ms, thread_ms = means("cpu_ms"), means("thread_ms")
    return [
        {
            "name": name,
            "cpu_ms": median(cpu_ms[name]),
            "thread_ms": median(thread_ms[name]),
            "wall_ms": median(max(visit["wall_ms"] for visit in visits) for visits in rounds[name]),
            "to_ddp": ratio(cpu_ms, name, BASELINE),
            "to_fsdp2": ratio(cpu_ms, name, SHARDED_PEER),
            "thread_to_ddp": ratio(thread_ms, name, BASELINE),
            "thread_to_fsdp2": ratio(thread_ms, name, SHARDED_PEER),
            "loss_difference": loss_difference([r[name] for r in by_rank], [r[BASELINE] for r in by_rank]),
        }
        for name in rounds
    ]


def missed_goals(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Engine → how far it is from its goal, for those that miss it and ran beside their peer."""
    missed = {}
    for row in rows:
        to_peer, most = GOALS.get(row["name"], ("to_ddp", float("inf")))
        if row[to_peer] is not None and row[to_peer] > most:
            missed[row["name"]] = f"{row[to_peer]:.3f} of {to_peer.removeprefix('to_')} > {most}"
    return missed


def main() -> int:
    options = read_options(
        __doc__,
        quick={"n_layer": 2, "rounds": 2, "steps": 2},
        engines=(list(USUAL), ", ".join(ENGINES)),
        ranks=2,
        n_layer=12,
        rounds=5,
        steps=(20, "steps of each engine in each round"),
        warmup_steps=5,
        time_limit_s=600.0,
    )
    options.engines = chosen_engines(options.engines)
    arguments = {name: getattr(options, name) for name in ("engines", "n_layer", "warmup_steps", "rounds", "steps")}
    limits = {"world_size": options.ranks, "time_limit_s": options.time_limit_s}
    rows = summarise(run_ranks(measure_rounds, **limits, keyword_arguments=arguments))
    # Of two layers the fixed costs are most.
    figures = {"kind": "host_time", "engines": rows, "missed": {} if options.quick else missed_goals(rows)}
    run = describe_run(options)
    print(report_of(run | figures))
    print(*(f"goal missed: {name}, {far}" for name, far in figures["missed"].items()), sep="\n")
    keep("host_time", run, figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
