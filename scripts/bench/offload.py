"""A step with optimizer state on the device, in host memory and in files, beside torchao's and DeepSpeed's offloading.

    python scripts/bench/offload.py --nvme-path /a/folder/on/the/disk      # 1.2 B parameters on a GPU, 30 M on a CPU
    python scripts/bench/offload.py --model tiny --steps 2                 # does the harness run?

Each way runs in a process of its own, in turn, several times over; figures are medians over all their steps. Where there
is a GPU the model is on it. A peer that is not installed, or does not run here, is said once and left out. The page cache is
passed by where the file system lets direct I/O, which the table says. `--minutes` bounds the whole.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from engines import DEFAULT_LEARNING_RATE, WORKLOADS, Workload, adamw_arguments, say_where_ranks_are
from harness import (
    MALLOC_MMAP_THRESHOLD_BYTES,
    MALLOC_VARIABLE,
    RESULTS,
    describe_run,
    keep,
    print_table,
    read_options,
    status_bytes,
)
from ranks import RankFailedError, RanksTimedOutError, run_alone

from hf_zero.device import peak_bytes, wait_for_device
from hf_zero.engine.engine import ZeroEngine
from hf_zero.offload import files

TORCHAO_HOMES = ("torchao.optim", "torchao.prototype.low_bit_optim")
"""Where CPUOffloadOptimizer is, in newer and in older versions."""


class Plain:
    """A model in training, and something with an optimizer's two methods."""

    def __init__(self, model: torch.nn.Module, optimizer: Any):
        self.model = model
        self._optimizer = optimizer

    def backward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A forward and a backward; returns the loss, which is not waited for."""
        loss = self.model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """The optimizer's step, and no gradients afterwards."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def traffic(self) -> dict[str, Any]:
        """Bytes in files, where there are any."""
        return {"written_bytes_a_step": 0, "window_bytes": 0, "direct": None}

    def close(self) -> None:
        """Ends what runs on."""


class Ours(Plain):
    """The same on a ZeroEngine."""

    def __init__(self, model: torch.nn.Module, settings: dict[str, Any]):
        super().__init__(model, torch.optim.AdamW(model.parameters(), **adamw_arguments(fused=True)))
        self._engine = ZeroEngine(model, [self._optimizer], settings)

    def traffic(self) -> dict[str, Any]:
        traffic = self._engine.memory_report().traffic
        if traffic is None:
            return super().traffic()
        direct = all(shard.file.is_direct for shard in self._engine.tier.files.shards)
        return {
            "written_bytes_a_step": traffic.written_bytes_a_step,
            "window_bytes": traffic.window_bytes,
            "direct": direct,
        }

    def close(self) -> None:
        self._engine.close()


class DeepSpeed(Plain):
    """ZeRO-2 with the optimizer in host memory, as DeepSpeed's tutorial on ZeRO-Offload sets it up."""

    def __init__(self, model: torch.nn.Module, workload: Workload):
        # DeepSpeed asks the launcher, which says that this is the only rank.
        say_where_ranks_are(0, 1)
        kind = "bf16" if next(model.parameters()).dtype == torch.bfloat16 else None
        config = {
            "train_micro_batch_size_per_gpu": workload.batch_size,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": DEFAULT_LEARNING_RATE, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
            },
            **({kind: {"enabled": True}} if kind else {}),
        }
        deepspeed = import_module("deepspeed")
        self.model, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def backward(self, input_ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=input_ids, labels=input_ids).loss
        self.model.backward(loss)
        return loss.detach()

    def step(self) -> None:
        self.model.step()


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one trains.

    Attributes:
        start: (model, workload, folder for files) → a trainer.
        is_exact: its losses are those of `none`, bit for bit.
        package: that it needs; None for what is always there.
        needs_gpu: it refuses to run on the CPU.
    """

    start: Callable[[torch.nn.Module, Workload, str], Plain]
    is_exact: bool = False
    package: str | None = None
    needs_gpu: bool = False

    def hindrance(self, device: torch.device) -> str | None:
        """Why it cannot be measured here; None if it can."""
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.needs_gpu and device.type == "cpu":
            return f"{self.package} does this on a GPU only"
        return None


def _ours(model: torch.nn.Module, _workload: Workload, nvme_path: str, *, stage: int = 2, **offload: Any) -> Plain:
    if "nvme" in offload.values():
        offload["nvme_path"] = nvme_path
    return Ours(model, {"stage": stage, "offload": offload})


def _torch(model: torch.nn.Module, _workload: Workload, _nvme_path: str) -> Plain:
    return Plain(model, torch.optim.AdamW(model.parameters(), **adamw_arguments(fused=True)))


def _torchao(model: torch.nn.Module, _workload: Workload, _nvme_path: str, *, offload_gradients: bool) -> Plain:
    """torchao's optimizer in host memory: https://github.com/pytorch/ao/tree/main/torchao/optim."""
    kind = _first_of(TORCHAO_HOMES).CPUOffloadOptimizer
    arguments = adamw_arguments(fused=True)
    return Plain(model, kind(model.parameters(), torch.optim.AdamW, offload_gradients=offload_gradients, **arguments))


def _deepspeed(model: torch.nn.Module, workload: Workload, _nvme_path: str) -> Plain:
    return DeepSpeed(model, workload)


def _first_of(modules: tuple[str, ...]) -> Any:
    *older, last = modules
    for name in older:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    return import_module(last)


WAYS = {
    "none": Way(start=partial(_ours, optimizer="none"), is_exact=True),
    "cpu": Way(start=partial(_ours, optimizer="cpu"), is_exact=True),
    "nvme": Way(start=partial(_ours, optimizer="nvme"), is_exact=True),
    "torch": Way(start=_torch),
    "torchao": Way(start=partial(_torchao, offload_gradients=False), package="torchao", needs_gpu=True),
    "torchao-gradients": Way(start=partial(_torchao, offload_gradients=True), package="torchao", needs_gpu=True),
    "deepspeed": Way(start=_deepspeed, package="deepspeed", needs_gpu=True),
}
"""All that can be named, in the order in which they are measured. The first three are hf_zero's, by `offload.optimizer`."""

OURS = ("none", "cpu", "nvme")


HOST = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def measure(
    way: str, *, model_name: str, dtype: str, steps: int, threads: int | None, nvme_path: str
) -> dict[str, Any]:
    """Figures of one way in this process: a list of times a step, the rest as it is after the last."""
    if threads is not None:
        torch.set_num_threads(threads)
    workload, device = WORKLOADS[model_name], here()
    before_bytes = status_bytes("VmRSS")
    with device:
        model = workload.make_model().to(DTYPES[dtype])
    trainer = WAYS[way].start(model, workload, nvme_path)
    hashing_ms = time_of_hashing()
    losses, step_ms, optimizer_ms, cpu_ms = [], [], [], []
    for number in range(steps + 1):
        if number == 1:
            hashing_ms.clear()
        input_ids = workload.make_batch(0, number).to(device)
        began, cpu_began = time.perf_counter(), time.process_time()
        losses.append(trainer.backward(input_ids).item())
        backward_ended = time.perf_counter()
        trainer.step()
        wait_for_device(device)
        ended = time.perf_counter()
        # The first step makes the state.
        if number:
            step_ms.append(1000 * (ended - began))
            optimizer_ms.append(1000 * (ended - backward_ended))
            cpu_ms.append(1000 * (time.process_time() - cpu_began))
    figures = {
        "way": way,
        "losses": losses,
        "step_ms": step_ms,
        "optimizer_ms": optimizer_ms,
        "cpu_ms": cpu_ms,
        "hashing_ms": sum(hashing_ms) / steps,
        "host_peak_bytes": peak_bytes(HOST) - before_bytes,
        "device_peak_bytes": peak_bytes(device) if device.type != "cpu" else None,
        **trainer.traffic(),
    }
    trainer.close()
    return figures


def time_of_hashing() -> list[float]:
    """Milliseconds of CPU time that each checksum of a part of a file takes, from now on."""
    found, stock = [], files._sum_of

    def timed(chunk: torch.Tensor) -> int:
        began = time.thread_time()
        value = stock(chunk)
        found.append(1000 * (time.thread_time() - began))
        return value

    files._sum_of = timed
    return found


def here() -> torch.device:
    """The device that models are trained on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class Rounds:
    """Runs of several ways in turn, until there are enough or time is up.

    Attributes:
        runs: figures by way.
        failures: why a way gave none, in a line.
    """

    def __init__(self, ways: list[str], deadline_s: float, keyword_arguments: dict[str, Any]):
        self.runs: dict[str, list[dict]] = {way: [] for way in ways}
        self.failures: dict[str, str] = {}
        self._deadline_s = deadline_s
        self._keyword_arguments = keyword_arguments
        self._longest_s = 0.0

    def take(self, rounds: int) -> None:
        """Takes so many rounds, or fewer: a run is only begun if the longest one so far would still end in time."""
        for _ in range(rounds):
            for way in self.runs:
                if way in self.failures:
                    continue
                if time.monotonic() + self._longest_s >= self._deadline_s:
                    print(f"{sum(map(len, self.runs.values()))} runs, and no time for more (--minutes)")
                    return
                self._take_one(way)

    def _take_one(self, way: str) -> None:
        began_s = time.monotonic()
        try:
            figures = run_alone(
                measure,
                time_limit_s=self._deadline_s - began_s,
                keyword_arguments={"way": way, **self._keyword_arguments},
            )
            self.runs[way].append(figures)
        except (RankFailedError, RanksTimedOutError) as error:
            if isinstance(error, RanksTimedOutError) and self.runs[way]:
                # It took longer than the ones before it: those are its figures, and the next run finds no time left.
                return
            self.failures[way] = str(error).strip().splitlines()[-1]
            print(f"{way} gives no figures:\n{error}", file=sys.stderr)
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)


def summarise(runs: list[dict]) -> dict[str, Any]:
    """One way's runs as one: medians of times, the highest memory."""
    first = runs[0]
    return first | {
        "runs": len(runs),
        # More than one where the libraries' own sums differ from run to run, as with several threads on a busy machine.
        "losses": [list(found) for found in dict.fromkeys(tuple(run["losses"]) for run in runs)],
        "step_ms": median(ms for run in runs for ms in run["step_ms"]),
        "optimizer_ms": median(ms for run in runs for ms in run["optimizer_ms"]),
        "cpu_ms": median(ms for run in runs for ms in run["cpu_ms"]),
        "hashing_ms": median(run["hashing_ms"] for run in runs),
        "host_peak_bytes": max(run["host_peak_bytes"] for run in runs),
        "device_peak_bytes": max((run["device_peak_bytes"] or 0) for run in runs) or None,
    }


HEADINGS = (
    *("way", "ms a step", "of it optimizer", "CPU ms a step", "host peak MiB", "device peak MiB", "written MiB a step"),
    *("checksums CPU ms", "window MiB", "losses"),
)


def row_of(summary: dict, first: dict) -> tuple[str, ...]:
    direct = {None: "", True: " (direct I/O)", False: " (page cache)"}[summary["direct"]]
    return (
        summary["way"] + direct,
        *(f"{summary[name]:.0f}" for name in ("step_ms", "optimizer_ms", "cpu_ms")),
        *(_mib(summary[name]) for name in ("host_peak_bytes", "device_peak_bytes", "written_bytes_a_step")),
        f"{summary['hashing_ms']:.0f}" if summary["hashing_ms"] else "",
        _mib(summary["window_bytes"]),
        _losses(summary, first),
    )


def _losses(summary: dict, first: dict) -> str:
    if all(losses in first["losses"] for losses in summary["losses"]):
        return f"bitwise {first['way']}'s"
    return f"last {summary['losses'][0][-1]:.4f}"


def differing(summaries: list[dict]) -> list[str]:
    """Ways that are to be exact, and whose losses are not those of `none`."""
    found = {summary["way"]: summary["losses"] for summary in summaries}
    expected = found.get("none")
    return [way for way in found if expected and WAYS[way].is_exact and any(x not in expected for x in found[way])]


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:,.1f}"


def parse_options() -> argparse.Namespace:
    options = read_options(
        __doc__,
        model=(str, "default: 1.2b on a GPU, 30m on a CPU", WORKLOADS),
        dtype=("bfloat16", "of the parameters", DTYPES),
        ways=(list(WAYS), None, WAYS),
        steps=(10, "measured steps a run"),
        rounds=(3, "processes of each way"),
        threads=(int, "of torch on the CPU; torch's own number by default"),
        nvme_path=(str, "a folder on the disk to measure; a temporary one by default"),
        minutes=(9.0, "after which no more is begun"),
    )
    options.model = options.model or ("30m" if here().type == "cpu" else "1.2b")
    return options


def compare(options: argparse.Namespace, deadline_s: float) -> tuple[dict[str, Any], bool]:
    """(figures, whether all of hf_zero's ways ran and were as exact as they should be)."""
    hindrances = {way: WAYS[way].hindrance(here()) for way in options.ways}
    left_out = {way: why for way, why in hindrances.items() if why is not None}
    for way, why in left_out.items():
        print(f"{way} is left out: {why}")
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.nvme_path) as folder:
        settings = {"model_name": options.model, "dtype": options.dtype, "steps": options.steps}
        settings |= {"threads": options.threads, "nvme_path": folder}
        rounds = Rounds([way for way in options.ways if way not in left_out], deadline_s, settings)
        rounds.take(options.rounds)
    summaries = [summarise(runs) for runs in rounds.runs.values() if runs]
    differ = differing(summaries)
    title = f"{options.model}, AdamW, {options.dtype}, one rank on {device_name()}"
    if summaries:
        print_table(title, HEADINGS, (row_of(each, summaries[0]) for each in summaries), width=180)
    print(*(f"{way} should have the losses of none, bit for bit, and has not" for way in differ), sep="\n")
    is_well = not differ and not any(way in rounds.failures for way in OURS)
    return {"title": title, "ways": summaries, "left_out": left_out, "failed": rounds.failures}, is_well


def main() -> int:
    options = parse_options()
    deadline_s = time.monotonic() + 60 * options.minutes
    # Before the server of the processes starts, whose glibc reads it.
    os.environ[MALLOC_VARIABLE] = str(MALLOC_MMAP_THRESHOLD_BYTES)
    figures, is_well = compare(options, deadline_s)
    run, label = describe_run(options), device_name().lower().replace(" ", "-")
    path = options.json or RESULTS / f"offload-{run['commit']}-{label}.json"
    keep("offload", run, {"kind": "offload", **figures}, path)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
