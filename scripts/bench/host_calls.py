"""How many calls of Python and operations of torch a step takes, on the job of host_time.py.

    python scripts/bench/host_calls.py                              # a minute
    python scripts/bench/host_calls.py --engines hf_zero3 --top 30  # which functions of this package they are
    python scripts/bench/host_calls.py --ranks 1 --kernels          # one rank whose steps are launches of kernels, as on a GPU

CPU time tells what a step costs the host, and wants a machine on which nothing else runs. Calls are the same on a busy one,
so a change to what a step does is seen here first. Steps are clipped, and counted after some of warm-up, on rank 0. With
`--kernels`, launches do nothing: the host's calls for them are counted, and the losses mean nothing.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FrameType
from typing import NamedTuple

import torch
from engines import ENGINES, MAX_NORM, Batch, Classifier, Engine, adamw_arguments, chosen_engines
from harness import count_events, on_ranks, print_table, read_options
from host_time import USUAL

PACKAGE = "/hf_zero/"
WARMUP_STEPS = 5


class Calls(NamedTuple):
    """What one engine's step takes, as means over some steps.

    Attributes:
        python: calls of Python functions, of everything that runs in the step.
        package: of those, the ones in this package.
        builtin: calls of functions written in C.
        operations: of torch, those called by others too.
        functions: calls by function of this package, "file:line name".
    """

    python: float
    package: float
    builtin: float
    operations: float
    functions: dict[str, float]


def count_calls(
    rank: int, world_size: int, *, engine_names: list[str], n_layer: int, steps: int, kernels: bool = False
) -> dict[str, Calls]:
    """The calls of each engine on this rank."""
    if kernels:
        os.environ["TRITON_INTERPRET"] = "1"
        from hf_zero.kernels.base import Kernel

        Kernel._launch = lambda *_arguments, **_constants: None
    workload, found = Classifier(n_layer=n_layer), {}
    for name in engine_names:
        engine = ENGINES[name](workload.make_model, adamw_arguments(fused=True))
        engine.max_norm = MAX_NORM
        batches = [workload.make_batch(rank, step) for step in range(WARMUP_STEPS + steps)]
        for batch in batches[:WARMUP_STEPS]:
            engine.step(batch)
        found[name] = _count(engine, batches[WARMUP_STEPS:])
        engine.finish()
        engine.close()
    return found


def _count(engine: Engine, batches: list[Batch]) -> Calls:
    functions: Counter[str] = Counter()
    kinds: Counter[str] = Counter()

    def note(frame: FrameType, event: str) -> None:
        kinds[event] += 1
        path = frame.f_code.co_filename
        if event == "call" and PACKAGE in path:
            functions[f"{path.rpartition(PACKAGE)[2]}:{frame.f_code.co_firstlineno} {frame.f_code.co_name}"] += 1

    def train() -> None:
        for batch in batches:
            engine.step(batch)

    count_events(train, note)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train()
        engine.finish()
    steps = len(batches)
    return Calls(
        python=kinds["call"] / steps,
        package=functions.total() / steps,
        builtin=kinds["c_call"] / steps,
        operations=sum(event.name.startswith("aten::") for event in profile.events()) / steps,
        functions={name: calls / steps for name, calls in functions.most_common()},
    )


def main() -> int:
    options = read_options(
        __doc__,
        engines=(list(USUAL), ", ".join(ENGINES)),
        n_layer=12,
        steps=5,
        ranks=2,
        kernels=(False, "count the host's calls for steps by kernels"),
        top=(0, "functions of this package to list for each engine"),
        time_limit_s=300.0,
    )
    job = {"engine_names": chosen_engines(options.engines)} | {
        name: getattr(options, name) for name in ("n_layer", "steps", "kernels")
    }
    found: dict[str, Calls] = on_ranks(count_calls, options.ranks, limit_s=options.time_limit_s, **job)[0]
    columns = [
        *(("engine", "engine"), ("Python", "python", ",.0f"), ("of them hf_zero's", "package", ",.0f")),
        *(("built in", "builtin", ",.0f"), ("torch operations", "operations", ",.0f")),
    ]
    ranks = f"{options.ranks} rank{'s' if options.ranks > 1 else ''}"
    title = f"BERT of {options.n_layer} layers, {ranks}, calls a step on rank 0"
    print_table(title, columns, ({"engine": name} | calls._asdict() for name, calls in found.items()))
    for name, calls in found.items() if options.top else ():
        print(f"\n{name}")
        for function, count in list(calls.functions.items())[: options.top]:
            print(f"{count:9.1f}  {function}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
