"""A step with optimizer state on the device, in host memory and in files: time, memory and bytes written.

    python scripts/bench/offload.py --nvme-path /a/folder/on/the/disk      # 30 M parameters, one rank
    python scripts/bench/offload.py --model tiny --steps 2                 # does the harness run?

Each kind runs in a process of its own, in turn, several times over; figures are medians over all their steps. Where there
is a GPU the model is on it. The page cache is passed by where the file system lets direct I/O, which the table says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from memory import MALLOC_MMAP_THRESHOLD_BYTES
from rich.console import Console
from rich.table import Table
from step import describe_run
from workload import WORKLOADS, adamw_arguments

from hf_zero.device import peak_bytes
from hf_zero.engine.engine import ZeroEngine

KINDS = ("none", "cpu", "nvme")


def measure(kind: str, *, model_name: str, stage: int, steps: int, nvme_path: str) -> dict[str, object]:
    """Figures of one kind in this process: a list of times a step, the rest as it is after the last."""
    workload = WORKLOADS[model_name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before_bytes = _resident_bytes()
    model = workload.make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_arguments(fused=True))
    offload = {"optimizer": kind} | ({"nvme_path": nvme_path} if kind == "nvme" else {})
    engine = ZeroEngine(model, [optimizer], {"stage": stage, "offload": offload})
    losses, step_ms, optimizer_ms, cpu_ms = [], [], [], []
    for number in range(steps + 1):
        began, cpu_began = time.perf_counter(), time.process_time()
        tokens = workload.make_batch(0, number).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        backward_ended = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        _wait_for(device)
        ended = time.perf_counter()
        # The first step makes the state.
        if number:
            step_ms.append(1000 * (ended - began))
            optimizer_ms.append(1000 * (ended - backward_ended))
            cpu_ms.append(1000 * (time.process_time() - cpu_began))
    resident = peak_bytes(torch.device("cpu")) - before_bytes
    traffic = engine.memory_report().traffic
    figures = {
        "kind": kind,
        "device": device.type,
        "losses": losses,
        "step_ms": step_ms,
        "optimizer_ms": optimizer_ms,
        "cpu_ms": cpu_ms,
        "host_peak_bytes": resident,
        "device_peak_bytes": peak_bytes(device) if device.type != "cpu" else None,
        "written_bytes_a_step": traffic.written_bytes_a_step if traffic else 0,
        "window_bytes": traffic.window_bytes if traffic else 0,
        "direct": all(shard.file.is_direct for shard in engine.tier.shards) if traffic else None,
    }
    engine.close()
    return figures


def summarise(runs: list[dict]) -> dict[str, object]:
    """One kind's runs as one: medians of times, the highest memory."""
    first = runs[0]
    return first | {
        # More than one where the libraries' own sums differ from run to run, as with several threads on a busy machine.
        "losses": [list(found) for found in dict.fromkeys(tuple(run["losses"]) for run in runs)],
        "step_ms": median(ms for run in runs for ms in run["step_ms"]),
        "optimizer_ms": median(ms for run in runs for ms in run["optimizer_ms"]),
        "cpu_ms": median(ms for run in runs for ms in run["cpu_ms"]),
        "host_peak_bytes": max(run["host_peak_bytes"] for run in runs),
        "device_peak_bytes": max((run["device_peak_bytes"] or 0) for run in runs) or None,
    }


def table_of(summaries: list[dict], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("state in")
    headings = (
        "ms a step",
        "of it optimizer",
        "CPU ms a step",
        "host peak MiB",
        "device peak MiB",
        "written MiB a step",
        "window MiB",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("losses")
    for summary in summaries:
        same = all(losses in summaries[0]["losses"] for losses in summary["losses"])
        kind = summary["kind"] + {None: "", True: " (direct I/O)", False: " (page cache)"}[summary["direct"]]
        table.add_row(
            kind,
            f"{summary['step_ms']:.0f}",
            f"{summary['optimizer_ms']:.0f}",
            f"{summary['cpu_ms']:.0f}",
            f"{summary['host_peak_bytes'] / 2**20:.0f}",
            "" if summary["device_peak_bytes"] is None else f"{summary['device_peak_bytes'] / 2**20:.0f}",
            f"{summary['written_bytes_a_step'] / 2**20:.1f}",
            f"{summary['window_bytes'] / 2**20:.1f}",
            "bitwise none's" if same else "differ",
        )
    return table


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _in_a_process(kind: str, arguments: argparse.Namespace, nvme_path: str) -> dict:
    command = [sys.executable, __file__, "--only", kind, "--nvme-path", nvme_path, "--model", arguments.model]
    command += ["--stage", str(arguments.stage), "--steps", str(arguments.steps)]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(arguments.threads),
        "MALLOC_MMAP_THRESHOLD_": str(MALLOC_MMAP_THRESHOLD_BYTES),
    }
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, default="30m")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2)
    parser.add_argument("--steps", type=int, default=10, help="measured steps a run")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--nvme-path", help="a folder on the disk to measure; a temporary one by default")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    parser.add_argument("--only", choices=KINDS, help="measure one kind in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.only:
        figures = measure(
            arguments.only,
            model_name=arguments.model,
            stage=arguments.stage,
            steps=arguments.steps,
            nvme_path=arguments.nvme_path,
        )
        print(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory(prefix="offload-", dir=arguments.nvme_path) as folder:
        rounds = [{kind: _in_a_process(kind, arguments, folder) for kind in KINDS} for _ in range(arguments.rounds)]
    summaries = [summarise([figures[kind] for figures in rounds]) for kind in KINDS]
    title = f"{arguments.model}, AdamW, fp32, stage {arguments.stage}, one rank on {summaries[0]['device']}"
    Console(width=160).print(table_of(summaries, title))
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"run": describe_run(arguments), "title": title, "kinds": summaries}, indent=1)
        )


if __name__ == "__main__":
    main()
