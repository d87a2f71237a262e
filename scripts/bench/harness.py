"""The shared parts of benchmarks: options, ranks, clocks, bytes, memory, tables, and files of figures with their context."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shlex
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from ranks import run_ranks

BENCH_FOLDER = Path(__file__).resolve().parent
ROOT = BENCH_FOLDER.parents[1]
RESULTS = BENCH_FOLDER / "results"
MIB = 2**20

# ---- options ----


def read_options(
    about: str | None, arguments: list[str] | None = None, quick: dict[str, Any] | None = None, **options: Any
) -> argparse.Namespace:
    """Parses the command line of a benchmark.

    Args:
        about: the script's docstring.
        quick: the settings of `--quick`, if the benchmark has this option.
        options: name → default, `(default, help)` or `(default, help, choices)`. A type instead of a default: no default. A
            list accepts several words. An option named `words` is positional.
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


# ---- ranks, and their resource use ----


def on_ranks(target: Callable[..., Any], ranks: int, *, limit_s: float = 600, **arguments: Any) -> list[Any]:
    """Returns the results of `target(rank, ranks, **arguments)` in fresh ranks."""
    return run_ranks(target, world_size=ranks, time_limit_s=limit_s, keyword_arguments=arguments)


class Spent(NamedTuple):
    """Wall-clock seconds, CPU seconds of all threads and of the calling thread, and bytes sent by sockets."""

    wall_s: float
    cpu_s: float
    thread_s: float
    sent_bytes: int = 0


class Clocks:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._began = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()

    def spent(self) -> Spent:
        return Spent(*(now - then for then, now in zip(self._began, self._read())))


def spent_in(work: Callable[[], object]) -> Spent:
    """Returns this rank's resource use for some work, which all ranks of a process group run at the same time."""
    dist.barrier()
    sent_before = tcp_bytes().sent
    clocks = Clocks()
    work()
    spent = clocks.spent()
    dist.barrier()
    spent = spent._replace(sent_bytes=tcp_bytes().sent - sent_before)
    # A rank that leaves closes its sockets, and the counts of both ends are lost.
    dist.barrier()
    return spent


def count_events(work: Callable[[], object], note: Callable[[Any, str], object]) -> None:
    """Calls `note` with the frame and the kind of each event of Python's profiler during some work on this thread."""
    # Collect now: finalizers called by the collector belong to earlier work.
    gc.collect()
    gc.disable()
    sys.setprofile(lambda frame, event, _argument: note(frame, event))
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()


# ---- tables and files ----


class Column(NamedTuple):
    """A heading, a row's field or a function of the row, and the format and unit of the figure. Plain tuples work as well."""

    heading: str
    what: str | Callable[[Any], Any]
    form: str = ""
    unit: float | None = None


def cells(columns: Sequence[tuple[Any, ...]], row: Any) -> list[str]:
    """Formats a row, which is a mapping or an object with fields. A figure of None results in an empty cell."""
    fields = row if isinstance(row, Mapping) else row._asdict() if hasattr(row, "_asdict") else vars(row)
    texts = []
    for _, what, form, unit in (Column(*column) for column in columns):
        value = what(row) if callable(what) else fields[what]
        texts.append("" if value is None else format(value if unit is None else value / unit, form))
    return texts


def print_table(title: str, columns: Sequence[tuple[Any, ...]], rows: Iterable[Any], width: int = 150) -> None:
    """Prints a table whose first column contains names."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, (heading, *_) in enumerate(columns):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        table.add_row(*cells(columns, row))
    Console(width=width).print(table)


def keep(name: str, run: dict[str, Any], figures: dict[str, Any], path: Path | None = None) -> None:
    """Writes figures and the description of their run to `path`, or to results/NAME-COMMIT.json."""
    path = path or RESULTS / f"{name}-{run['commit']}.json"
    write_record(path, run | figures)
    print(f"written to {path}")


def write_record(path: Path, record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


# ---- the description of a run ----

PACKAGES = (
    *("torch", "transformers", "accelerate", "deepspeed", "torchao", "numpy"),
    *("trl", "peft", "sentence-transformers", "huggingface-hub"),
)
LOAD_BEFORE = os.getloadavg()
"""The load at import, before any measurement."""

BUSY_LOAD = 0.5
"""Number of processes of other work that wanted a core before the run, above which the run counts as disturbed."""


def describe_run(options: argparse.Namespace) -> dict[str, Any]:
    """Describes a run: commit, machine, versions, command, date and load. Call this at the run's end."""
    script = Path(sys.argv[0]).resolve()
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
        # The command as typed in the repository's folder, for scripts inside of the repository.
        "command": shlex.join(
            ["python", str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name, *sys.argv[1:]]
        ),
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
    """Returns git's output; empty without a repository or a commit."""
    return subprocess.run(["git", "-C", BENCH_FOLDER, *arguments], capture_output=True, text=True).stdout.strip()


# ---- memory ----

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_THRESHOLD_BYTES = 64 * 1024
_RESET_PEAK = "5"  # of proc(5), /proc/[pid]/clear_refs


def wait_for_device(device: torch.device) -> None:
    """Waits until `device` has done all queued work. The host has no queue."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def held_before(*, trims: bool = False) -> int:
    """Returns the resident bytes of this process, and counts the peak from now on.

    glibc keeps freed blocks below its threshold in the heap. An engine would then be charged for the fragmentation by earlier
    engines, so the threshold is lowered. With a threshold above 196 KB, the activations of a small batch, a T5 of 20 M parameters
    had a larger peak with two samples than with four.

    Args:
        trims: return free memory to the system first, because an earlier engine was in this process.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    if trims:
        gc.collect()
        libc.malloc_trim(0)
    reset_peak()
    return _status_bytes("VmRSS")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def most_held() -> int:
    """Returns the highest number of resident bytes since the last `held_before`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    """Returns a figure of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def bytes_from_disk() -> int:
    """Returns the bytes that the disk has read for this process, including mapped files."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


# ---- bytes on the wire, counted by the kernel, independently of an engine's own ledger ----

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
    """Payload bytes sent and received by all TCP sockets open in this process, without headers and retransmissions.

    The count of a socket is lost when it closes, so measure a difference while the connections exist. For an exact figure,
    put a barrier before each reading: bytes written to a socket may still wait in the kernel.
    """
    counted = [_bytes_of(number) for number in _socket_descriptors()]
    return TcpBytes(sum(each.sent for each in counted), sum(each.received for each in counted))


def _bytes_of(descriptor: int) -> TcpBytes:
    # Use a copy of the descriptor: the copy can be closed while the owner continues to use its own.
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
            # Closed since the listing, as always the listing's own descriptor.
            continue
        if target.startswith("socket:"):
            yield int(name)
