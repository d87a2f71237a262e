"""`hf-zero run`: its command line, and the launch of its ranks."""

import argparse
import difflib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..comm.own_groups import interfaces
from ..config import ConfigError, ZeroConfig
from ..config.checks import read_yaml, shown
from ..config.zero import changed
from ..device import accelerators
from ..extras import extra
from ..hooks.replaced import replaced
from ..presence.store import LOOPBACK, LoopbackStore

# ---- The words after `-m hf_zero.run`: the config, the script, and the script's own arguments ----

CONFIG_VARIABLE = "HF_ZERO_CONFIG"
HOW_TO = "accelerate launch ... -m hf_zero.run --zero 2 script.py --its-own arguments"


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """A script to run, with the arguments of a call without hf_zero.

    Attributes:
        config: the config from `--zero`, or else from HF_ZERO_CONFIG.
        script: path of a Python file, or name of a module.
        is_module: whether `script` is the name of a module, as after `python -m`.
        arguments: the script's own arguments.
    """

    config: ZeroConfig
    script: str
    is_module: bool
    arguments: tuple[str, ...]


def script_call(words: Sequence[str]) -> ScriptCall:
    """Parses a command line into a script call.

    Raises:
        ConfigError: there is no config, it is not valid, or there is no such script.
    """
    parser = argparse.ArgumentParser(
        prog="hf_zero.run",
        usage=HOW_TO.replace("script.py", "[script.py | -m module]"),
        description="Trains an unmodified script with hf_zero.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--zero", metavar="X", help="A stage (0, 1, 2, 3, auto), a YAML file, or settings such as stage=2,..."
    )
    parser.add_argument("-m", "--module", action="store_true", help="The script is the name of a module.")
    parser.add_argument("script", help="A Python file, or a module's name after -m.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="The script's own arguments.")
    said = parser.parse_args(list(words))
    _refuse_missing(said.script, is_module=said.module)
    return ScriptCall(
        config=_config(said.zero), script=said.script, is_module=said.module, arguments=tuple(said.arguments)
    )


def _config(said: str | None) -> ZeroConfig:
    if said is not None:
        return ZeroConfig.of(said, "--zero")
    inherited = os.environ.get(CONFIG_VARIABLE)
    if not inherited:
        raise ConfigError(
            "hf_zero: no config was given. Pass it before the script: `--zero 2 script.py --its-own arguments`, or set "
            f"{CONFIG_VARIABLE}. --zero takes a stage (0, 1, 2, 3, auto), a YAML file, or settings such as "
            "stage=2,grad_accumulation=local."
        )
    return ZeroConfig.of(inherited, CONFIG_VARIABLE)


_IN_A_SHELL = "Replace `python` or `torchrun` in it by `hf-zero run --zero 2`, and run it in a shell"
_A_CONFIG = "Pass a config as `--zero FILE`, and the path of a Python file after it"
_NOT_PYTHON = {
    **dict.fromkeys((".sh", ".bash", ".sbatch", ".slurm"), _IN_A_SHELL),
    **dict.fromkeys((".yaml", ".yml", ".json"), _A_CONFIG),
}
"""Suffixes of files that Python cannot run → what to do with the file."""


def _refuse_missing(script: str, *, is_module: bool) -> None:
    """Raises `ConfigError` if Python cannot run the script or module."""
    path = Path(script)
    if is_module:
        # Only the first package is looked up: finding a module inside it would import it. Ranks also import from this folder.
        first = script.partition(".")[0]
        is_file = path.suffix == ".py" and path.is_file()
        if not is_file and (first in sys.modules or find_spec(first) or PathFinder.find_spec(first, [""])):
            return
        meant = "Omit -m before a file" if path.exists() else "Pass a name that `import` finds from this folder"
        raise ConfigError(f"hf_zero: there is no module {shown(script)}. {meant}.")
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"hf_zero: {shown(script)} is a notebook. Call hf_zero.launch(train, zero=2) in one of its cells."
        )
    if path.suffix in _NOT_PYTHON and path.is_file():
        raise ConfigError(f"hf_zero: {shown(script)} is not a Python file. {_NOT_PYTHON[path.suffix]}.")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(f"hf_zero: {shown(script)} is a folder without __main__.py. Pass the path of a Python file.")
    if not path.exists():
        raise ConfigError(f"hf_zero: there is no script {shown(script)} in {Path.cwd()}. {_instead_of(path)}.")


def _instead_of(path: Path) -> str:
    """Returns the probable remedy for the name of a missing script."""
    if path.name in ("python", "python3"):
        return "Remove `python`: the script follows the options"
    if path.name in ("accelerate", "torchrun", "deepspeed", "mpirun"):
        return f"Remove `{path.name}` and its options: hf-zero run starts the ranks"
    if re.fullmatch(r"[a-z_.]+=.*", path.name):
        return "Settings of --zero are one word, with commas and no spaces: stage=2,comm.timeout_s=600"
    names = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
    if near := difflib.get_close_matches(path.name, names, n=1):
        return f"The nearest one is {shown(str(path.parent / near[0]))}"
    return "Pass the path of a Python file, or `-m` and a module's name"


# ---- A config file of accelerate instead of one of hf_zero's ----


def of_accelerate(zero: str | None) -> dict[str, Any]:
    """Returns the launch settings from `--zero FILE`, if the file is a config of accelerate; {} otherwise.

    Returns:
        zero: the equivalent settings, as text. processes, mixed_precision, sp: the values in the file.

    Raises:
        ConfigError: the file requests something unsupported.
    """
    path = Path(zero or "")
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return {}
    said = read_yaml(path)
    if not isinstance(said, dict) or "distributed_type" not in said:
        return {}
    found = extra("foreign", "migrate")(said)
    if found.not_supported:
        key = found.not_supported[0]
        raise ConfigError(
            f"hf_zero: {shown(zero)} has {key.key}: {key.said}. `hf-zero migrate {path.name}` lists all keys."
        )
    sizes = said.get("parallelism_config") or {}
    return {
        "zero": ",".join(f"{name}={json.dumps(value)}" for name, value in changed(found.config).items()),
        "processes": said.get("num_processes"),
        "mixed_precision": said.get("mixed_precision"),
        "sp": sizes.get("parallelism_config_sp_size"),
    }


# ---- The `accelerate launch` command that starts the ranks of an unmodified script on this machine ----
#
# torch's store listens on all addresses of the machine without a password, and gloo listens on the address of the machine's
# name. Ranks on one machine need only the loopback address.

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

RANKS_ON_A_CPU = 2
"""Default number of ranks on a CPU: the minimum for sharding."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A process to start.

    Attributes:
        command: the words of its command line.
        environment: variables to set in addition to the existing ones.
    """

    command: tuple[str, ...]
    environment: dict[str, str]


def _on_loopback() -> dict[str, str]:
    """Returns variables that make ranks and their launcher listen on the loopback address only."""
    # torchrun reads a missing option from PET_...; this one is the address of its own store, created if the port is in use.
    found = {"PET_LOCAL_ADDR": LOOPBACK}
    name = next((name for name, addresses in interfaces().items() if LOOPBACK in addresses), None)
    if name is not None and _GLOO_INTERFACE not in os.environ:
        found[_GLOO_INTERFACE] = name
    return found


PARENT_VARIABLE = "HF_ZERO_LAUNCHED_BY"
"""Environment variable with the parent process of a launcher or a rank, which ends with it."""
_LOOK_S, _LAST_S = 0.25, 5.0


def end_with_parent(parent: int) -> None:
    """Ends this process soon after its parent, even a killed one: first by SIGTERM, after which a launcher ends its ranks."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_S)
        os._exit(1)

    threading.Thread(target=watch, name="hf_zero parent", daemon=True).start()


def main() -> None:
    """Runs `accelerate launch ...`. The store of its ranks listens on the loopback address only."""
    if PARENT_VARIABLE in os.environ:
        end_with_parent(int(os.environ[PARENT_VARIABLE]))
        # For the ranks, which get these variables.
        os.environ[PARENT_VARIABLE] = str(os.getpid())
    from accelerate.commands.accelerate_cli import main as accelerate_main
    from accelerate.commands.config import default_config_file
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    if not os.path.isfile(default_config_file):
        # accelerate's own defaults, which it warns about if they are not given. Options of the command line follow, and win.
        sys.argv[2:2] = ["--mixed_precision", "no", "--dynamo_backend", "no"]

    with ExitStack() as stack:
        # All modules in which torchrun creates a store.
        for module in (dist, c10d_rendezvous_backend, static_tcp_rendezvous):
            stack.enter_context(replaced(module, "TCPStore", LoopbackStore))
        try:
            accelerate_main()
        except ChildFailedError as error:
            # The ranks' own errors, without a traceback through the launcher.
            sys.exit(str(error))


def _devices(*, cpu: bool) -> tuple[str, int]:
    return ("cpu", 0) if cpu else accelerators()


def ranks_of(processes: int | None, *, cpu: bool) -> int:
    """Returns the number of ranks started by `launch_of`: `processes`, or one per accelerator, or two on a CPU."""
    return processes if processes is not None else _devices(cpu=cpu)[1] or RANKS_ON_A_CPU


def launch_of(
    words: Sequence[str],
    *,
    processes: int | None = None,
    cpu: bool = False,
    mixed_precision: str | None = None,
    port: int | None = None,
    sp: int | None = None,
    module: str = "hf_zero.run",
    options: Sequence[str] = (),
) -> Launch:
    """Returns the command that starts a script with the engine, on this machine's accelerators or on its CPU.

    Args:
        words: the words after `-m hf_zero.run`: `--zero 2 script.py --its-own arguments`.
        processes: number of ranks; by default one per accelerator, or two on a CPU.
        cpu: train on the CPU, even if the machine has accelerators.
        mixed_precision: `no`, `fp16` or `bf16`; by default the value in accelerate's own config file.
        port: the port of the rendezvous; by default accelerate's.
        sp: number of ranks that compute a sequence together; by default from the environment, or 1.
        module: the module run by each rank.
        options: the module's own options, before the words.

    Raises:
        ConfigError: the words are not valid, or there are fewer accelerators than ranks.
    """
    script_call(words)
    (kind, count), ranks = _devices(cpu=cpu), ranks_of(processes, cpu=cpu)
    named = "GPUs" if kind == "cuda" else f"{kind} devices"
    allowed = (
        f"1 to {count}, as this machine has {count} {named}, or any number with --cpu"
        if count
        else "a number of at least 1"
    )
    if ranks < 1 or (count and ranks > count):
        raise ConfigError(f"hf_zero: --num-processes is {ranks}; allowed: {allowed}.")
    if count and kind != "cuda":
        print(
            f"hf_zero: this run uses {ranks} of {count} {named}. hf_zero was tested on NVIDIA GPUs and CPUs only: compare the "
            "first losses with those of --zero 0, or train with --cpu.",
            file=sys.stderr,
        )
    flags = ["--num_processes", str(ranks), "--num_machines", "1"]
    if ranks > 1:
        # On a CPU, too, because `accelerate launch --cpu` starts only one process.
        flags.append("--multi_gpu")
    if mixed_precision is not None:
        flags += ["--mixed_precision", mixed_precision]
    if port is not None:
        flags += ["--main_process_port", str(port)]
    # Run as a module, so the command uses the accelerate of this Python.
    accelerate = [sys.executable, "-m", __name__, "launch"]
    # Without ACCELERATE_USE_CPU, accelerate runs each rank on a CPU as a separate job of one process.
    environment = ({} if count else {"ACCELERATE_USE_CPU": "true"}) | _on_loopback()
    if sp is not None:
        if sp < 1 or ranks % sp:
            raise ConfigError(
                f"hf_zero: --sp is {sp}; allowed: a number that divides the {ranks} ranks of --num-processes."
            )
        # accelerate's own variables, which ZeroPlugin reads in each rank.
        environment |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": str(sp)}
    return Launch(command=(*accelerate, *flags, "-m", module, *options, *words), environment=environment)


if __name__ == "__main__":
    main()
