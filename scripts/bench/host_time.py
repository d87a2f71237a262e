"""The host's cost of a step with almost no arithmetic: 12 layers of BERT, 32 wide, clipped, two ranks.

    python scripts/bench/host_time.py                   # a minute
    python scripts/bench/host_time.py --engines hf_zero2 --rounds 9
    python scripts/bench/host_time.py --quick           # two layers: does the harness run?

On an accelerator such a step is launch-bound: the device waits for Python. Here there is almost no arithmetic, so the remaining
cost is Python and the dispatch of operations, for the model and for the engine around it. The figure is the CPU time of all
threads of the process. Next to it is the CPU time of the Python thread: on the CPU, gloo's threads send and receive with the
host's own time, unlike on an accelerator. All engines exist at the same time in the same ranks, and are visited in turns.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

from compare import loss_difference, measure_rounds
from engines import BASELINE, ENGINES, MAX_NORM, Classifier, chosen_engines
from harness import on_ranks, read_options
from tables import show_and_keep

USUAL = ("ddp", "fsdp2", "hf_zero0", "hf_zero1", "hf_zero2", "hf_zero3")

# Engine → (the ratio, its limit). Stages 1 and 2 replace DDP, and stage 3 replaces FSDP2.
GOALS = {"hf_zero1": ("to_ddp", 1.05), "hf_zero2": ("to_ddp", 1.05), "hf_zero3": ("to_fsdp2", 0.4)}


def summarize(by_rank: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Makes a row per engine: medians over rounds of a rank's CPU time per step, and of its ratio to a peer in the same round.

    `thread_` figures are for the Python thread; `loss_difference` is the largest difference to DDP's.
    """
    rounds = {name: list(zip(*(rank[name]["visits"] for rank in by_rank))) for name in by_rank[0]}
    rows = {
        name: {
            "name": name,
            "wall_ms": median(max(visit["wall_ms"] for visit in visits) for visits in rounds[name]),
            "loss_difference": loss_difference([r[name] for r in by_rank], [r[BASELINE] for r in by_rank]),
        }
        for name in rounds
    }
    for figure, prefix in (("cpu_ms", ""), ("thread_ms", "thread_")):
        means = {n: [sum(v[figure] for v in visits) / len(visits) for visits in each] for n, each in rounds.items()}
        for name, row in rows.items():
            row[figure] = median(means[name])
            for peer in (BASELINE, "fsdp2"):
                ratios = [own / its for own, its in zip(means[name], means.get(peer, ()))]
                row[f"{prefix}to_{peer}"] = median(ratios) if ratios else None
    return list(rows.values())


def missed_goals(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Returns engine → its distance to its goal, for engines that miss the goal and whose peer was measured."""
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
    given = {name: getattr(options, name) for name in ("engines", "warmup_steps", "rounds", "steps")}
    job = given | {"workload": Classifier(n_layer=options.n_layer), "max_norm": MAX_NORM}
    rows = summarize(on_ranks(measure_rounds, options.ranks, limit_s=options.time_limit_s, **job))
    # With two layers, fixed costs dominate, so goals are not checked.
    figures = {"kind": "host_time", "engines": rows, "missed": {} if options.quick else missed_goals(rows)}
    show_and_keep("host_time", options, figures)
    print(*(f"goal missed: {name}, {far}" for name, far in figures["missed"].items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
