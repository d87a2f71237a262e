"""What every benchmark does: read its options, count bytes and memory, print a table, and keep figures with what they are of."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

BENCH_FOLDER = Path(__file__).resolve().parent
ROOT = BENCH_FOLDER.parents[1]
RESULTS = BENCH_FOLDER / "results"
MIB = 2**20

# ---- options, tables, files ----


def read_options(
    about: str | None, arguments: list[str] | None = None, quick: dict[str, Any] | None = None, **options: Any
) -> argparse.Namespace:
    """The command line of a benchmark.

    Args:
        about: the script's docstring.
        quick: what `--quick` sets, where there is such a form.
        options: name → default, `(default, help)` or `(default, help, choices)`. A type in place of a default: there is none. A
            list takes several words. An option `words` is named by its place.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in options.items():
        default, said, choices = (*given, None, None)[:3] if isinstance(given, tuple) else (given, None, None)
        kind, default = (default, None) if isinstance(default, type) else (type(default), default)
        more: dict[str, Any] = {"default": default, "help": said}
        if kind is bool:
            more["action"] = argparse.BooleanOptionalAction
        else:
            words = default if kind is list and default else []
            more |= {"type": (type(words[0]) if words else str) if kind is list else kind, "choices": choices}
        if kind is list:
            more["nargs"] = "*" if name == "words" else "+"
        parser.add_argument(name if name == "words" else f"--{name.replace('_', '-')}", **more)
    parser.add_argument("--json", type=Path, help="where the figures go")
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"does it run? {quick}")
    read = parser.parse_args(arguments)
    if quick and read.quick:
        vars(read).update(quick)
    return read


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]], width: int = 150) -> None:
    """Prints a table whose first column is one of names."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)


def keep(name: str, run: dict[str, Any], figures: dict[str, Any], path: Path | None = None) -> None:
    """Writes figures and what they are of to `path`, or to results/NAME-COMMIT.json."""
    path = path or RESULTS / f"{name}-{run['commit']}.json"
    write_record(path, run | figures)
    print(f"written to {path}")


def write_record(path: Path, record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


# ---- what a run is of ----

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "torchao", "numpy")
LOAD_BEFORE = os.getloadavg()
"""When this was imported, before anything was measured."""

BUSY_LOAD = 0.5
"""Other work, in processes that wanted a core before the run began, from which on a run counts as disturbed."""


def describe_run(options: argparse.Namespace) -> dict[str, Any]:
    """Commit, machine, versions, command, date and load of a run; call it at the run's end."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD") or "none",
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cpu_model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in PACKAGES},
        "command": shlex.join(["python", _from_root(sys.argv[0]), *sys.argv[1:]]),
        "load_before": LOAD_BEFORE[0],
        "load_after": os.getloadavg()[0],
        "options": {name: value for name, value in vars(options).items() if name != "json"},
    }


def _cpu_model() -> str:
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "unknown")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    """git's answer, empty where there is no repository or no commit yet."""
    return subprocess.run(["git", "-C", BENCH_FOLDER, *arguments], capture_output=True, text=True).stdout.strip()


def _from_root(path: str) -> str:
    """A path as it is typed in the repository's folder, where it lies in it."""
    full = Path(path).resolve()
    return str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else full.name


# ---- memory ----

MALLOC_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
MALLOC_MMAP_THRESHOLD_BYTES = 262144
"""glibc keeps freed blocks below its threshold in the heap, which would charge an engine for its neighbours' fragments."""


def run_again_with_own_malloc() -> int | None:
    """The status of this script, run once more with glibc's threshold lowered; None in that run, which goes on."""
    if MALLOC_VARIABLE in os.environ:
        return None
    environment = os.environ | {MALLOC_VARIABLE: str(MALLOC_MMAP_THRESHOLD_BYTES)}
    return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


def status_bytes(field: str) -> int:
    """A figure of /proc/self/status: VmRSS is what the process holds, VmHWM the most that it has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


# ---- bytes on the wire, as the kernel counts them, whatever any engine's own ledger says ----

# struct tcp_info of linux/tcp.h up to tcpi_bytes_retrans: 8 bytes of state and options, 24 u32 (tcpi_rto .. tcpi_total_retrans),
# 4 u64 (tcpi_pacing_rate, tcpi_max_pacing_rate, tcpi_bytes_acked, tcpi_bytes_received), 6 u32 (tcpi_segs_out ..
# tcpi_data_segs_out), 4 u64 (tcpi_delivery_rate .. tcpi_sndbuf_limited), 2 u32 (tcpi_delivered, tcpi_delivered_ce),
# 2 u64 (tcpi_bytes_sent, tcpi_bytes_retrans).
_TCP_INFO = struct.Struct("=8x 24I 2Q 2Q 6I 4Q 2I 2Q")
_RECEIVED, _SENT, _SENT_AGAIN = 27, -2, -1


class TcpBytes(NamedTuple):
    """Payload bytes through a set of TCP sockets since each was opened."""

    sent: int
    received: int


def tcp_bytes() -> TcpBytes:
    """Payload bytes sent and received by all TCP sockets open in this process, without headers and what was sent again.

    A closed socket takes its bytes with it, so measure a difference while the connections live. For an exact figure
    put a barrier before each reading: what was written to a socket may still wait in the kernel to be sent.
    """
    counted = [_bytes_of(number) for number in _socket_descriptors()]
    return TcpBytes(sum(each.sent for each in counted), sum(each.received for each in counted))


def _bytes_of(descriptor: int) -> TcpBytes:
    # On a copy of the descriptor, which can be closed while the owner goes on using its own.
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.proto != socket.IPPROTO_TCP:
            return TcpBytes(0, 0)
        raw = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(raw) < _TCP_INFO.size:
        raise OSError(f"TCP_INFO has {len(raw)} of {_TCP_INFO.size} bytes: Linux 4.19 or newer counts bytes sent")
    fields = _TCP_INFO.unpack(raw)
    return TcpBytes(sent=fields[_SENT] - fields[_SENT_AGAIN], received=fields[_RECEIVED])


def _socket_descriptors() -> Iterable[int]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            # Closed since it was listed, as the listing's own descriptor always is.
            continue
        if target.startswith("socket:"):
            yield int(name)
