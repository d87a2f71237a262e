"""Measures the links between local ranks, and tests each collective of the engine."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import ConfigError
from ..device import rounded
from .finding import Finding, absent, bad, good, hint

_PATIENCE_S = 60.0
"""Longer than a collective's own limit in link_ranks.py, so that usually a rank reports which call hangs."""

_DETOURS: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "nccl": (
        ("host memory", {"NCCL_P2P_DISABLE": "1"}),
        ("sockets", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
    ),
    "gloo": (("the loopback interface", {"GLOO_SOCKET_IFNAME": "lo"}),),
}
"""Slower transports of each backend, with the variables that choose them.

A driver may report peer access although copies between the GPUs hang or are wrong (IOMMU, ACS, virtual machines). Only a
collective on real buffers shows whether a transport works.
"""
_SLOWER = 0.5
"""Ratio of the bandwidth inside a copy of the model to that between copies. Below this value, ranks are badly placed."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def links(processes: int | None, tp_size: int = 1) -> Iterator[Finding]:
    """Starts ranks and measures their links: one rank for each GPU with NCCL if there are several GPUs, else on the CPU with
    gloo.

    Several GPUs are measured over each transport of NCCL. On the CPU, another transport is tried only if the usual one fails.

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
        raise ConfigError(
            f"hf_zero: tp_size is {tp_size}, which does not divide the {count} ranks that measure the links."
        )
    backend = "nccl" if gpus >= count > 1 else "gloo"
    where = f"{count} ranks, {backend}" + ("" if backend == "nccl" else " on the CPU")
    found = _measured(count, backend, tp_size)
    if isinstance(found, str):
        yield bad(f"links ({where})", found, _detour(count, backend, tp_size))
        return
    if found["dp"] is not None:
        yield from _speeds(found["dp"], where if tp_size == 1 else f"between copies, {where}")
    if found["tp"] is not None:
        yield from _speeds(found["tp"], f"inside a copy of {tp_size}, {where}")
    yield from placement(found["tp"], found["dp"])
    if found["wrong"]:
        advice = f"The ranks receive wrong values. Do not train over this transport. {_detour(count, backend, tp_size)}"
        yield bad("the engine's collectives", f"wrong results: {', '.join(found['wrong'])}", advice)
    elif found["dp"] is None:
        yield absent("the engine's collectives", "only one copy of the model, so nothing is sent between copies")
    else:
        yield good("the engine's collectives", "reduce-scatter, all-gather, all-to-all, broadcast, agreements: correct")
    if backend == "nccl" and not found["wrong"]:
        yield from _detours(count, tp_size)


def _detour(count: int, backend: str, tp_size: int) -> str:
    """Tries the slower transports after the usual one has failed; returns which of them works, as advice."""
    causes = _CAUSES[backend]
    for name, variables in _DETOURS[backend]:
        found = _measured(count, backend, tp_size, variables=variables)
        if not isinstance(found, str) and not found["wrong"]:
            export = " ".join(f"{variable}={value}" for variable, value in variables.items())
            speed = "" if found["dp"] is None else f", at {found['dp']['all_reduce_gb']:.2f} GB/s"
            return f"The ranks can talk over {name}{speed}: export {export}, or remove the cause ({causes})."
    return f"No transport between the ranks of this machine works. Look for the cause: {causes}."


_CAUSES = {
    "nccl": "IOMMU or ACS, a driver or NCCL with a known fault, broken memory, a firewall, NCCL_SOCKET_IFNAME",
    "gloo": "a firewall, GLOO_SOCKET_IFNAME, a host name that does not resolve",
}


def _measured(
    count: int, backend: str, tp_size: int, variables: Mapping[str, str] | None = None
) -> dict[str, Any] | str:
    """Starts the ranks; returns their measurements, or the reason why there are none.

    Args:
        variables: environment variables that choose a transport.
    """
    with tempfile.TemporaryDirectory(prefix="hf-zero-doctor-") as folder:
        error = _run(Path(folder), count, backend, tp_size, variables or {})
        result = Path(folder, "found.json")
        if error is not None or not result.exists():
            return error or "the ranks wrote no result"
        return json.loads(result.read_text())


def _speeds(of: dict[str, float], where: str) -> Iterator[Finding]:
    gb = of["all_reduce_gb"]
    rate = f"{gb:.2f} GB/s (`hf-zero plan --node-gbps {rounded(8 * gb)}`)"
    yield good(f"all-reduce ({where})", f"{rate}, latency {of['all_reduce_us']:,.0f} us")
    yield good(f"all-gather ({where})", f"{of['all_gather_gb']:.2f} GB/s, latency {of['all_gather_us']:,.0f} us")


def _detours(count: int, tp_size: int) -> Iterator[Finding]:
    """Measures NCCL's slower transports, for comparison with the usual one."""
    for name, variables in _DETOURS["nccl"]:
        found = _measured(count, "nccl", tp_size, variables=variables)
        subject = f"all-reduce over {name}"
        if isinstance(found, str):
            yield hint(subject, found, "Only the fallback failed: the usual transport works.")
        elif found["dp"] is not None:
            yield good(subject, f"{found['dp']['all_reduce_gb']:.2f} GB/s")


def placement(inside: dict[str, float] | None, between: dict[str, float] | None) -> Iterator[Finding]:
    """Checks whether the ranks of a copy, which wait for each other in every layer, have the faster links."""
    if inside is None or between is None:
        return
    subject, ratio = "tensor parallel ranks", inside["all_reduce_gb"] / between["all_reduce_gb"]
    value = f"all-reduce inside a copy is {ratio:.1f} times as fast as between copies"
    if ratio < _SLOWER:
        advice = (
            "Order the GPUs with CUDA_VISIBLE_DEVICES so that the GPUs of one copy are neighbors on the fastest links."
        )
        yield hint(subject, value, advice)
    else:
        yield good(subject, value)


def _run(folder: Path, count: int, backend: str, tp_size: int, variables: Mapping[str, str]) -> str | None:
    """Runs the ranks to their end; returns the last line of a failed rank's output, or None."""
    environment = {name: value for name, value in os.environ.items() if name not in (*_LAUNCHERS, "HF_ZERO_CONFIG")}
    environment |= variables
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
