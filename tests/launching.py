"""Starts a script under `accelerate launch` as a user would, with caches of its own."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU2 = ROOT / "configs" / "accelerate" / "cpu2.yaml"
SECONDS = 120


def own_port() -> int:
    """A port that no test in another process of pytest's launches on."""
    return 29510 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def launch(script: Path, *arguments: object, caches: Path, config: Path = CPU2) -> subprocess.CompletedProcess:
    """Run it to its end, whichever that is."""
    environment = os.environ | {"HF_HOME": str(caches)}
    environment.pop("ACCELERATE_USE_CPU", None)
    command = ["accelerate", "launch", "--config_file", config, "--main_process_port", own_port(), script, *arguments]
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
