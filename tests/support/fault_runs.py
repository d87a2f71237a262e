"""Starts runs in which one rank stops, ends, or calls something alone; see faulty_ranks.py."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from launching import ROOT, SUPPORT


def outcomes(runs: list[dict], folder: Path) -> list[list[dict]]:
    """How the ranks of each run ended, the runs side by side; see faulty_ranks.py."""
    paths = [ROOT, SUPPORT, ROOT / "scripts" / "bench", *os.environ.get("PYTHONPATH", "").split(":")]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT / "faulty_ranks.py"), str(folder), json.dumps(runs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


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
