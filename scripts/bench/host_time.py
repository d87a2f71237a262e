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

import argparse
import gc
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers import BASELINE, ENGINES, Engine, chosen_engines
from ranks import run_ranks
from record import BENCH_FOLDER, describe_run, write_record
from rich.console import Console
from rich.table import Table
from rounds import Station, visit_in_turn
from transformers import BertConfig, BertForSequenceClassification
from workload import SEED, adamw_arguments

MAX_NORM = 1.0
SHARDED_PEER = "fsdp2"
USUAL = ("ddp", "fsdp2", "hf_zero0", "hf_zero1", "hf_zero2", "hf_zero3")

# Engine → (the peer, the most of its time). Stages 1 and 2 replace DDP, and stage 3 replaces FSDP2.
GOALS = {"hf_zero1": (BASELINE, 1.05), "hf_zero2": (BASELINE, 1.05), "hf_zero3": (SHARDED_PEER, 0.4)}


@dataclass(frozen=True, kw_only=True)
class LaunchBound:
    """A BERT of many small operations, without dropout, so that losses can be compared."""

    n_layer: int = 12
    n_embd: int = 32
    vocab_size: int = 512
    batch_size: int = 4
    sequence_length: int = 16

    def make_model(self) -> BertForSequenceClassification:
        """Build the model; two calls give the same weights."""
        torch.manual_seed(SEED)
        config = BertConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.n_embd,
            num_hidden_layers=self.n_layer,
            num_attention_heads=4,
            intermediate_size=4 * self.n_embd,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForSequenceClassification(config).train()

    def make_batch(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        """Token ids and labels, the same for every engine at one rank and step."""
        generator = torch.Generator().manual_seed(SEED + 1_000_003 * rank + step)
        shape = (self.batch_size, self.sequence_length)
        input_ids = torch.randint(self.vocab_size, shape, generator=generator)
        return {"input_ids": input_ids, "labels": input_ids[:, 0] % 2}


class ClippedSteps:
    """An engine in a training loop that clips the gradient's norm."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.finish, self.waited_ms, self.close = engine.finish, engine.waited_ms, engine.close

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Train on one batch and return its loss on this rank."""
        engine = self._engine
        loss = engine.model(**batch).loss
        loss.backward()
        engine.clip(MAX_NORM)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        return loss.item()


def measure_rounds(
    rank: int,
    world_size: int,
    *,
    engine_names: list[str],
    n_layer: int,
    warmup_steps: int,
    rounds: int,
    steps: int,
) -> dict[str, dict[str, Any]]:
    """This rank's visits and losses, by engine."""
    workload, stations = LaunchBound(n_layer=n_layer), {}
    for name in engine_names:
        engine = ENGINES[name](workload.make_model, adamw_arguments(fused=True))
        stations[name] = Station(ClippedSteps(engine), workload, rank)
        stations[name].train(warmup_steps)
    # What an engine leaves to Python's collector is to be its own cost, and not a walk through all models here.
    gc.collect()
    gc.freeze()
    return visit_in_turn(stations, rounds, steps)


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """One engine's row: medians over rounds of a rank's CPU time a step, and of its ratio to a peer's in the same round.

    `thread_` figures are of the thread that runs Python.
    """

    name: str
    cpu_ms: float
    thread_ms: float
    wall_ms: float
    to_ddp: float
    to_fsdp2: float | None
    thread_to_ddp: float
    thread_to_fsdp2: float | None
    loss_difference: float  # from DDP's, the largest


def summarise(by_rank: list[dict[str, dict[str, Any]]]) -> list[HostTime]:
    """Rows in the order in which the engines ran."""
    rounds = {name: list(zip(*(rank[name]["visits"] for rank in by_rank))) for name in by_rank[0]}

    def means(key: str) -> dict[str, list[float]]:
        """Engine → the mean over the ranks, by round."""
        return {
            name: [sum(visit[key] for visit in visits) / len(visits) for visits in each]
            for name, each in rounds.items()
        }

    cpu_ms, thread_ms = means("cpu_ms"), means("thread_ms")

    def ratio(times: dict[str, list[float]], name: str, peer: str) -> float | None:
        return median(one / other for one, other in zip(times[name], times[peer])) if peer in times else None

    def difference(name: str) -> float:
        pairs = ((rank[name]["losses"], rank[BASELINE]["losses"]) for rank in by_rank)
        return max(abs(one - other) for own, baseline in pairs for one, other in zip(own, baseline, strict=True))

    return [
        HostTime(
            name=name,
            cpu_ms=median(cpu_ms[name]),
            wall_ms=median(max(visit["wall_ms"] for visit in visits) for visits in rounds[name]),
            thread_ms=median(thread_ms[name]),
            to_ddp=ratio(cpu_ms, name, BASELINE),
            to_fsdp2=ratio(cpu_ms, name, SHARDED_PEER),
            thread_to_ddp=ratio(thread_ms, name, BASELINE),
            thread_to_fsdp2=ratio(thread_ms, name, SHARDED_PEER),
            loss_difference=difference(name),
        )
        for name in rounds
    ]


def missed_goals(rows: list[HostTime]) -> dict[str, str]:
    """Engine → how far it is from its goal, for those that miss it and ran beside their peer."""
    missed = {}
    for row in rows:
        peer, most = GOALS.get(row.name, (BASELINE, float("inf")))
        ratio = row.to_ddp if peer == BASELINE else row.to_fsdp2
        if ratio is not None and ratio > most:
            missed[row.name] = f"{ratio:.3f} of {peer} > {most}"
    return missed


def table_of(rows: list[HostTime], missed: dict[str, str], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(
        ("engine", "CPU ms", "of DDP", "of FSDP2", "thread ms", "of DDP", "of FSDP2", "goal", "loss apart")
    ):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        peer, most = GOALS.get(row.name, ("", None))
        goal = "" if most is None else f"{'missed' if row.name in missed else 'kept'}: {most} of {peer}"
        figures = (
            *(f"{row.cpu_ms:.2f}", _ratio(row.to_ddp), _ratio(row.to_fsdp2)),
            *(f"{row.thread_ms:.2f}", _ratio(row.thread_to_ddp), _ratio(row.thread_to_fsdp2)),
        )
        table.add_row(row.name, *figures, goal, f"{row.loss_difference:.1e}")
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(USUAL), metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--n-layer", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps of each engine in each round")
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--time-limit-s", type=float, default=600)
    parser.add_argument("--json", type=Path, help="where the figures go (default: results/host_time-<commit>.json)")
    parser.add_argument("--quick", action="store_true", help="two layers, two rounds of two steps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.n_layer, options.rounds, options.steps = 2, 2, 2
    try:
        options.engines = chosen_engines(options.engines)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    options = parse_options()
    by_rank = run_ranks(
        measure_rounds,
        world_size=options.ranks,
        time_limit_s=options.time_limit_s,
        keyword_arguments={
            "engine_names": options.engines,
            "n_layer": options.n_layer,
            "warmup_steps": options.warmup_steps,
            "rounds": options.rounds,
            "steps": options.steps,
        },
    )
    rows, run = summarise(by_rank), describe_run(options)
    # Of two layers the fixed costs are most.
    missed = {} if options.quick else missed_goals(rows)
    title = (
        f"BERT of {options.n_layer} layers, {options.ranks} ranks, a rank's CPU time a step, medians of {options.rounds} rounds "
        f"of {options.steps} steps, commit {run['commit']}, torch {run['torch']}, {run['cpu_model']}"
    )
    console = Console(width=120)
    console.print(table_of(rows, missed, title))
    path = options.json or BENCH_FOLDER / "results" / f"host_time-{run['commit']}.json"
    write_record(path, run | {"kind": "host_time", "engines": [asdict(row) for row in rows], "missed": missed})
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
