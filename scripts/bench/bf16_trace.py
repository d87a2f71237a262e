"""The host's time in a bf16 step on one GPU: steps of GPT-2 under torch's profiler, and the cost of each suspect.

    python scripts/bench/bf16_trace.py                                  # a plain loop, DDP, FSDP2, stages 0-3: four minutes
    python scripts/bench/bf16_trace.py --ways "stage 2" "stage 3"       # the plain loop is always there
    python scripts/bench/bf16_trace.py --device cpu --model gpt2-tiny --steps 2     # does it run?

One rank trains in each way: timed steps, and as many under the profiler with the host's stacks. The plain loop and stages 2 and 3
then train once more, timed, with each suspect removed:

- "no Triton": norms and steps by torch's own kernels, not by Triton's launcher;
- "one thread": autograd calls hooks on the thread of the loop, not on a thread of the device;
- "growing segments": the caching allocator grows its segments, so that blocks of all sizes share them;
- "one bucket": the gradients of the whole model are joined and stepped together, with the fewest copies and launches;
- "no collections": Python's garbage collector is off.

A suspect is to blame if the step is faster without it, in proportion to the plain loop without it. Traces for chrome://tracing or
Perfetto are in `--folder`, one per way.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from engines import MAX_NORM, Engine, Workload, adamw_arguments, make_ddp, make_fsdp2, make_hf_zero, make_torch
from gpus import MODELS, trace_in
from harness import Clocks, describe_run, keep, print_table, read_options, wait_for_device
from torch.autograd import DeviceType
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

WARMUP_STEPS = 5
"""More than the number of steps after which an engine repeats the same work in each step."""

REFERENCE = "torch"
WAYS = (REFERENCE, "DDP", "FSDP2", *(f"stage {stage}" for stage in range(4)))
COMPARED = (REFERENCE, "stage 2", "stage 3")

_MOST_FUNCTIONS = 12
_LAUNCHES, _COPIES, _ALLOCATIONS = "LaunchKernel", "Memcpy", "Malloc"
"""Parts of the profiler's names for driver calls."""


@contextmanager
def on_one_thread() -> Iterator[None]:
    with torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def with_growing_segments(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class Suspect:
    """A possible cause of host time in a step.

    Attributes:
        settings: of the engine, to remove it; None if it can also be removed from a plain loop.
        away: a context in which it is removed.
    """

    settings: dict[str, Any] | None = None
    away: Callable[[torch.device], AbstractContextManager[None]] = lambda device: nullcontext()


SUSPECTS = {
    "no Triton": Suspect(settings={"kernels": "never"}),
    "one thread": Suspect(away=lambda device: on_one_thread()),
    "growing segments": Suspect(away=with_growing_segments),
    "one bucket": Suspect(settings={"bucket_bytes": 1 << 34}),
    "no collections": Suspect(away=lambda device: without_collections()),
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The measurements of one way.

    Attributes:
        suspect: the removed suspect; "" for none.
        losses: of the timed steps.
        step_ms, loop_ms, process_ms: of a step: time, CPU time of the loop's thread, and of all threads.
        busy_ms: time in a traced step in which the device runs anything; None on the CPU.
        launches, copies, allocations: number of driver calls in a traced step.
        functions: the host's most expensive operations in a traced step: name, calls, and own ms without nested calls.
        error: the reason of missing figures.
    """

    way: str
    suspect: str = ""
    losses: tuple[float, ...] = ()
    step_ms: float | None = None
    loop_ms: float | None = None
    process_ms: float | None = None
    busy_ms: float | None = None
    launches: float | None = None
    copies: float | None = None
    allocations: float | None = None
    functions: tuple[tuple[str, float, float], ...] = ()
    error: str = ""


class Loop:
    """One way to train, from a model on the device, in the plain loop under autocast."""

    def __init__(self, way: str, workload: Workload, device: torch.device, settings: dict[str, Any]):
        self._device, self._workload, self._number = device, workload, 0
        arguments, make_model = adamw_arguments(fused=True), lambda: workload.make_model().to(device)
        self._casts = way != "FSDP2"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        makes: dict[str, Callable[..., Engine]] = {
            REFERENCE: make_torch,
            "DDP": make_ddp,
            "FSDP2": partial(make_fsdp2, mp_policy=policy),
        }
        if way not in makes:
            stage = int(way.removeprefix("stage "))
            casts = {"gather_dtype": "bfloat16"} if stage == 3 else {}
            makes[way] = partial(make_hf_zero, stage=stage, **casts, **settings)
        self._engine = makes[way](make_model, arguments)

    def step(self) -> torch.Tensor:
        """Returns the loss on the device, without waiting for the value."""
        batch = self._workload.make_batch(0, self._number)
        self._number += 1
        inputs = {name: values.to(self._device, non_blocking=True) for name, values in batch.items()}
        with torch.autocast(self._device.type, torch.bfloat16) if self._casts else nullcontext():
            loss = self._engine.model(**inputs).loss
        self._engine.backward(loss)
        self._engine.clip(MAX_NORM)
        self._engine.update()
        return loss.detach()

    def close(self) -> None:
        self._engine.finish()
        self._engine.close()


def measure(way: str, suspect: str, workload: Workload, device: torch.device, steps: int, folder: Path) -> Figures:
    """Trains in one way, timed; and again under the profiler if no suspect is removed."""
    chosen = SUSPECTS.get(suspect, Suspect())
    with ExitStack() as stack:
        stack.enter_context(chosen.away(device))
        loop = Loop(way, workload, device, chosen.settings or {})
        stack.callback(loop.close)
        for _ in range(WARMUP_STEPS):
            loop.step()
        wait_for_device(device)
        losses, spent = [], []
        for _ in range(steps):
            clocks = Clocks()
            losses.append(loop.step())
            # Wait for each step. Otherwise the device's time would hide the host's.
            wait_for_device(device)
            spent.append(clocks.spent())
        figures = Figures(
            way=way,
            suspect=suspect,
            losses=tuple(loss.item() for loss in losses),
            step_ms=1e3 * median(each.wall_s for each in spent),
            loop_ms=1e3 * median(each.thread_s for each in spent),
            process_ms=1e3 * median(each.cpu_s for each in spent),
        )
        return figures if suspect else _traced(figures, loop, device, steps, folder)


def _traced(figures: Figures, loop: Loop, device: torch.device, steps: int, folder: Path) -> Figures:
    is_cuda = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])], with_stack=True
    ) as traced:
        for _ in range(steps):
            loop.step()
        wait_for_device(device)
    folder.mkdir(parents=True, exist_ok=True)
    traced.export_chrome_trace(str(folder / f"{figures.way.replace(' ', '-')}.json.gz"))
    averages = traced.key_averages()
    on_host = sorted(averages, key=lambda each: each.self_cpu_time_total, reverse=True)[:_MOST_FUNCTIONS]
    found: dict[str, Any] = {
        "functions": tuple((e.key, e.count / steps, 1e-3 * e.self_cpu_time_total / steps) for e in on_host)
    }
    if is_cuda:
        for kind, part in (("launches", _LAUNCHES), ("copies", _COPIES), ("allocations", _ALLOCATIONS)):
            calls = [each.count for each in averages if each.device_type == DeviceType.CPU and part in each.key]
            found[kind] = sum(calls) / steps
        events = [event for event in traced.events() if event.device_type == DeviceType.CUDA]
        spans = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
        found["busy_ms"] = trace_in(spans, steps).busy_ms
    return Figures(**{**asdict(figures), **found})


def tried(way: str, suspect: str, **options: Any) -> Figures:
    """Calls `measure`; returns an error instead of figures if the way fails."""
    try:
        return measure(way, suspect, **options)
    except Exception as error:
        # Catch every error: it is shown, and the following ways are measured.
        lines = str(error).strip().splitlines() or [""]
        return Figures(way=way, suspect=suspect, error=f"{type(error).__name__}: {lines[0][:300]}")


def cells_of(ways: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the ways, followed by the suspects. A suspect of the plain loop is also measured there."""
    chosen = [way for way in WAYS if way == REFERENCE or way in ways]
    compared = [way for way in COMPARED if way in chosen]
    return [(way, "") for way in chosen] + [
        (way, name)
        for name, suspect in SUSPECTS.items()
        for way in compared
        if way != REFERENCE or suspect.settings is None
    ]


def report(figures: Sequence[Figures], device: str) -> None:
    reference = {each.suspect: each.step_ms for each in figures if each.way == REFERENCE}

    def to_reference(each: Figures) -> float | None:
        its = reference.get(each.suspect) or reference.get("")
        return each.step_ms / its if each.step_ms and its else None

    columns: list[tuple[Any, ...]] = [
        ("way", lambda each: f"{each.way}, {each.suspect}" if each.suspect else each.way),
        ("ms a step", "step_ms", ".2f"),
        ("/ torch", to_reference, ".2f"),
        ("loop's CPU ms", "loop_ms", ".2f"),
        ("all CPU ms", "process_ms", ".2f"),
        ("device busy ms", "busy_ms", ".2f"),
        ("launches", "launches", ",.0f"),
        ("copies", "copies", ",.0f"),
        ("allocations", "allocations", ",.1f"),
        ("last loss", lambda each: each.losses[-1] if each.losses else None, ".4f"),
        ("", "error"),
    ]
    print_table(f"GPT-2, bf16 autocast, one rank, {device}", columns, figures, width=160)
    for each in figures:
        if each.functions:
            print(f"\n{each.way}: host's ms a step, by operation, without what it calls")
            print(*(f"{ms:9.3f}  {count:7.1f} x {name}" for name, count, ms in each.functions), sep="\n")


def main(arguments: list[str] | None = None) -> int:
    options = read_options(
        __doc__,
        arguments,
        ways=(list(WAYS), "some of them", WAYS),
        model=("gpt2", "its shapes", list(MODELS)),
        device=("cuda", "or cpu"),
        steps=(20, "by the clock, and as many under the profiler"),
        minutes=(3.5, "no way is begun after that"),
        folder=(Path("outputs/bf16_trace"), "of the traces"),
    )
    if options.device != "cpu" and not torch.get_device_module(options.device).is_available():
        print(f"skipped: no {options.device} device on this machine; --device cpu tries the harness")
        return 0
    device = torch.device(options.device)
    deadline_s = time.monotonic() + 60 * options.minutes
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    figures: list[Figures] = []
    job = {"workload": MODELS[options.model], "device": device, "steps": options.steps, "folder": options.folder}
    try:
        for way, suspect in cells_of(options.ways):
            if time.monotonic() > deadline_s:
                print(f"{way} {suspect}: not measured, for want of time (--minutes)")
                continue
            figures.append(tried(way, suspect, **job))
            gc.collect()
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()
    finally:
        dist.destroy_process_group()
    report(figures, "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name())
    kept = {"kind": "bf16_trace", "model": options.model, "ways": [asdict(each) for each in figures]}
    keep("bf16_trace", describe_run(_without_paths(options)), kept, options.json)
    return int(any(each.error for each in figures))


def _without_paths(options: argparse.Namespace) -> argparse.Namespace:
    # Leave out the folders, which only exist on this machine.
    return argparse.Namespace(
        **{name: value for name, value in vars(options).items() if name not in ("folder", "json")}
    )


if __name__ == "__main__":
    sys.exit(main())
