"""Fine-tuning of BERT and GPT-2 on one GPU or several: torch's own engines next to every stage and tier of this package.

    python scripts/bench/gpus.py                                        # one GPU
    python scripts/bench/gpus.py --mixed-precision bf16                 # in accelerate's autocast
    torchrun --nproc-per-node 4 scripts/bench/gpus.py                   # four (scripts/bench/multi_gpu.sh does this)
    python scripts/bench/gpus.py --device cpu --models bert-tiny        # does the harness run?

Models are built in host memory, as scripts load them, and prepared by accelerate. Each way trains separately, on the same
batches; its losses are compared with the first way's: a plain loop, or DDP on several ranks. If a way fails, its error is shown
and the others continue. The script ends with status 1 after a failure, or if losses differ too much.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from accelerate import Accelerator
from engines import MAX_NORM, WORKLOADS, Accelerated, Classifier, Engine, Workload
from harness import RESULTS, Clocks, describe_run, keep, print_table, read_options, wait_for_device
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hf_zero import ZeroPlugin
from hf_zero.device import peak_bytes

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class DeviceTrace:
    """Milliseconds of a step on the device.

    Attributes:
        busy_ms: time in which any kernel or copy runs.
        comm_ms: time in which a kernel of NCCL runs.
        hidden_ms: the part of `comm_ms` in which a kernel other than NCCL's runs as well.
    """

    busy_ms: float
    comm_ms: float
    hidden_ms: float


def trace_of(run: Callable[[], object], steps: int) -> DeviceTrace:
    """Traces `run`, which makes so many steps on the current CUDA device."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        run()
        torch.cuda.synchronize()
    events = [event for event in traced.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
    return trace_in(spans, steps)


def trace_in(spans: Iterable[tuple[str, Span]], steps: int) -> DeviceTrace:
    """Summarizes `spans`: name, begin and end in microseconds of all work on the device in so many steps."""
    comm, other = [], []
    for name, span in spans:
        (comm if "nccl" in name.lower() else other).append(span)
    busy, scale = length([*comm, *other]), 1e-3 / steps
    hidden = length(comm) + length(other) - busy
    return DeviceTrace(busy_ms=scale * busy, comm_ms=scale * length(comm), hidden_ms=scale * hidden)


def length(spans: Iterable[Span]) -> float:
    """Returns the length of the union of these spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


MODELS: dict[str, Workload] = {
    "bert-base": Classifier(
        n_embd=768, n_head=12, vocab_size=30522, n_positions=512, batch_size=32, sequence_length=128
    ),
    "gpt2": replace(WORKLOADS["124m"], batch_size=8, sequence_length=512),
    "bert-tiny": Classifier(n_layer=2, n_head=2, vocab_size=128, batch_size=2),
    "gpt2-tiny": Workload(
        n_embd=32, n_layer=2, n_head=2, vocab_size=128, n_positions=32, batch_size=2, sequence_length=16
    ),
}

EXACT, ROUNDED = 1e-4, 3e-2
"""Largest relative difference of losses to the reference: in float32 arithmetic, and with 16 or 8 bits in any part."""

WARMUP_STEPS = 3
TRACED_STEPS = 2

_SPREADS = 4
"""Allowed factor between a way's difference and the reference's own spread: two runs show only a part of the spread."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train a model. `settings`: the engine's, or None for torch's own way of this name."""

    name: str
    settings: dict | None = None
    tolerance: float = EXACT


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The measurements of one way, on this rank.

    Attributes:
        losses: of each step.
        step_ms, host_ms: time of a step, and this process's CPU time in the step; medians of rounds.
        peak_mib: of the device's memory.
        trace: the device's work in traced steps; None on the CPU.
        error: the reason of missing figures; empty without an error.
    """

    model: str
    way: str
    losses: list[float]
    step_ms: float | None = None
    host_ms: float | None = None
    peak_mib: float | None = None
    trace: DeviceTrace | None = None
    loss_difference: float | None = None
    is_as_expected: bool = False
    error: str | None = None


def ways(world_size: int, folder: str) -> list[Way]:
    """Returns the ways, the reference first."""
    peers = [Way(name="torch")] if world_size == 1 else [Way(name="DDP"), Way(name="FSDP2")]
    host, files = {"optimizer": "cpu"}, {"optimizer": "nvme", "nvme_path": folder}
    exact: dict[str, dict] = {f"stage {stage}": {"stage": stage} for stage in range(4)} | {
        "stage 2, state on the host": {"stage": 2, "offload": host},
        "stage 2, state in files": {"stage": 2, "offload": files},
        "stage 3, all on the host": {"stage": 3, "offload": {"params": "cpu", **host}},
        "stage 2, torch's steps": {"stage": 2, "kernels": "never"},
    }
    rounded: dict[str, dict] = {
        "stage 2, bf16 parameters": {"stage": 2, "param_dtype": "bfloat16"},
        "stage 3, bf16 parameters": {"stage": 3, "param_dtype": "bfloat16"},
        "stage 2, 8-bit moments": {"stage": 2, "moments": "8bit"},
    }
    if world_size > 1:
        blocks = {"gradients": "int8", "weights": "int8"}
        rounded |= {f"stage {stage}, int8 wire": {"stage": stage, "comm": blocks} for stage in (2, 3)}
    return [
        *peers,
        *(Way(name=name, settings=settings) for name, settings in exact.items()),
        *(Way(name=name, settings=settings, tolerance=ROUNDED) for name, settings in rounded.items()),
    ]


class Job:
    """One model trained in one way, with AdamW and clipping, starting from a model in host memory."""

    def __init__(self, way: Way, workload: Workload, cpu: bool, mixed_precision: str = "no"):
        accelerator = Accelerator(cpu=cpu, mixed_precision=mixed_precision)
        self.device, self._rank = accelerator.device, accelerator.process_index
        if way.settings is not None:
            ZeroPlugin(way.settings).attach(accelerator)
        self._workload, self._number = workload, 0
        is_fsdp2 = way.name == "FSDP2"
        model = _fully_sharded(workload.make_model(), self.device) if is_fsdp2 else workload.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self._engine = Engine(model, optimizer) if is_fsdp2 else Accelerated(accelerator, model, optimizer)
        self._accelerator = accelerator

    def steps(self, count: int) -> list[torch.Tensor]:
        """Returns losses on the device, without waiting for them."""
        losses = []
        for _ in range(count):
            batch = self._workload.make_batch(self._rank, self._number)
            self._number += 1
            with self._accelerator.autocast():
                loss = self._engine.model(**{name: values.to(self.device) for name, values in batch.items()}).loss
            loss.backward()
            self._engine.clip(MAX_NORM)
            self._engine.update()
            losses.append(loss.detach())
        return losses

    def close(self) -> None:
        for engine in getattr(self._accelerator, "zero_engines", []):
            engine.close()
        self._accelerator.free_memory()


def _fully_sharded(model: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model.to(device)
    for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
        fully_shard(block)
    return fully_shard(model)


def measure(way: Way, model: str, *, steps: int, rounds: int, cpu: bool, mixed_precision: str) -> Figures:
    """Trains a model one way: warm-up steps, rounds of measured steps, and traced steps on an accelerator."""
    job = Job(way, MODELS[model], cpu, mixed_precision)
    try:
        device = job.device
        if device.type != "cpu":
            torch.get_device_module(device).reset_peak_memory_stats(device)
        losses, spent = job.steps(WARMUP_STEPS), []
        for _ in range(rounds):
            wait_for_device(device)
            clocks = Clocks()
            losses += job.steps(steps)
            wait_for_device(device)
            spent.append(clocks.spent())
        peak_mib = peak_bytes(device) / 2**20
        return Figures(
            model=model,
            way=way.name,
            losses=[loss.item() for loss in losses],
            step_ms=1e3 * median(each.wall_s for each in spent) / steps,
            host_ms=1e3 * median(each.cpu_s for each in spent) / steps,
            peak_mib=peak_mib,
            trace=trace_of(lambda: job.steps(TRACED_STEPS), TRACED_STEPS) if device.type == "cuda" else None,
        )
    finally:
        job.close()


def tried(way: Way, model: str, reference: list[float] | None, spread: float = 0.0, **options) -> Figures:
    """Calls `measure`; returns an error instead of figures if the way fails. Compares the losses with the reference's.

    Args:
        spread: relative difference between two runs of the reference. If a device adds in a different order each time, a way
            may differ by as much.
    """
    try:
        found = measure(way, model, **options)
    except Exception as error:
        # Catch every error: it is shown, and the following ways are measured.
        lines = str(error).strip().splitlines() or [""]
        return Figures(model=model, way=way.name, losses=[], error=f"{type(error).__name__}: {lines[0][:300]}")
    expected = found.losses if reference is None else reference
    difference = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected, strict=True))
    tolerance = way.tolerance if options["mixed_precision"] == "no" else ROUNDED
    allowed = max(tolerance, _SPREADS * spread)
    return replace(found, loss_difference=difference, is_as_expected=difference <= allowed)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(
        __doc__,
        arguments,
        models=(["bert-base", "gpt2"], None, MODELS),
        ways=(list, "names, as in the table; the reference is always there"),
        device=("cuda", "or cpu, or another accelerator that torch and accelerate know"),
        mixed_precision=("no", "accelerate's: autocast in the forward", ["no", "bf16"]),
        steps=8,
        rounds=3,
        nvme_path=(Path("outputs/nvme"), "a folder on the disk to offload to"),
        minutes=(9.0, "no way is begun after that"),
    )
    if options.device != "cpu" and not torch.get_device_module(options.device).is_available():
        print(f"skipped: no {options.device} device on this machine; --device cpu tries the harness")
        return 0
    is_cpu, world_size = options.device == "cpu", int(os.environ.get("WORLD_SIZE", 1))
    if not is_cpu and "LOCAL_RANK" in os.environ:
        # NCCL 2.30 and later let ranks share a GPU if NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
        count = torch.get_device_module(options.device).device_count()
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % count)
    deadline_s = time.monotonic() + 60 * options.minutes
    figures: list[Figures] = []
    options.nvme_path.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        reference, spread = None, 0.0
        for way in ways(world_size, str(options.nvme_path)):
            if reference is not None and options.ways is not None and way.name not in options.ways:
                continue
            if time.monotonic() > deadline_s:
                print(f"{model}, {way.name}: not measured, for want of time (--minutes)")
                continue
            size = {"steps": options.steps, "rounds": options.rounds, "cpu": is_cpu}
            size["mixed_precision"] = options.mixed_precision
            found = tried(way, model, reference, spread, **size)
            figures.append(found)
            _give_back(options.device)
            if reference is None and found.error is None:
                reference = found.losses
                again = replace(tried(way, model, reference, **size), way=f"{way.name}, again")
                # A way is not to blame for the reference's own spread.
                spread = again.loss_difference or 0.0
                figures.append(replace(again, is_as_expected=again.error is None))
                _give_back(options.device)
    if int(os.environ.get("RANK", 0)) == 0:
        report(options, figures, world_size)
    if dist.is_initialized():
        # A rank that ends with status 1 makes the launcher stop the writing rank.
        dist.barrier()
        dist.destroy_process_group()
    return 0 if all(each.is_as_expected for each in figures) else 1


def _give_back(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.get_device_module(device).empty_cache()


def report(options: argparse.Namespace, figures: Sequence[Figures], world_size: int) -> None:
    run = describe_run(options)
    device = "CPU" if options.device == "cpu" else torch.get_device_module(options.device).get_device_name()
    # Take for each model the first way with figures.
    firsts = {each.model: each for each in reversed(figures) if each.error is None}

    def beside_first(each: Figures) -> float | None:
        return None if each.step_ms is None else each.step_ms / firsts[each.model].step_ms

    def busy(each: Figures) -> float | None:
        return each.trace and each.trace.busy_ms / each.step_ms

    def hidden(each: Figures) -> float | None:
        return each.trace.hidden_ms / each.trace.comm_ms if each.trace and each.trace.comm_ms else None

    columns = [
        *(("way", lambda each: f"{each.model}, {each.way}"), ("ms a step", "step_ms", ".1f")),
        *(("x first", beside_first, ".2f"), ("host ms", "host_ms", ".1f")),
        *(("device busy", busy, ".0%"), ("comm hidden", hidden, ".0%"), ("peak MiB", "peak_mib", ".0f")),
        ("last loss", lambda each: each.losses[-1] if each.losses else None, ".5f"),
        ("off by", "loss_difference", ".1e"),
        ("", lambda each: each.error or ("" if each.is_as_expected else "losses are off")),
    ]
    arithmetic = {"no": "float32", "bf16": "bf16 autocast"}[options.mixed_precision]
    print_table(
        f"{world_size} x {device}, {arithmetic}, commit {run['commit']}, torch {run['torch']}",
        columns,
        figures,
        width=160,
    )
    measured = {"kind": "gpus", "device": device, "ranks": world_size, "ways": [asdict(each) for each in figures]}
    keep("gpus", run, measured, options.json or RESULTS / f"gpus-{run['commit']}-{world_size}.json")


if __name__ == "__main__":
    sys.exit(main())
