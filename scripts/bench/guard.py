"""Fails where a step costs more beside DDP's and FSDP2's than it did: bytes sent, peak memory, and calls of functions.

    python scripts/bench/guard.py             # compare with results/guard.json: half a minute
    python scripts/bench/guard.py --renew     # the costs of today become the baseline

None of the three is a time, so they come out the same on a busy machine. Each is a ratio to a peer that is measured in the same
run, so they stand for other machines and releases of torch as well. A ratio that has grown by a tenth since the baseline fails.
`tests/repository/test_bench.py` does the same in the short suite.

One engine after another in two ranks: a small BERT in float32, clipped, with next to nothing to compute.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

import ranks
from engines import BASELINE, ENGINES, MAX_NORM, Batch, Classifier, Engine, adamw_arguments
from harness import (
    RESULTS,
    count_events,
    describe_run,
    held_before,
    most_held,
    on_ranks,
    reset_peak,
    spent_in,
    write_record,
)

# Before a rank notes what it holds without a model.
import hf_zero.engine.engine  # noqa: F401

BASELINE_PATH = RESULTS / "guard.json"
LARGEST_GROWTH = 1.10
TIME_LIMIT_S = 120

# 2.2 M parameters: beside those, what a process needs for its own purposes is small.
WORKLOAD = Classifier(n_layer=2, n_embd=256, vocab_size=2048, batch_size=1)
# The first step makes the optimizer's state, and DDP makes its buckets anew after it.
WARMUP_STEPS = 2
STEPS = 2

# Engine → the peers that it is measured against.
PEERS = {"hf_zero0": ("ddp",), "hf_zero1": ("ddp",), "hf_zero2": ("ddp",), "hf_zero3": ("ddp", "fsdp2")}


class Costs(NamedTuple):
    """What a step of one engine costs on a rank.

    Attributes:
        sent_bytes: at the socket, a step.
        peak_bytes: the most resident memory beyond what the process held before there was a model.
        calls: of functions of Python and C, by the thread that runs Python.
    """

    sent_bytes: float
    peak_bytes: float
    calls: float


KINDS = {"sent_bytes": "bytes sent", "peak_bytes": "peak memory", "calls": "calls"}


Makes = dict[str, Callable[..., Engine]]


def costs_on_rank(rank: int, world_size: int, *, makes: Makes) -> dict[str, Costs]:
    """Engine → its costs here, by the function that makes it."""
    # So that the libraries' own pages are there before an engine's memory is measured.
    held_before(trims=True)
    _costs(ENGINES[BASELINE], Classifier(n_layer=1), rank)
    return {name: _costs(make, WORKLOAD, rank) for name, make in makes.items()}


def _costs(make: Callable[..., Engine], workload: Classifier, rank: int) -> Costs:
    before_bytes = held_before(trims=True)
    engine = make(workload.make_model, adamw_arguments(fused=True))
    engine.max_norm = MAX_NORM

    def train(batch: Batch) -> None:
        engine.step(batch)
        engine.finish()

    for step in range(WARMUP_STEPS):
        train(workload.make_batch(rank, step))
    peaks_bytes, sent_bytes = [], []
    for step in range(STEPS):
        batch = workload.make_batch(rank, step)
        reset_peak()
        sent_bytes.append(spent_in(lambda batch=batch: train(batch)).sent_bytes)
        peaks_bytes.append(most_held() - before_bytes)
    events: Counter[str] = Counter()
    count_events(lambda: train(batch), lambda _frame, event: events.update((event,)))
    engine.close()
    calls = events["call"] + events["c_call"]
    return Costs(sent_bytes=median(sent_bytes), peak_bytes=median(peaks_bytes), calls=calls)


def measure_costs(makes: Makes) -> dict[str, Costs]:
    """Engine → its costs on the rank where they are larger, by kind."""
    by_rank = on_ranks(costs_on_rank, 2, limit_s=TIME_LIMIT_S, makes=makes)
    return {
        name: Costs(**{kind: max(getattr(costs[name], kind) for costs in by_rank) for kind in KINDS}) for name in makes
    }


def engines() -> Makes:
    """Every engine that is compared and its peers, by name."""
    peers = [peer for each in PEERS.values() for peer in each]
    return {name: ENGINES[name] for name in dict.fromkeys([*peers, *PEERS])}


def ratios_of(costs: dict[str, Costs]) -> dict[str, float]:
    """ "peak memory of hf_zero3 / fsdp2" → the ratio."""
    return {
        f"{words} of {name} / {peer}": getattr(costs[name], kind) / getattr(costs[peer], kind)
        for name, peers in PEERS.items()
        for peer in peers
        for kind, words in KINDS.items()
    }


def versions() -> dict[str, str]:
    """Of what the costs may depend on beside this package."""
    return {"python": platform.python_version(), "torch": version("torch"), "transformers": version("transformers")}


def grown(now: dict[str, float], baseline: dict[str, Any]) -> str:
    """What to say of the ratios that have grown by a tenth or more since the baseline; empty where none has."""
    was = baseline["ratios"]
    if was.keys() != now.keys():
        return f"{BASELINE_PATH.name} lists other ratios than are measured. {_renewal()}"
    lines = [
        f"  {name}: was {was[name]:.3f}, is {ratio:.3f} ({ratio / was[name] - 1:+.1%})"
        for name, ratio in now.items()
        if ratio >= LARGEST_GROWTH * was[name]
    ]
    if not lines:
        return ""
    others = [f"{name} {found}, then {baseline['versions'][name]}" for name, found in versions().items()]
    apart = "" if versions() == baseline["versions"] else f"\nA peer may have changed, too: {'; '.join(others)}."
    head = (
        f"A step costs at least {LARGEST_GROWTH - 1:.0%} more beside its peers than at commit {baseline['commit']}:\n"
    )
    return head + "\n".join(lines) + f"{apart}\n{_renewal()}"


def _renewal() -> str:
    return (
        "If the change is wanted, renew the baseline with `python scripts/bench/guard.py --renew`, and say why in the commit. "
        "Else `python scripts/bench/host_calls.py --top 30` lists the calls, `python scripts/bench/step.py` measures bytes and "
        "memory of a larger model."
    )


def read_baseline() -> dict[str, Any]:
    """The ratios that were renewed last, and where they were measured."""
    return json.loads(BASELINE_PATH.read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="write what is measured as the new baseline")
    options = parser.parse_args(arguments)
    ranks.PRELOADED_MODULES += ["hf_zero.engine.engine", "transformers.models.bert.modeling_bert"]
    costs = measure_costs(engines())
    now = ratios_of(costs)
    was = {} if options.renew else read_baseline()["ratios"]
    for name, ratio in now.items():
        before = f"  was {was[name]:.3f}" if name in was else ""
        print(f"{name:34} {ratio:6.3f}{before}")
    if options.renew:
        run = describe_run(options) | {
            "versions": versions(),
            "costs": {name: each._asdict() for name, each in costs.items()},
        }
        write_record(BASELINE_PATH, run | {"ratios": now})
        print(f"written to {BASELINE_PATH}")
        return 0
    print(complaint := grown(now, read_baseline()))
    return 1 if complaint else 0


if __name__ == "__main__":
    sys.exit(main())
