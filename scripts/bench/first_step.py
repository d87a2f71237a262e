"""The time of a run until its first step: a Trainer with plain DDP and with each stage, in fresh ranks, in turns.

    python scripts/bench/first_step.py            # 30 M parameters, two ranks, eight rounds: three minutes
    python scripts/bench/first_step.py --quick    # a tiny model, once: does the harness run?

The measured time begins after the script's own imports of torch and transformers: the import of hf_zero, the Trainer, the engine
with its table of planned memory, and one step of 16 tokens. Figures are the wall-clock seconds until the slowest rank is done,
and the CPU time of the rank with the highest. Parts are the CPU time of rank 0 in the imports, the forecast of the peak, the
trials of optimizers, the engine (with the trials), the exchanges of values between ranks, and Python's garbage collections
anywhere.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import tempfile
from collections.abc import Callable
from statistics import median
from typing import Any

import torch.distributed as dist
from engines import WORKLOADS, make_trainer
from harness import Clocks, on_ranks, read_options
from ranks import PRELOADED_MODULES
from tables import show_and_keep

ENGINES: dict[str, int | None] = {"DDP": None} | {f"stage {stage}": stage for stage in (1, 2, 3)}

ALLOWED_S = 1.0
"""Largest delay of a stage's first step behind DDP's."""


ALLOWED_CPU = 1.10
"""Largest CPU time of a stage's first step in proportion to DDP's."""

PARTS = ("imports", "forecast", "trials", "engine", "agreement", "collections")


def first_step(rank: int, world_size: int, **arguments: Any) -> dict[str, float]:
    # The ranks' server has frozen its imports, but a user's script has its imports in Python's collections.
    gc.unfreeze()
    clocks, parts = Clocks(), dict.fromkeys(PARTS, 0.0)
    gc.callbacks.append(_timing_collections(parts))
    if arguments["stage"] is not None:
        _time_parts(parts)
    make_trainer(rank, world_size, **arguments).train()
    spent = clocks.spent()
    dist.barrier()
    return {"seconds": spent.wall_s, "cpu_seconds": spent.cpu_s, **parts}


def _time_parts(parts: dict[str, float]) -> None:
    """Makes the imports of a run at a stage, and adds up the CPU time of the parts from now on."""
    clocks = Clocks()
    from hf_zero import ZeroCallback  # noqa: F401
    from hf_zero.comm.control import Control
    from hf_zero.engine import division
    from hf_zero.engine.engine import ZeroEngine
    from hf_zero.integrations import accelerator

    parts["imports"] = clocks.spent().cpu_s
    owners = {
        "trials": (division, "find_scope"),
        "engine": (ZeroEngine, "__init__"),
        "agreement": (Control, "exchange"),
        # On the host, log level INFO asks for it. Includes the import of the planner.
        "forecast": (accelerator, "peak_at_start"),
    }
    for part, (owner, name) in owners.items():
        setattr(owner, name, _timed(parts, part, getattr(owner, name)))


def _timing_collections(parts: dict[str, float]) -> Callable[[str, Any], None]:
    clocks = Clocks()

    def note(phase: str, _info: Any) -> None:
        nonlocal clocks
        if phase == "start":
            clocks = Clocks()
        else:
            parts["collections"] += clocks.spent().cpu_s

    return note


def _timed(parts: dict[str, float], part: str, function: Any) -> Any:
    @functools.wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        clocks = Clocks()
        made = function(*arguments, **named)
        parts[part] += clocks.spent().cpu_s
        return made

    return timed


def measure(model: str, ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns engine → figure → its value in each round; for parts, rank 0's."""
    figures = ("seconds", "cpu_seconds", *PARTS)
    rows: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in figures} for name in ENGINES}
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        for number in range(rounds):
            # Use a different order each time: a process leaves free memory in small or huge pages to the next one.
            for name in random.Random(number).sample(list(ENGINES), len(ENGINES)):
                by_rank = on_ranks(first_step, ranks, limit_s=300, model=model, stage=ENGINES[name], folder=folder)
                for what, values in rows[name].items():
                    values.append(by_rank[0][what] if what in PARTS else max(figures[what] for figures in by_rank))
    return rows


def summarize(rows: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Makes a row per engine: medians, and the delay behind DDP in the median round."""
    plain = rows["DDP"]
    return [
        {
            "name": name,
            **{what: median(values) for what, values in row.items()},
            **{
                f"{what}_later": median(own - its for own, its in zip(row[what], plain[what]))
                for what in ("seconds", "cpu_seconds")
            },
            "cpu_to_ddp": median(own / its for own, its in zip(row["cpu_seconds"], plain["cpu_seconds"])),
        }
        for name, row in rows.items()
    ]


def main() -> int:
    quick = {"model": "tiny", "rounds": 1}
    options = read_options(__doc__, quick=quick, model=("30m", None, WORKLOADS), ranks=2, rounds=8)
    PRELOADED_MODULES.append("transformers.trainer")
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        # Measure imports from compiled bytecode, as in a user's second run. Python reads this variable only when it starts.
        os.execv(sys.executable, [sys.executable, *sys.argv])
    measure("tiny", 1, 1)
    rounds = measure(options.model, options.ranks, options.rounds)
    figures = {"kind": "first_step", "model": options.model, "engines": summarize(rounds), "rounds": rounds}
    show_and_keep("first_step", options, figures)
    for row in figures["engines"]:
        parts = ", ".join(f"{part} {row[part]:.2f} s" for part in PARTS)
        over = "" if row["cpu_to_ddp"] <= ALLOWED_CPU else f" > {ALLOWED_CPU}"
        print(f"{row['name']}: CPU time {row['cpu_to_ddp']:.2f} of DDP's{over}; {parts}")
    late = [row["name"] for row in figures["engines"] if row["seconds_later"] > ALLOWED_S]
    if late and not options.quick:
        print(f"more than {ALLOWED_S:g} s later than DDP: {', '.join(late)}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
