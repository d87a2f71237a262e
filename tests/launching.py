"""Starts a script under `accelerate launch` as a user would, with caches of its own."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
CPU2 = CONFIGS / "accelerate" / "cpu2.yaml"
SECONDS = 120


def own_port() -> int:
    """A port that no test in another process of pytest's launches on."""
    return 29510 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def launch_command(script: Path, *arguments: object, config: Path, flags: Sequence[object] = ()) -> list[str]:
    """The words of a command line; `flags` are the launcher's own, `arguments` the script's."""
    launcher = ["accelerate", "launch", "--config_file", config, "--main_process_port", own_port(), *flags]
    return [str(word) for word in (*launcher, script, *arguments)]


def own_environment(caches: Path) -> dict[str, str]:
    """In which the script has its own caches, and nothing is known of the ranks but what the launcher says."""
    environment = os.environ | {"HF_HOME": str(caches)}
    environment.pop("ACCELERATE_USE_CPU", None)
    return environment


def launch(
    script: Path, *arguments: object, caches: Path, config: Path = CPU2, flags: Sequence[object] = ()
) -> subprocess.CompletedProcess:
    """Run it to its end, whichever that is."""
    command = launch_command(script, *arguments, config=config, flags=flags)
    environment = own_environment(caches)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
