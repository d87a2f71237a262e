"""Starts runs in which one rank stops, ends, or calls something alone; see faulty_ranks.py."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import faulty_ranks
from ranks import run_alone


def outcomes(runs: list[dict], folder: Path) -> list[list[dict]]:
    """How the ranks of each run ended, the runs side by side; see faulty_ranks.py."""
    arguments = {"folder": folder, "runs": runs}
    return run_alone(faulty_ranks.run_all, time_limit_s=280, keyword_arguments=arguments)


@cache
def why_no_namespaces() -> str | None:
    """Why no network namespace can be made here."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    made = subprocess.run(["ip", "netns", "add", f"try{os.getpid()}"], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"try{os.getpid()}"], check=False)
    return None
