"""Fails if a step costs more in proportion to its peers than at the baseline: bytes sent, peak memory, and the host's work.

        python scripts/bench/guard.py             # compare with results/guard.json: a minute
        python scripts/bench/guard.py --renew     # today's costs become the baseline

No cost is a time, so results are the same on a busy machine. Each cost is a ratio to a peer measured in the same run, so it also
holds on other machines and with other releases of torch. `tests/repository/test_bench.py` runs the same check in the short suite.

Bytes and memory are those of a small BERT in float32 on two ranks, one engine after another. The host's work is counted by
`host_calls.py`: bytecodes, calls of C and torch operations of a step as small as possible.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

import host_calls
import ranks
from engines import BASELINE, ENGINES, MAX_NORM, Batch, Classifier, Engine, adamw_arguments
from harness import (
    RESULTS,
    describe_run,
    held_before,
    most_held,
    on_ranks,
    reset_peak,
    spent_in,
    write_record,
)

# Import before a rank measures its memory without a model.
import hf_zero.engine.engine  # noqa: F401

BASELINE_PATH = RESULTS / "guard.json"
LARGEST_GROWTH = 1.10
LARGEST_GROWTH_OF_COUNTS = 1.03
"""Counts are exact. The margin leaves room for a fix with a few more operations."""
TIME_LIMIT_S = 120

# 2.2 M parameters: large compared to the process's own memory.
WORKLOAD = Classifier(n_layer=2, n_embd=256, vocab_size=2048, batch_size=1)
# The first step makes the optimizer's state, and DDP rebuilds its buckets afterwards.
WARMUP_STEPS = 2
STEPS = 2

# Engine → the peers for its ratios.
PEERS = {"hf_zero0": ("ddp",), "hf_zero1": ("ddp",), "hf_zero2": ("ddp",), "hf_zero3": ("ddp", "fsdp2")}

# The counted cases of `host_calls.py`, with their engines. Without accumulation, stage 1 is the same as stage 2.
CASES = {
    host_calls.Case("gpt2", 8, "bf16"): ("hf_zero0", "hf_zero2", "hf_zero3"),
    host_calls.Case("bert", 1, "fp32"): ("hf_zero2",),
}


class Costs(NamedTuple):
    """The costs of one engine's step on a rank.

    Attributes:
        sent_bytes: bytes sent per step, counted at the socket.
        peak_bytes: the highest resident memory in excess of the memory before the model was made.
    """

    sent_bytes: float
    peak_bytes: float


KINDS = {"sent_bytes": "bytes sent", "peak_bytes": "peak memory"}


Makes = dict[str, Callable[..., Engine]]


def costs_on_rank(rank: int, world_size: int, *, makes: Makes) -> dict[str, Costs]:
    """Returns engine → its costs on this rank, for each function that makes an engine."""
    # Train a small model first, so the libraries' own pages exist before an engine's memory is measured.
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
    engine.close()
    return Costs(sent_bytes=median(sent_bytes), peak_bytes=median(peaks_bytes))


def measure_costs(makes: Makes) -> dict[str, Costs]:
    """Returns engine → its costs, for each kind from the rank with the larger cost."""
    by_rank = on_ranks(costs_on_rank, 2, limit_s=TIME_LIMIT_S, makes=makes)
    return {
        name: Costs(**{kind: max(getattr(costs[name], kind) for costs in by_rank) for kind in KINDS}) for name in makes
    }


def engines() -> Makes:
    """Returns all compared engines and their peers, by name."""
    peers = [peer for each in PEERS.values() for peer in each]
    return {name: ENGINES[name] for name in dict.fromkeys([*peers, *PEERS])}


def ratios_of(costs: dict[str, Costs]) -> dict[str, float]:
    """Returns "peak memory of hf_zero3 / fsdp2" → the ratio."""
    return {
        f"{words} of {name} / {peer}": getattr(costs[name], kind) / getattr(costs[peer], kind)
        for name, peers in PEERS.items()
        for peer in peers
        for kind, words in KINDS.items()
    }


def host_ratios() -> dict[str, float]:
    """Counts the host's work now; returns "bytecodes of hf_zero2 / ddp, gpt2 bf16 on 8 ranks" → the ratio."""
    found = {}
    for case, names in CASES.items():
        counted = host_calls.ratios(host_calls.counts_of(case, [case.peer, *names]), case.peer)
        for name in names:
            for figure, words in host_calls.GUARDED.items():
                found[f"{words} of {name} / {case.peer}, {case}"] = counted[name][figure]
    return found


def largest_growth(ratio: str) -> float:
    """Returns the factor by which a ratio of this name may exceed the baseline."""
    return LARGEST_GROWTH if ratio.startswith(tuple(KINDS.values())) else LARGEST_GROWTH_OF_COUNTS


def versions() -> dict[str, str]:
    """Returns the versions of all software the costs may depend on, except this package."""
    return {"python": platform.python_version(), "torch": version("torch"), "transformers": version("transformers")}


def grown(now: dict[str, float], baseline: dict[str, Any]) -> str:
    """Describes the ratios that have grown too much since the baseline; empty if none has."""
    was = baseline["ratios"]
    if was.keys() != now.keys():
        return f"{BASELINE_PATH.name} lists other ratios than are measured. {_renewal()}"
    lines = [
        f"  {name}: was {was[name]:.3f}, is {ratio:.3f} ({ratio / was[name] - 1:+.1%})"
        for name, ratio in now.items()
        if ratio >= largest_growth(name) * was[name]
    ]
    if not lines:
        return ""
    others = [f"{name} {found}, then {baseline['versions'][name]}" for name, found in versions().items()]
    apart = "" if versions() == baseline["versions"] else f"\nA peer may have changed, too: {'; '.join(others)}."
    head = f"A step costs more in proportion to its peers than at commit {baseline['commit']}:\n"
    return head + "\n".join(lines) + f"{apart}\n{_renewal()}"


def _renewal() -> str:
    return (
        "If the change is wanted, renew the baseline with `python scripts/bench/guard.py --renew`, and say why in the commit. "
        "Else `python scripts/bench/host_calls.py --top 30` lists the functions, `python scripts/bench/step.py` measures bytes "
        "and memory of a larger model."
    )


def read_baseline() -> dict[str, Any]:
    """Returns the ratios of the last `--renew`, and the place of their measurement."""
    return json.loads(BASELINE_PATH.read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="write what is measured as the new baseline")
    options = parser.parse_args(arguments)
    ranks.PRELOADED_MODULES += ["hf_zero.engine.engine", "transformers.models.bert.modeling_bert"]
    costs = measure_costs(engines())
    now = ratios_of(costs) | host_ratios()
    was = {} if options.renew else read_baseline()["ratios"]
    for name, ratio in now.items():
        before = f"  was {was[name]:.3f}" if name in was else ""
        print(f"{name:60} {ratio:6.3f}{before}")
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
