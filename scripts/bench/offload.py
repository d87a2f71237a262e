"""A step with optimizer state on the device, in host memory and in files, beside torchao's and DeepSpeed's offloading.

    python scripts/bench/offload.py --nvme-path /a/folder/on/the/disk      # 1.2 B parameters on a GPU, 30 M on a CPU
    python scripts/bench/offload.py --largest --host-gb 100                # the largest GPT that trains on this GPU
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
from pathlib import Path
from statistics import median
from typing import Any

import torch
from largest import find_largest
from memory import MALLOC_MMAP_THRESHOLD_BYTES, status_bytes
from offload_ways import OURS, WAYS
from ranks import RankFailedError, RanksTimedOutError, run_alone
from record import BENCH_FOLDER, describe_run, write_record
from rich.console import Console
from rich.table import Table
from workload import WORKLOADS

from hf_zero.device import peak_bytes, wait_for_device
from hf_zero.offload import stored

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
    found, stock = [], stored._sum_of

    def timed(chunk: torch.Tensor) -> int:
        began = time.thread_time()
        value = stock(chunk)
        found.append(1000 * (time.thread_time() - began))
        return value

    stored._sum_of = timed
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
        "masters": WAYS[first["way"]].masters,
    }


def table_of(summaries: list[dict], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    headings = (
        *("ms a step", "of it optimizer", "CPU ms a step", "host peak MiB", "device peak MiB"),
        *("written MiB a step", "checksums CPU ms", "window MiB", "losses"),
    )
    table.add_column("way")
    for heading in headings:
        table.add_column(heading, justify="right")
    for summary in summaries:
        direct = {None: "", True: " (direct I/O)", False: " (page cache)"}[summary["direct"]]
        table.add_row(
            summary["way"] + direct,
            f"{summary['step_ms']:.0f}",
            f"{summary['optimizer_ms']:.0f}",
            f"{summary['cpu_ms']:.0f}",
            _mib(summary["host_peak_bytes"]),
            _mib(summary["device_peak_bytes"]),
            _mib(summary["written_bytes_a_step"]),
            f"{summary['hashing_ms']:.0f}" if summary["hashing_ms"] else "",
            _mib(summary["window_bytes"]),
            _losses(summary, summaries[0]),
        )
    return table


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, help="default: 1.2b on a GPU, 30m on a CPU")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the parameters")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=10, help="measured steps a run")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way")
    parser.add_argument("--threads", type=int, help="of torch on the CPU; torch's own number by default")
    parser.add_argument("--nvme-path", help="a folder on the disk to measure; a temporary one by default")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no more is begun")
    parser.add_argument("--largest", action="store_true", help="find the largest GPT that trains in --host-gb instead")
    parser.add_argument("--host-gb", type=float, default=100.0, help="1e9 bytes of host memory that --largest may take")
    parser.add_argument("--json", type=Path, help="where figures go (default: results/offload-<commit>-<device>.json)")
    options = parser.parse_args()
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
        Console(width=180).print(table_of(summaries, title))
    print(*(f"{way} should have the losses of none, bit for bit, and has not" for way in differ), sep="\n")
    is_well = not differ and not any(way in rounds.failures for way in OURS)
    return {"title": title, "ways": summaries, "left_out": left_out, "failed": rounds.failures}, is_well


def main() -> int:
    options = parse_options()
    deadline_s = time.monotonic() + 60 * options.minutes
    # Before the server of the processes starts, whose glibc reads it.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MALLOC_MMAP_THRESHOLD_BYTES)
    if options.largest:
        host_bytes = int(1e9 * options.host_gb)
        figures = find_largest(
            WORKLOADS[options.model], host_bytes=host_bytes, steps=options.steps, deadline_s=deadline_s
        )
        is_well = figures["largest"] is not None
    else:
        figures, is_well = compare(options, deadline_s)
    run = describe_run(options)
    kind = "largest" if options.largest else "offload"
    label = device_name().lower().replace(" ", "-")
    path = options.json or BENCH_FOLDER / "results" / f"{kind}-{run['commit']}-{label}.json"
    write_record(path, run | {"kind": kind, **figures})
    print(f"figures in {path}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
