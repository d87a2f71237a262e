"""Peak memory of a step, one engine at a time, each in fresh ranks.

The figure is the highest resident set (VmHWM) less the resident set before the model was made. glibc keeps freed blocks
below its threshold in the heap, which would charge an engine for its neighbours' fragments; `measure_peaks` therefore starts
this file in a process of its own, whose environment lowers the threshold before glibc reads it.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from peers import ENGINES
from ranks import RankFailedError, RanksTimedOutError, run_ranks
from wire import tcp_bytes
from workload import Workload, adamw_arguments

MALLOC_MMAP_THRESHOLD_BYTES = 262144
# The first step makes the optimizer's state, and DDP rebuilds its buckets after it: measured with two steps, DDP's peak
# is a seventh too low.
STEPS = 3
_MALLOC_VARIABLE = "MALLOC_MMAP_THRESHOLD_"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One engine's run.

    Attributes:
        sizes: of buckets, where they are not the engine's own.
    """

    engine_name: str
    workload: Workload
    world_size: int
    accumulation: int = 1
    fused: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    time_limit_s: float = 600


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The larger rank's figures.

    Attributes:
        sent_bytes: by a rank in the last step.
    """

    peak_bytes: int
    sent_bytes: int


def measure_peaks(jobs: list[Job]) -> list[Peak | str]:
    """Peaks in the order of the jobs, or why there is none, measured by a child process with its own malloc settings."""
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        jobs_path, peaks_path = Path(folder) / "jobs.pickle", Path(folder) / "peaks.json"
        jobs_path.write_bytes(pickle.dumps(jobs))
        command = [sys.executable, __file__, str(jobs_path), str(peaks_path)]
        subprocess.run(command, env=os.environ | {_MALLOC_VARIABLE: str(MALLOC_MMAP_THRESHOLD_BYTES)}, check=True)
        return [found if isinstance(found, str) else Peak(**found) for found in json.loads(peaks_path.read_text())]


def peak_of_rank(rank: int, world_size: int, *, job: Job) -> Peak:
    """One engine's figures on this rank: peak bytes are those above what the process held before there was a model."""
    peer, workload = ENGINES[job.engine_name], job.workload
    peer.import_modules()
    before_bytes = status_bytes("VmRSS")
    engine = peer(workload.make_model, adamw_arguments(job.fused), **job.sizes)
    sent_before_bytes = 0
    for step in range(STEPS):
        dist.barrier()
        sent_before_bytes = tcp_bytes().sent
        first = step * job.accumulation
        engine.step(*(workload.make_batch(rank, number) for number in range(first, first + job.accumulation)))
    engine.finish()
    dist.barrier()
    sent_bytes = tcp_bytes().sent - sent_before_bytes
    # A rank that leaves closes its sockets, and what they have counted is gone on both sides.
    dist.barrier()
    peak_bytes = status_bytes("VmHWM") - before_bytes
    engine.close()
    return Peak(peak_bytes=peak_bytes, sent_bytes=sent_bytes)


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def measure_peak(job: Job) -> dict[str, int] | str:
    """The larger rank's figures, or the last line of what went wrong."""
    arguments = {"job": job}
    try:
        by_rank: list[Peak] = run_ranks(
            peak_of_rank, world_size=job.world_size, time_limit_s=job.time_limit_s, keyword_arguments=arguments
        )
    except (RankFailedError, RanksTimedOutError) as error:
        return last_line(error)
    return {name: max(getattr(peak, name) for peak in by_rank) for name in Peak.__dataclass_fields__}


def last_line(error: Exception) -> str:
    """What a table has room for of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


def main() -> None:
    jobs_path, peaks_path = map(Path, sys.argv[1:])
    peaks_path.write_text(json.dumps([measure_peak(job) for job in pickle.loads(jobs_path.read_bytes())]))


if __name__ == "__main__":
    main()
