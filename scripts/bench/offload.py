"""A step with optimizer state on the device, in host memory and in files, next to torchao's and DeepSpeed's offloading.

    python scripts/bench/offload.py --nvme-path /a/folder/on/the/disk      # 1.2 B parameters on a GPU, 30 M on a CPU
    python scripts/bench/offload.py --model tiny --steps 2                 # does the harness run?
    python scripts/bench/offload.py --timeline --picture timeline.png      # a step on a simulated device; see timeline.py

Each way runs in its own process, in turns, several times; figures are medians over all steps. The model is on the GPU if there is
one. A peer that is not installed or does not run here is reported once and left out. The page cache is bypassed if the file
system supports direct I/O, as shown in the table. `--minutes` limits the total time.
"""

from __future__ import annotations

import argparse
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

import timeline
import torch
from engines import (
    DEFAULT_LEARNING_RATE,
    WORKLOADS,
    DeepSpeed,
    Engine,
    HfZero,
    Workload,
    adamw_arguments,
    say_where_ranks_are,
)
from harness import MIB, RESULTS, Clocks, describe_run, held_before, keep, print_table, read_options, wait_for_device
from ranks import RankFailedError, RanksTimedOutError, run_alone

from hf_zero.device import peak_bytes
from hf_zero.offload import files

TORCHAO_HOMES = ("torchao.optim", "torchao.prototype.low_bit_optim")
"""The module of CPUOffloadOptimizer, in newer and in older versions."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train.

    Attributes:
        start: (model, workload, folder for files) → an engine.
        is_exact: whether its losses must equal the ones of `none`, bit for bit.
        package: a required package, which does not support this way on the CPU; None without one.
    """

    start: Callable[[torch.nn.Module, Workload, str], Engine]
    is_exact: bool = False
    package: str | None = None

    def hindrance(self, device: torch.device) -> str | None:
        """Returns why this way cannot be measured here; None if nothing prevents it."""
        if self.package is None:
            return None
        if find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return f"{self.package} does this on a GPU only" if device.type == "cpu" else None


def _ours(model: torch.nn.Module, _workload: Workload, nvme_path: str, *, optimizer: str) -> Engine:
    offload = {"optimizer": optimizer} | ({"nvme_path": nvme_path} if optimizer == "nvme" else {})
    adamw = torch.optim.AdamW(model.parameters(), **adamw_arguments(fused=True))
    return HfZero(model, adamw, {"stage": 2, "offload": offload})


def _torch(model: torch.nn.Module, _workload: Workload, _nvme_path: str) -> Engine:
    return Engine(model, torch.optim.AdamW(model.parameters(), **adamw_arguments(fused=True)))


def _torchao(model: torch.nn.Module, _workload: Workload, _nvme_path: str, *, offload_gradients: bool) -> Engine:
    """torchao's optimizer in host memory: https://github.com/pytorch/ao/tree/main/torchao/optim."""
    newer, older = TORCHAO_HOMES
    try:
        home = import_module(newer)
    except ModuleNotFoundError:
        home = import_module(older)
    more = {"offload_gradients": offload_gradients, **adamw_arguments(fused=True)}
    return Engine(model, home.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **more))


def _deepspeed(model: torch.nn.Module, workload: Workload, _nvme_path: str) -> Engine:
    """ZeRO-2 with the optimizer in host memory, set up as in DeepSpeed's tutorial on ZeRO-Offload."""
    # DeepSpeed reads the launcher's variables: this is the only rank.
    say_where_ranks_are(0, 1)
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
        **({"bf16": {"enabled": True}} if next(model.parameters()).dtype == torch.bfloat16 else {}),
    }
    deepspeed = import_module("deepspeed")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return DeepSpeed(engine, None)


WAYS = {
    **{kind: Way(start=partial(_ours, optimizer=kind), is_exact=True) for kind in ("none", "cpu", "nvme")},
    "torch": Way(start=_torch),
    "torchao": Way(start=partial(_torchao, offload_gradients=False), package="torchao"),
    "torchao-gradients": Way(start=partial(_torchao, offload_gradients=True), package="torchao"),
    "deepspeed": Way(start=_deepspeed, package="deepspeed"),
}
"""All known names, in the order of measurement. The first three are hf_zero's, by `offload.optimizer`."""

HOST = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def measure(
    way: str, *, model_name: str, dtype: str, steps: int, threads: int | None, nvme_path: str
) -> dict[str, Any]:
    """Measures one way in this process: a list of times per step; all other figures are taken after the last step."""
    # Import the code before the measurement, so a peak only includes tensors.
    import_module(WAYS[way].package or "hf_zero.engine.engine")
    before_bytes = held_before()
    if threads is not None:
        torch.set_num_threads(threads)
    workload, device = WORKLOADS[model_name], here()
    with device:
        model = workload.make_model().to(DTYPES[dtype])
    engine = WAYS[way].start(model, workload, nvme_path)
    hashing_ms = time_of_hashing()
    losses: list[float] = []
    times: dict[str, list[float]] = {"step_ms": [], "optimizer_ms": [], "cpu_ms": []}
    for number in range(steps + 1):
        batch = {name: values.to(device) for name, values in workload.make_batch(0, number).items()}
        clocks = Clocks()
        loss = engine.model(**batch).loss
        engine.backward(loss)
        losses.append(loss.item())
        backward_s = clocks.spent().wall_s
        engine.update()
        wait_for_device(device)
        spent = clocks.spent()
        # The first step makes the state, so drop its times.
        if number == 0:
            hashing_ms.clear()
            continue
        for name, seconds in zip(times, (spent.wall_s, spent.wall_s - backward_s, spent.cpu_s)):
            times[name].append(1000 * seconds)
    figures = {
        "way": way,
        "losses": losses,
        **times,
        "hashing_ms": sum(hashing_ms) / steps,
        "host_peak_bytes": peak_bytes(HOST) - before_bytes,
        "device_peak_bytes": peak_bytes(device) if device.type != "cpu" else None,
        **traffic_of(engine),
    }
    engine.close()
    return figures


def traffic_of(engine: Engine) -> dict[str, Any]:
    """Returns the bytes in files, if there are any."""
    traffic = engine.zero.memory_report().traffic if isinstance(engine, HfZero) else None
    if traffic is None:
        return {"written_bytes_a_step": 0, "window_bytes": 0, "direct": None}
    direct = all(shard.file.is_direct for shard in engine.zero.tier.files.shards)
    return {name: getattr(traffic, name) for name in ("written_bytes_a_step", "window_bytes")} | {"direct": direct}


def time_of_hashing() -> list[float]:
    """From now on, records the milliseconds of CPU time of each checksum of a part of a file."""
    found, stock = [], files._sum_of

    def timed(chunk: torch.Tensor) -> int:
        clocks = Clocks()
        value = stock(chunk)
        found.append(1000 * clocks.spent().thread_s)
        return value

    files._sum_of = timed
    return found


def here() -> torch.device:
    """Returns the training device."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Rounds:
    """Runs several ways in turns, until there are enough rounds or the time is up.

    Attributes:
        runs: figures by way.
        failures: way → the reason of its failure, in a line.
    """

    def __init__(self, ways: list[str], deadline_s: float, keyword_arguments: dict[str, Any]):
        self.runs: dict[str, list[dict]] = {way: [] for way in ways}
        self.failures: dict[str, str] = {}
        self._deadline_s = deadline_s
        self._keyword_arguments = keyword_arguments
        self._longest_s = 0.0

    def take(self, rounds: int) -> None:
        """Runs so many rounds, or fewer: a run only starts if one of the longest duration so far would still end in time."""
        for way in list(self.runs) * rounds:
            if way in self.failures:
                continue
            if time.monotonic() + self._longest_s >= self._deadline_s:
                print(f"{sum(map(len, self.runs.values()))} runs, and no time for more (--minutes)")
                return
            self._take_one(way)

    def _take_one(self, way: str) -> None:
        began_s = time.monotonic()
        arguments = {"way": way, **self._keyword_arguments}
        try:
            found = run_alone(measure, time_limit_s=self._deadline_s - began_s, keyword_arguments=arguments)
            self.runs[way].append(found)
        except (RankFailedError, RanksTimedOutError) as error:
            if isinstance(error, RanksTimedOutError) and self.runs[way]:
                # This run took longer than the ones before. Their figures remain, and no time is left for another run.
                return
            self.failures[way] = str(error).strip().splitlines()[-1]
            print(f"{way} gives no figures:\n{error}", file=sys.stderr)
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)


def summarize(runs: list[dict]) -> dict[str, Any]:
    """Summarizes one way's runs: medians of times, the highest memory."""
    return runs[0] | {
        "runs": len(runs),
        # More than one entry if the libraries' own sums differ from run to run, as with several threads on a busy machine.
        "losses": [list(found) for found in dict.fromkeys(tuple(run["losses"]) for run in runs)],
        **{name: median(ms for run in runs for ms in run[name]) for name in ("step_ms", "optimizer_ms", "cpu_ms")},
        "hashing_ms": median(run["hashing_ms"] for run in runs),
        "host_peak_bytes": max(run["host_peak_bytes"] for run in runs),
        "device_peak_bytes": max((run["device_peak_bytes"] or 0) for run in runs) or None,
    }


def show(title: str, summaries: list[dict[str, Any]]) -> None:
    first, io = summaries[0], {None: "", True: " (direct I/O)", False: " (page cache)"}

    def losses(way: dict[str, Any]) -> str:
        if all(losses in first["losses"] for losses in way["losses"]):
            return f"bitwise {first['way']}'s"
        return f"last {way['losses'][0][-1]:.4f}"

    columns = [
        *(("way", lambda way: way["way"] + io[way["direct"]]), ("ms a step", "step_ms", ".0f")),
        *(("of it optimizer", "optimizer_ms", ".0f"), ("CPU ms a step", "cpu_ms", ".0f")),
        *(("host peak MiB", "host_peak_bytes", ",.1f", MIB), ("device peak MiB", "device_peak_bytes", ",.1f", MIB)),
        ("written MiB a step", "written_bytes_a_step", ",.1f", MIB),
        ("checksums CPU ms", lambda way: way["hashing_ms"] or None, ".0f"),
        *(("window MiB", "window_bytes", ",.1f", MIB), ("losses", losses)),
    ]
    print_table(title, columns, summaries, width=180)


def differing(summaries: list[dict]) -> list[str]:
    """Returns the exact ways whose losses differ from the ones of `none`."""
    found = {summary["way"]: summary["losses"] for summary in summaries}
    expected = found.get("none")
    return [way for way in found if expected and WAYS[way].is_exact and any(x not in expected for x in found[way])]


def compare(options: argparse.Namespace, deadline_s: float) -> tuple[dict[str, Any], bool]:
    """Returns (figures, whether all of hf_zero's ways ran and were as exact as required)."""
    hindrances = {way: WAYS[way].hindrance(here()) for way in options.ways}
    left_out = {way: why for way, why in hindrances.items() if why is not None}
    for way, why in left_out.items():
        print(f"{way} is left out: {why}")
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.nvme_path) as folder:
        settings = {name: getattr(options, name) for name in ("dtype", "steps", "threads")}
        settings |= {"model_name": options.model, "nvme_path": folder}
        rounds = Rounds([way for way in options.ways if way not in left_out], deadline_s, settings)
        rounds.take(options.rounds)
    summaries = [summarize(runs) for runs in rounds.runs.values() if runs]
    differ = differing(summaries)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    title = f"{options.model}, AdamW, {options.dtype}, one rank on {device}"
    if summaries:
        show(title, summaries)
    print(*(f"{way} should have the losses of none, bit for bit, and has not" for way in differ), sep="\n")
    is_well = not differ and not any(WAYS[way].is_exact for way in rounds.failures)
    return {"title": title, "ways": summaries, "left_out": left_out, "failed": rounds.failures}, is_well


def main() -> int:
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
        timeline=(False, "a step on a simulated device, span by span; the options below belong to it"),
        models=(list, "default: bert-base and gpt2", list(timeline.PLAIN_MS)),
        links=([25.0, 54.0], "GB/s in each direction"),
        host_gbs=(timeline.HOST_GBS, "GB/s of the host in a fused AdamW step"),
        tiers=(["device", "host"], "where state is, by the names in timeline.py", list(timeline.TIERS)),
        disk_gbs=(2.0, "GB/s of the disk, for reads and writes together"),
        activations=(1.0, "part of the activations of a plain step on an H100"),
        script_threads=(0, "threads of the script, outside of the engine's steps; 0: all cores of the rank"),
        optimizer=("adamw", None, list(timeline.OPTIMIZERS)),
        moments=("fp32", None, ["fp32", "8bit"]),
        accumulation=(1, "micro-batches a step"),
        clip=(True, "by a norm of 1"),
        picture=(str, "a file to draw the steps in"),
    )
    if options.timeline:
        figures = timeline.compare(options)
        if options.json:
            keep("timeline", describe_run(options), {"kind": "timeline", "figures": figures}, options.json)
        return 0 if all(each["equal"] and each["planned"] for each in figures.values()) else 1
    options.model = options.model or ("30m" if here().type == "cpu" else "1.2b")
    figures, is_well = compare(options, time.monotonic() + 60 * options.minutes)
    run = describe_run(options)
    path = options.json or RESULTS / f"offload-{run['commit']}-{run['device'].lower().replace(' ', '-')}.json"
    keep("offload", run, {"kind": "offload", **figures}, path)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
