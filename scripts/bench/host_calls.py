"""Counts the host's work in a training step with almost no arithmetic, in proportion to DDP's or a plain loop's.

    python scripts/bench/host_calls.py                                  # GPT-2 and BERT, bf16 and fp32, 1 to 64 ranks: minutes
    python scripts/bench/host_calls.py --models gpt2 --ranks 8 --precisions bf16
    python scripts/bench/host_calls.py --models gpt2 --ranks 8 --engines hf_zero2 --top 30      # which functions they are in
    python scripts/bench/host_calls.py --rounds 20                      # CPU time by phase, too: on a machine without other work

The models have the published layers and parameters at 1/24 of the widths, and every size that decides a code path (buckets,
DDP's cap) is scaled in the same way. So a step has as many buckets and parameters as on a GPU, and the host's work is the same.
Triton's launches do nothing, and memory comes from torch's allocator. The losses of steps by kernels mean nothing.

One and two ranks train with gloo, more with torch's fake group, which sends nothing. DDP's reducer takes no futures of the fake
group, so there it gets a gloo group of one rank. The fake group copies a tensor once for each rank; CPU time counts one copy,
without the two views that this script needs to limit the copies.

Bytecodes follow CPU time; calls do not, because one call may loop over all parameters. Counts are the same on a busy machine.
CPU time is that of the thread that runs Python. All engines take turns in one process, and a ratio is the median over rounds
of (an engine's shortest step / the peer's shortest step in the same round).

Not counted: Triton's own launcher, NCCL's enqueue, autograd's device thread, and the agreement of more than two ranks.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from engines import (
    MAX_NORM,
    Batch,
    Classifier,
    Engine,
    Workload,
    adamw_arguments,
    make_ddp,
    make_fsdp2,
    make_hf_zero,
    make_torch,
)
from harness import count_events, describe_run, keep, on_ranks, print_table, read_options
from ranks import run_alone
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity

PACKAGE = "/hf_zero/"
WARMUP_STEPS = 8
"""Twice the number of steps after which an engine repeats the same work in each step."""
STEPS = 2
BATCHES = 16
_NARROWER = 24

_SMALL: dict[str, Any] = {"n_layer": 12, "n_embd": 768 // _NARROWER, "n_head": 4, "n_positions": 64}
_SMALL |= {"batch_size": 1, "sequence_length": 4}
_MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """A model with the layers of a published one.

    Attributes:
        published_numel: parameters of the published model.
    """

    workload: Workload
    published_numel: int


SHAPES = {
    "gpt2": Shape(Workload(vocab_size=2144, **_SMALL), 124_439_808),
    "bert": Shape(Classifier(vocab_size=1000, **_SMALL), 109_483_778),
}
ENGINES = ("torch", "ddp", "fsdp2", *(f"hf_zero{stage}" for stage in range(4)))
PHASES = ("forward", "backward", "clip", "step", "zero_grad")
FIGURES = ("bytecodes", "python", "builtin", "operations", "launches")
GUARDED = {"bytecodes": "bytecodes", "builtin": "calls of C", "operations": "torch operations"}
"""The figures that `guard.py` checks, and their names in words."""


class Case(NamedTuple):
    """A model, trained on a number of ranks, in fp32 or under bf16 autocast."""

    model: str
    ranks: int
    precision: str

    def __str__(self) -> str:
        return f"{self.model} {self.precision} on {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    @property
    def peer(self) -> str:
        """Returns the engine to which the others are compared."""
        return "torch" if self.ranks == 1 else "ddp"


class Counts(NamedTuple):
    """Work of one engine's step on rank 0, as means over some steps.

    Attributes:
        bytecodes: of Python, in all code.
        python, builtin: calls of functions written in Python and in C.
        package: calls of this package's functions.
        operations: of torch, nested ones included; without those of process groups.
        launches: of kernels.
        functions: bytecodes by function of this package, "file:line name".
        phase_us: thread CPU time by phase; empty if none was measured.
        rounds_us: the shortest step of each round.
    """

    bytecodes: float
    python: float
    builtin: float
    package: float
    operations: float
    launches: float
    functions: dict[str, float]
    phase_us: dict[str, float]
    rounds_us: list[float]


_uncounted = SimpleNamespace(ns=0)
"""CPU time that this script itself has spent inside the steps so far."""


class Loop:
    """One engine in the plain loop, phase by phase."""

    def __init__(self, engine: Engine, autocasts: bool):
        self._engine = engine
        self._autocasts = autocasts

    def step(self, batch: Batch) -> list[int]:
        """Trains on one batch; returns the thread's CPU time at the ends of the phases, in ns."""
        engine = self._engine

        def now() -> int:
            return time.thread_time_ns() - _uncounted.ns

        times = [now()]
        with torch.autocast("cpu", torch.bfloat16) if self._autocasts else nullcontext():
            loss = engine.model(**batch).loss
        times.append(now())
        engine.backward(loss)
        times.append(now())
        engine.clip(MAX_NORM)
        times.append(now())
        engine.optimizer.step()
        times.append(now())
        engine.optimizer.zero_grad()
        times.append(now())
        return times


def _loop(name: str, case: Case) -> Loop:
    shape, is_bf16 = SHAPES[case.model], case.precision == "bf16"
    make_model, arguments = shape.workload.make_model, adamw_arguments(fused=True)
    numel = sum(parameter.numel() for parameter in make_model().parameters())
    scale = numel / shape.published_numel
    if name == "torch":
        return Loop(make_torch(make_model, arguments), is_bf16)
    if name == "ddp":
        is_fake = dist.is_initialized() and dist.get_backend() == "fake"
        group = dist.new_group([0], backend="gloo") if is_fake else None
        with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", max(1, int(scale * _MIB))):
            return Loop(make_ddp(make_model, arguments, int(25 * _MIB * scale), process_group=group), is_bf16)
    if name == "fsdp2":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_bf16 else MixedPrecisionPolicy()
        return Loop(make_fsdp2(make_model, arguments, mp_policy=policy), autocasts=False)
    # Use an eighth of the model, the bucket size on accelerators.
    settings: dict[str, Any] = {"stage": int(name.removeprefix("hf_zero")), "bucket_bytes": numel * 4 // 8}
    if settings["stage"] == 3:
        settings |= {"unit_bytes": 0, "reshard_after_forward": True}
        settings |= {"gather_dtype": "bfloat16"} if is_bf16 else {}
    engine = make_hf_zero(make_model, arguments, **settings)
    engine.zero.transport.ledger.is_timed = False
    return Loop(engine, is_bf16)


def count(rank: int, world_size: int, *, case: Case, engines: Sequence[str], rounds: int = 0) -> dict[str, Counts]:
    """Counts the step of each engine on this rank, in an existing process group."""
    os.environ["TRITON_INTERPRET"] = "1"
    # Import here: the replacements below stay until the process ends.
    import hf_zero.buckets.gathered_memory
    import hf_zero.buckets.memory
    import hf_zero.step.sharded_gradients
    from hf_zero.allocation import ResizedReservation
    from hf_zero.kernels.base import Kernel
    from hf_zero.step.nonfinite import NonFiniteCheck

    launches: list[None] = []
    Kernel._launch = lambda *_arguments, **_constants: launches.append(None)
    # Kernels and the fake group write nothing, so a norm is computed from uninitialized memory, which may contain a NaN.
    NonFiniteCheck.found = lambda *_: None
    for module in (hf_zero.buckets.gathered_memory, hf_zero.step.sharded_gradients):
        module.reserve = lambda numel, dtype, where, kept, separate_own=False: ResizedReservation(
            numel, dtype, kept, where
        )
    for module in (hf_zero.buckets.gathered_memory, hf_zero.buckets.memory):
        module.allocate = lambda numel, dtype, where: torch.empty(numel, dtype=dtype, device=where)
    batches = [SHAPES[case.model].workload.make_batch(rank, step) for step in range(BATCHES)]
    times: dict[str, list[list[int]]] = {name: [] for name in engines}
    with _copied_once() if rounds and dist.is_initialized() and dist.get_backend() == "fake" else nullcontext():
        loops = _warm_loops(case, engines if rounds else (), batches)
        for _, (name, loop), batch in product(range(rounds), loops.items(), batches[: STEPS * 2]):
            ends = loop.step(batch)
            times[name].append([end - start for start, end in pairwise(ends)])
    loops = _warm_loops(case, engines, batches)
    return {name: _count(loop, batches, launches, times[name]) for name, loop in loops.items()}


def _warm_loops(case: Case, engines: Sequence[str], batches: list[Batch]) -> dict[str, Loop]:
    loops = {name: _loop(name, case) for name in engines}
    for loop in loops.values():
        for batch in batches[:WARMUP_STEPS]:
            loop.step(batch)
    return loops


@contextmanager
def _copied_once() -> Iterator[None]:
    """Has torch's fake group copy once in each gather and reduce-scatter, for loops built inside the context.

    The fake group copies a tensor once for each rank on the thread that is measured. No real group does this.
    """
    alone: Any = dist.new_group([0])

    def replaced(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(_group: Any, out: torch.Tensor, source: torch.Tensor, *options: Any) -> Any:
            # No real group makes these views. They would be 10 us for each collective, 7 % of DDP's step in fp32.
            begun = time.thread_time_ns()
            numel = min(out.numel(), source.numel())
            out, source = out.narrow(0, 0, numel), source.narrow(0, 0, numel)
            _uncounted.ns += time.thread_time_ns() - begun
            return stock(alone, out, source, *options)

        return call

    with ExitStack() as stack:
        for name in ("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single"):
            # The last two are new in torch 2.13.
            if (stock := getattr(dist.ProcessGroup, name, None)) is not None:
                stack.enter_context(patch.object(dist.ProcessGroup, name, replaced(stock)))
        yield


def _count(loop: Loop, batches: list[Batch], launches: list[None], times: list[list[int]]) -> Counts:
    def train() -> None:
        for batch in batches[:STEPS]:
            loop.step(batch)

    kinds: Counter[str] = Counter()

    def note(frame: FrameType, event: str) -> None:
        kinds[event] += frame.f_code.co_filename != __file__
        kinds["package"] += event == "call" and PACKAGE in frame.f_code.co_filename

    launches.clear()
    count_events(train, note)
    launched = len(launches)
    bytecodes = _bytecodes(train)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        train()
    own = {code: number for code, number in bytecodes.items() if PACKAGE in code.co_filename}
    a_round, steps_us = STEPS * 2, [sum(each) / 1e3 for each in times]
    return Counts(
        bytecodes=bytecodes.total() / STEPS,
        python=kinds["call"] / STEPS,
        builtin=kinds["c_call"] / STEPS,
        package=kinds["package"] / STEPS,
        operations=sum(each.name.startswith("aten::") and not _is_of_a_group(each) for each in profile.events())
        / STEPS,
        launches=launched / STEPS,
        functions={
            f"{code.co_filename.rpartition(PACKAGE)[2]}:{code.co_firstlineno} {code.co_name}": number / STEPS
            for code, number in sorted(own.items(), key=lambda each: -each[1])
        },
        phase_us={phase: median(each[i] for each in times) / 1e3 for i, phase in enumerate(PHASES) if times},
        rounds_us=[min(steps_us[i : i + a_round]) for i in range(0, len(steps_us), a_round)],
    )


def _is_of_a_group(event: Any) -> bool:
    """Whether a process group ran the operation inside a collective: torch's fake group copies once per rank."""
    while event is not None and not event.name.startswith("c10d::"):
        event = event.cpu_parent
    return event is not None


def _bytecodes(work: Callable[[], object]) -> Counter[Any]:
    """Counts the bytecodes executed by some work on this thread, by code object, without those of this file."""
    counted: Counter[Any] = Counter()

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            counted[frame.f_code] += 1
        return trace

    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
        gc.enable()
    return Counter({code: number for code, number in counted.items() if code.co_filename != __file__})


def count_alone(*, case: Case, **options: Any) -> dict[str, Counts]:
    """Counts in a process that is rank 0 of torch's fake group, whose collectives send nothing."""

    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(min(8, case.ranks))
    dist.init_process_group("fake", rank=0, world_size=case.ranks, store=dist.HashStore())
    try:
        return count(0, case.ranks, case=case, **options)
    finally:
        dist.destroy_process_group()


def counts_of(case: Case, engines: Sequence[str], rounds: int = 0, *, limit_s: float = 300) -> dict[str, Counts]:
    """Counts the step of each engine in fresh processes; with several communicating ranks, on rank 0."""
    job = {"case": case, "engines": list(engines), "rounds": rounds}
    if case.ranks > 2:
        return run_alone(count_alone, time_limit_s=limit_s, keyword_arguments=job)
    return on_ranks(count, case.ranks, limit_s=limit_s, **job)[0]


def ratios(counts: dict[str, Counts], peer: str) -> dict[str, dict[str, float | None]]:
    """Returns, by engine, each figure in proportion to the peer's. `time` is paired by round."""
    its = counts[peer]
    found: dict[str, dict[str, float | None]] = {}
    for name, own in counts.items():
        row: dict[str, float | None] = {
            figure: getattr(own, figure) / getattr(its, figure) for figure in FIGURES if getattr(its, figure)
        }
        row["time"] = median(a / b for a, b in zip(own.rounds_us, its.rounds_us)) if own.rounds_us else None
        found[name] = row
    return found


# Engine → figure → its limit in proportion to DDP's.
GOALS: dict[str, dict[str, float]] = {
    **{f"hf_zero{stage}": {"bytecodes": 1.05, "operations": 0.80, "time": 1.05} for stage in range(3)},
    "hf_zero3": {"bytecodes": 1.25, "operations": 0.80, "time": 1.25},
}
# Engine → figure → its limit in proportion to FSDP2's on several ranks.
GOALS_TO_FSDP2: dict[str, dict[str, float]] = {"hf_zero3": {"bytecodes": 0.45, "time": 0.45}}
# Engine → figure → its limit in proportion to a plain loop's on one rank. DDP's own time is 1.13 to 1.31 of a plain loop's there.
GOALS_ALONE = {f"hf_zero{stage}": {"bytecodes": 1.05} for stage in range(4)}


def missed_goals(case: Case, found: dict[str, dict[str, float | None]]) -> list[str]:
    """Describes the goals which engines miss."""
    goals_to = {"ddp": GOALS, **({"torch": GOALS_ALONE} if case.peer == "torch" else {"fsdp2": GOALS_TO_FSDP2})}
    return [
        f"{name}, {case}: {figure} {value / unit:.3f} of {peer}'s > {most}"
        for peer, goals in goals_to.items()
        for name, row in found.items()
        for figure, most in goals.get(name, {}).items()
        if (value := row.get(figure)) is not None and (unit := found.get(peer, {}).get(figure)) and value / unit > most
    ]


def _show(case: Case, counts: dict[str, Counts], top: int) -> list[str]:
    by_peer = ratios(counts, case.peer)
    columns: list[tuple[Any, ...]] = [("engine", "engine")]
    for figure in FIGURES:
        columns += [(figure, figure, ",.0f"), (f"/ {case.peer}", lambda row, f=figure: row["ratios"].get(f), ".2f")]
    if counts[case.peer].phase_us:
        columns += [(f"{phase}, us", lambda row, p=phase: row["phase_us"][p], ",.0f") for phase in PHASES]
        columns += [(f"time / {case.peer}", lambda row: row["ratios"]["time"], ".2f")]
    rows = [{"engine": name, "ratios": by_peer[name]} | each._asdict() for name, each in counts.items()]
    print_table(f"{case}: a step on rank 0", columns, rows)
    for name, each in counts.items() if top else ():
        print(f"\n{name}: bytecodes of hf_zero's functions, {sum(each.functions.values()):,.0f} in all")
        for function, number in list(each.functions.items())[:top]:
            print(f"{number:9.1f}  {function}")
    return missed_goals(case, by_peer)


def main() -> int:
    options = read_options(
        __doc__,
        engines=(list(ENGINES), ", ".join(ENGINES)),
        models=(list(SHAPES), ", ".join(SHAPES)),
        ranks=([1, 2, 8, 64], "1 and 2 train with gloo, more with torch's fake group"),
        precisions=(["bf16", "fp32"], "bf16 is autocast, and at stage 3 parameters that are gathered in bf16"),
        rounds=(0, "rounds in which CPU time is measured by phase"),
        top=(0, "functions of this package to list for each engine"),
        time_limit_s=300.0,
    )
    if unknown := [name for name in options.engines if name not in ENGINES]:
        print(f"unknown engines {', '.join(unknown)}; there are {', '.join(ENGINES)}", file=sys.stderr)
        return 2
    missed, kept = [], {}
    for case in (Case(*each) for each in product(options.models, options.ranks, options.precisions)):
        names = list(dict.fromkeys([case.peer, *options.engines]))
        counts = counts_of(case, names, options.rounds, limit_s=options.time_limit_s)
        missed += _show(case, counts, options.top)
        kept[str(case)] = {name: each._asdict() | {"functions": {}} for name, each in counts.items()}
    print(*(f"goal missed: {line}" for line in missed), sep="\n")
    if options.json:
        keep("host_calls", describe_run(options), {"kind": "host_calls", "cases": kept, "missed": missed}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
