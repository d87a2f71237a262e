"""Peak memory of a step, one engine at a time, each in fresh ranks.

The figure is the highest resident set (VmHWM) less the resident set before the model was made. glibc keeps freed blocks
below its threshold in the heap, which would charge an engine for its neighbours' fragments; step.py therefore starts
this file in a process of its own, whose environment lowers the threshold before glibc reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from peers import ENGINES
from ranks import run_ranks
from workload import WORKLOADS, adamw_arguments

MALLOC_MMAP_THRESHOLD_BYTES = 262144
# The first step makes the optimizer's state, and DDP rebuilds its buckets after it: measured with two steps, DDP's peak
# is a seventh too low.
STEPS = 3
_MALLOC_VARIABLE = "MALLOC_MMAP_THRESHOLD_"


def measure_peaks(
    engine_names: list[str], *, workload_name: str, fused: bool, world_size: int, time_limit_s: float
) -> dict[str, int]:
    """Peak bytes by engine, the larger rank's, measured by a child process with its own malloc settings."""
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        peaks_path = Path(folder) / "peaks.json"
        command = [sys.executable, __file__, "--json", str(peaks_path), "--model", workload_name]
        command += ["--ranks", str(world_size), "--time-limit-s", str(time_limit_s)]
        command += ["--fused" if fused else "--no-fused", "--engines", *engine_names]
        subprocess.run(command, env=os.environ | {_MALLOC_VARIABLE: str(MALLOC_MMAP_THRESHOLD_BYTES)}, check=True)
        return json.loads(peaks_path.read_text())


def peak_of_rank(rank: int, world_size: int, *, engine_name: str, workload_name: str, fused: bool) -> int:
    """Peak bytes of one engine on this rank, above what the process held before there was a model."""
    workload = WORKLOADS[workload_name]
    before_bytes = status_bytes("VmRSS")
    engine = ENGINES[engine_name](workload.make_model, adamw_arguments(fused))
    for step in range(STEPS):
        engine.step(workload.make_batch(rank, step))
    engine.finish()
    peak_bytes = status_bytes("VmHWM") - before_bytes
    engine.close()
    return peak_bytes


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory by engine, as JSON.")
    parser.add_argument("--engines", nargs="+", required=True)
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, required=True)
    parser.add_argument("--time-limit-s", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    peaks_bytes = {}
    for name in options.engines:
        keyword_arguments = {"engine_name": name, "workload_name": options.model, "fused": options.fused}
        peaks_bytes[name] = max(
            run_ranks(
                peak_of_rank,
                world_size=options.ranks,
                time_limit_s=options.time_limit_s,
                keyword_arguments=keyword_arguments,
            )
        )
    options.json.write_text(json.dumps(peaks_bytes))


if __name__ == "__main__":
    main()
