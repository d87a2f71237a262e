"""Fine-tuning of BERT and GPT-2 on one GPU or several: torch's own engines beside every stage and tier of this package.

    python scripts/bench/gpus.py                                        # one GPU
    torchrun --nproc-per-node 4 scripts/bench/gpus.py                   # four (scripts/bench/multi_gpu.sh does this)
    python scripts/bench/gpus.py --device cpu --models bert-tiny        # does the harness run?

Models are built in host memory, as scripts load them, and prepared by accelerate. Each way trains alone, on the same batches;
its losses are compared with the first way's: a plain loop, or DDP where there are several ranks. A way that fails is shown with
its error, and the others go on; the script then ends with status 1, as it does when losses are off.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from accelerate import Accelerator
from device_trace import DeviceTrace, trace_of
from gpu_models import MODELS, Batch
from record import BENCH_FOLDER, describe_run
from rich.console import Console
from rich.table import Table
from torch import nn

from hf_zero import ZeroPlugin
from hf_zero.device import peak_bytes, wait_for_device

EXACT, ROUNDED = 1e-4, 3e-2
"""Most difference of losses, relative to the reference's: where arithmetic is float32's, and where 16 or 8 bits are in it."""

MAX_NORM = 1.0
WARMUP_STEPS = 3
TRACED_STEPS = 2

_SPREADS = 4
"""So many times as far off as the reference is from itself, a way may be: two runs show a part of the spread."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is trained. `settings`: the engine's, or None for torch's own way of this name."""

    name: str
    settings: dict | None = None
    tolerance: float = EXACT


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one way, on this rank.

    Attributes:
        losses: of each step.
        step_ms, host_ms: a step's time, and the CPU time that this process took in it; medians of rounds.
        peak_mib: of the device's memory.
        trace: what the device did in traced steps; None on the CPU.
        error: why there is no more, where there is none.
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
    """The reference first."""
    peers = [Way(name="torch")] if world_size == 1 else [Way(name="DDP"), Way(name="FSDP2")]
    stages = [Way(name=f"stage {stage}", settings={"stage": stage}) for stage in range(4)]
    host, files = {"optimizer": "cpu"}, {"optimizer": "nvme", "nvme_path": folder}
    params = {"params": "cpu", "optimizer": "cpu"}
    tiers = [
        Way(name="stage 2, state on the host", settings={"stage": 2, "offload": host}),
        Way(name="stage 2, state in files", settings={"stage": 2, "offload": files}),
        Way(name="stage 3, all on the host", settings={"stage": 3, "offload": params}),
        Way(name="stage 2, torch's steps", settings={"stage": 2, "kernels": "never"}),
        Way(name="stage 2, bf16 parameters", settings={"stage": 2, "param_dtype": "bfloat16"}, tolerance=ROUNDED),
        Way(name="stage 3, bf16 parameters", settings={"stage": 3, "param_dtype": "bfloat16"}, tolerance=ROUNDED),
        Way(name="stage 2, 8-bit moments", settings={"stage": 2, "moments": "8bit"}, tolerance=ROUNDED),
    ]
    blocks = {"gradients": "int8", "weights": "int8"}
    wires = [
        Way(name=f"stage {stage}, int8 wire", settings={"stage": stage, "comm": blocks}, tolerance=ROUNDED)
        for stage in (2, 3)
    ]
    return peers + stages + tiers + (wires if world_size > 1 else [])


class Job:
    """One model that is trained in one way, with AdamW and clipping.

    Args:
        make_model: builds it in host memory, the same each time.
        make_batch: gives what a rank is fed in a step.
    """

    def __init__(
        self, way: Way, make_model: Callable[[], nn.Module], make_batch: Callable[[int, int], Batch], cpu: bool
    ):
        self.accelerator = Accelerator(cpu=cpu)
        self.device = self.accelerator.device
        if way.settings is not None:
            ZeroPlugin(way.settings).attach(self.accelerator)
        self._make_batch = make_batch
        self._way, self._number = way, 0
        model = make_model()
        if way.name == "FSDP2":
            model = self._fully_sharded(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.model = model
        if way.name != "FSDP2":
            self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)

    def _fully_sharded(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        model.to(self.device)
        for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
            fully_shard(block)
        return fully_shard(model)

    def steps(self, count: int) -> list[torch.Tensor]:
        """Losses, on the device."""
        losses = []
        for _ in range(count):
            batch = self._make_batch(self.accelerator.process_index, self._number)
            self._number += 1
            loss = self.model(**{name: values.to(self.device) for name, values in batch.items()}).loss
            loss.backward()
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def _clip(self) -> None:
        if self._way.name == "FSDP2":
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        else:
            self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def close(self) -> None:
        for engine in getattr(self.accelerator, "zero_engines", []):
            engine.close()
        self.accelerator.free_memory()


def measure(way: Way, model: str, *, steps: int, rounds: int, cpu: bool) -> Figures:
    """Trains a model one way: steps that do not count, rounds of steps that do, and traced ones on an accelerator."""
    job = Job(way, MODELS[model].make, MODELS[model].batch, cpu)
    try:
        device = job.device
        if device.type != "cpu":
            torch.get_device_module(device).reset_peak_memory_stats(device)
        losses = job.steps(WARMUP_STEPS)
        step_ms, host_ms = [], []
        for _ in range(rounds):
            wait_for_device(device)
            began, cpu_began = time.perf_counter(), time.process_time()
            losses += job.steps(steps)
            wait_for_device(device)
            step_ms.append(1e3 * (time.perf_counter() - began) / steps)
            host_ms.append(1e3 * (time.process_time() - cpu_began) / steps)
        peak_mib = peak_bytes(device) / 2**20
        trace = trace_of(lambda: job.steps(TRACED_STEPS), TRACED_STEPS) if device.type == "cuda" else None
        return Figures(
            model=model,
            way=way.name,
            losses=[loss.item() for loss in losses],
            step_ms=median(step_ms),
            host_ms=median(host_ms),
            peak_mib=peak_mib,
            trace=trace,
        )
    finally:
        job.close()


def tried(way: Way, model: str, reference: list[float] | None, spread: float = 0.0, **options) -> Figures:
    """`measure`, with an error in place of figures where the way fails, and beside the reference's losses.

    Args:
        spread: relative difference between two runs of the reference. A device that adds in another order each time lets a way
            be as far off.
    """
    try:
        found = measure(way, model, **options)
    except Exception as error:
        # Whatever it is: it is shown, and the ways behind it are measured.
        lines = str(error).strip().splitlines() or [""]
        return Figures(model=model, way=way.name, losses=[], error=f"{type(error).__name__}: {lines[0][:300]}")
    expected = found.losses if reference is None else reference
    difference = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected, strict=True))
    allowed = max(way.tolerance, _SPREADS * spread)
    return replace(found, loss_difference=difference, is_as_expected=difference <= allowed)


def table(figures: Sequence[Figures], title: str) -> Table:
    out = Table(title=title, title_justify="left")
    for heading in ("model", "way"):
        out.add_column(heading)
    for heading in ("ms a step", "x first", "host ms", "device busy", "comm hidden", "peak MiB", "last loss", "off by"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("")
    first: dict[str, float] = {}
    for each in figures:
        if each.error is not None:
            out.add_row(each.model, each.way, *[""] * 8, each.error)
            continue
        reference = first.setdefault(each.model, each.step_ms)
        out.add_row(
            each.model,
            each.way,
            f"{each.step_ms:.1f}",
            f"{each.step_ms / reference:.2f}",
            f"{each.host_ms:.1f}",
            "" if each.trace is None else f"{each.trace.busy_ms / each.step_ms:.0%}",
            "" if each.trace is None or not each.trace.comm_ms else f"{each.trace.hidden_ms / each.trace.comm_ms:.0%}",
            f"{each.peak_mib:.0f}",
            f"{each.losses[-1]:.5f}",
            f"{each.loss_difference:.1e}",
            "" if each.is_as_expected else "losses are off",
        )
    return out


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["bert-base", "gpt2"])
    parser.add_argument("--ways", nargs="+", help="names, as in the table; the reference is always there")
    parser.add_argument(
        "--device", default="cuda", help="or cpu, or another accelerator that torch and accelerate know"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--nvme-path", type=Path, default=Path("outputs/nvme"), help="a folder on the disk to offload to"
    )
    parser.add_argument("--minutes", type=float, default=9, help="no way is begun after that")
    parser.add_argument("--json", type=Path, help="where the figures go (default: results/gpus-<commit>-<ranks>.json)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    if options.device != "cpu" and not torch.get_device_module(options.device).is_available():
        print(f"skipped: no {options.device} device on this machine; --device cpu tries the harness")
        return 0
    is_cpu, world_size = options.device == "cpu", int(os.environ.get("WORLD_SIZE", 1))
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
            found = tried(way, model, reference, spread, **size)
            figures.append(found)
            _give_back(options.device)
            if reference is None and found.error is None:
                reference = found.losses
                again = replace(tried(way, model, reference, **size), way=f"{way.name}, again")
                # No way is to blame for the reference's own spread.
                spread = again.loss_difference or 0.0
                figures.append(replace(again, is_as_expected=again.error is None))
                _give_back(options.device)
    if int(os.environ.get("RANK", 0)) == 0:
        report(options, figures, world_size)
    if dist.is_initialized():
        # A rank that ends with status 1 has the launcher stop the one that writes.
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
    title = f"{world_size} x {device}, commit {run['commit']}, torch {run['torch']}"
    Console(width=160).print(table(figures, title))
    path = options.json or BENCH_FOLDER / "results" / f"gpus-{run['commit']}-{world_size}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {"device": device, "ranks": world_size, "ways": [asdict(each) for each in figures]}
    path.write_text(json.dumps(run | measured, indent=2, default=str) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
