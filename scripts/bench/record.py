"""What every file of figures says of its run: commit, machine, versions, command, date, and how busy the machine was."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

BENCH_FOLDER = Path(__file__).resolve().parent
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "torchao", "numpy")
LOAD_BEFORE = os.getloadavg()
"""When this was imported, before anything was measured."""

BUSY_LOAD = 0.5
"""Other work, in processes that wanted a core before the run began, from which on a run counts as disturbed."""


def describe_run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything needed to judge or to repeat the run; call it at the run's end."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD") or "none",
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cpu_model": cpu_model(),
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


def is_disturbed(run: dict[str, Any]) -> bool:
    """Whether other work was on the machine when the run began."""
    return run["load_before"] > BUSY_LOAD


def write_record(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown"


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
    root, full = BENCH_FOLDER.parents[1], Path(path).resolve()
    return str(full.relative_to(root)) if full.is_relative_to(root) else full.name
