"""Measures the links between local ranks, and tests each collective that the engine uses."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ..config import ConfigError
from .finding import Finding, absent, bad, good, hint

_PATIENCE_S = 120.0
_SLOWER = 0.5
"""Ratio of the bandwidth inside a copy of the model to that between copies. Below this value, ranks are badly placed."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def links(processes: int | None, tp_size: int = 1) -> Iterator[Finding]:
    """Starts ranks and measures their links: one rank for each GPU with NCCL if there are several GPUs, else on the CPU with
    gloo.

    Args:
        processes: number of ranks; None means one for each GPU, or two copies of the model.
        tp_size: number of ranks that hold one copy of the model together. Links inside and between copies are measured
            separately.

    Raises:
        ConfigError: `tp_size` does not divide the number of ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = processes or (gpus if gpus > 1 else 2 * tp_size)
    if count % tp_size:
        raise ConfigError(f"hf_zero: tp_size is {tp_size}, which does not divide the {count} ranks of the links.")
    backend = "nccl" if gpus >= count > 1 else "gloo"
    where = f"{count} ranks, {backend}" + ("" if backend == "nccl" else " on the CPU")
    with tempfile.TemporaryDirectory(prefix="hf-zero-doctor-") as folder:
        error = _run(Path(folder), count, backend, tp_size)
        result = Path(folder, "found.json")
        if error is not None or not result.exists():
            advice = (
                "Ranks on this machine cannot talk to each other: a firewall, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
            )
            yield bad(f"links ({where})", error or "the ranks brought no result", advice)
            return
        found = json.loads(result.read_text())
    if found["dp"] is not None:
        yield from _speeds(found["dp"], where if tp_size == 1 else f"between copies, {where}")
    if found["tp"] is not None:
        yield from _speeds(found["tp"], f"inside a copy of {tp_size}, {where}")
    yield from placement(found["tp"], found["dp"])
    if found["wrong"]:
        advice = "Values arrive wrong: broken memory or drivers, or a NCCL with a known fault. Do not train here."
        yield bad("the engine's collectives", f"wrong results: {', '.join(found['wrong'])}", advice)
    elif found["dp"] is None:
        yield absent("the engine's collectives", "one copy of the model, which sends nothing to others")
    else:
        yield good("the engine's collectives", "reduce-scatter, all-gather, all-to-all, broadcast, agreements: right")


def _speeds(of: dict[str, float], where: str) -> Iterator[Finding]:
    yield good(f"all-reduce ({where})", f"{of['all_reduce_gb']:.2f} GB/s, latency {of['all_reduce_us']:,.0f} us")
    yield good(f"all-gather ({where})", f"{of['all_gather_gb']:.2f} GB/s, latency {of['all_gather_us']:,.0f} us")


def placement(inside: dict[str, float] | None, between: dict[str, float] | None) -> Iterator[Finding]:
    """Checks that the ranks of a copy, which wait for each other in every layer, have the faster links."""
    if inside is None or between is None:
        return
    subject, ratio = "tensor parallel ranks", inside["all_reduce_gb"] / between["all_reduce_gb"]
    value = f"all-reduce inside a copy has {ratio:.1f} times the bytes a second of that between copies"
    if ratio < _SLOWER:
        advice = "Order the GPUs by CUDA_VISIBLE_DEVICES so that those of a copy are neighbours on the fastest links."
        yield hint(subject, value, advice)
    else:
        yield good(subject, value)


def _run(folder: Path, count: int, backend: str, tp_size: int) -> str | None:
    """Runs the ranks to their end; returns the last line of a failed rank's output, or None."""
    environment = {name: value for name, value in os.environ.items() if name not in (*_LAUNCHERS, "HF_ZERO_CONFIG")}
    command = [sys.executable, "-m", "hf_zero.diagnose.link_ranks", str(folder)]
    said = [folder / f"said{rank}" for rank in range(count)]
    ranks = []
    for rank in range(count):
        with said[rank].open("w") as output:
            words = [*command, str(rank), str(count), backend, str(tp_size)]
            ranks.append(subprocess.Popen(words, stdout=output, stderr=output, env=environment))
    deadline_s = time.monotonic() + _PATIENCE_S
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline_s:
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.05)
        failed = next((index for index, rank in enumerate(ranks) if rank.poll()), None)
        if failed is not None:
            lines = said[failed].read_text().strip().splitlines()
            return f"rank {failed}: {lines[-1] if lines else f'exit code {ranks[failed].returncode}'}"
        late = [index for index, rank in enumerate(ranks) if rank.poll() is None]
        return f"ranks {late} have not ended after {_PATIENCE_S:.0f} s" if late else None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
