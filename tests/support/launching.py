"""Starts a script as a user would, with `accelerate launch`, or in ranks forked from a process with all imports."""

import atexit
import itertools
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context
from pathlib import Path

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from ranks import start_forking

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent
CONFIGS = ROOT / "configs"
CPU2 = CONFIGS / "accelerate" / "cpu2.yaml"
SECONDS = 120


def own_port() -> int:
    """Returns a port of this pytest process, unused by the tests in pytest's other processes."""
    return 29510 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


_barrier = itertools.count()


def port_to_meet_on() -> int:
    """Returns a free port which no other process gets by accident before the ranks connect.

    The system gives the ports it chooses to any connection, so this port is from a range. Each pytest process has its own range.
    """
    first = 10_000 + 500 * (own_port() - 29_510) % 15_000
    for turn in _barrier:
        with socket.socket() as tried:
            # Set the same option as the ranks' store: leftovers of a former store do not block it.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", first + turn % 500))
            except OSError:
                continue
            return first + turn % 500
    raise AssertionError("the turns have no end")


def launch_command(script: Path, *arguments: object, config: Path, flags: Sequence[object] = ()) -> list[str]:
    """Returns a command line; `flags` are the launcher's own, `arguments` the script's."""
    launcher = ["accelerate", "launch", "--config_file", config, "--main_process_port", own_port(), *flags]
    return [str(word) for word in (*launcher, script, *arguments)]


def own_environment(caches: Path) -> dict[str, str]:
    """Returns an environment with own caches for the script, and without variables about ranks other than the launcher's."""
    environment = os.environ | {"HF_HOME": str(caches)}
    environment.pop("ACCELERATE_USE_CPU", None)
    return environment


def launch(
    script: Path, *arguments: object, caches: Path, config: Path = CPU2, flags: Sequence[object] = ()
) -> subprocess.CompletedProcess:
    """Runs the script to its end."""
    command = launch_command(script, *arguments, config=config, flags=flags)
    environment = own_environment(caches)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)


def launch_forked(
    script: Path, *arguments: object, config: Path = CPU2, flags: Sequence[object] = (), time_limit_s: float = SECONDS
) -> subprocess.CompletedProcess:
    """Works like `launch`, but without the launcher and without the time for importing torch in new interpreters.

    The caches belong to the tests' session.
    """
    words = [str(word) for word in ("--config_file", config, *flags, script, *arguments)]
    launched, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if launched.num_processes > 1:
        environment = prepare_multi_gpu_env(launched)
    else:
        _, environment = prepare_simple_launcher_cmd_env(launched)
    environment.pop("ACCELERATE_USE_CPU", None)
    processes = launched.num_processes
    return run_forked(script, arguments, environment=environment, processes=processes, time_limit_s=time_limit_s)


def run_forked(
    script: Path | str,
    arguments: Sequence[object] = (),
    *,
    environment: Mapping[str, str],
    processes: int,
    folder: Path = ROOT,
    time_limit_s: float = SECONDS,
) -> subprocess.CompletedProcess:
    """Runs the ranks of a script, or of a module by its name, in `folder`, in processes forked with all imports.

    The environment is like `torchrun --nproc_per_node`'s. If a rank fails, the others are killed. `stdout` and `stderr` contain
    all ranks' output; the status is the first one that is not 0.
    """
    start_forking()
    context, deadline_s = get_context("forkserver"), time.monotonic() + time_limit_s
    with tempfile.TemporaryDirectory(prefix="said-") as said:
        places = [{}] if processes == 1 else _places(processes)
        words = [str(word) for word in arguments]
        ranks = [
            context.Process(
                target=_run_script, args=(script, words, dict(environment) | place, folder, said), daemon=True
            )
            for place in places
        ]
        try:
            for rank in ranks:
                rank.start()
            left = {rank.sentinel: rank for rank in ranks}
            status = 0
            while left and not status:
                ended = connection.wait(left, timeout=max(0.0, deadline_s - time.monotonic()))
                if not ended:
                    raise subprocess.TimeoutExpired([script, *words], time_limit_s, *_said(Path(said)))
                for sentinel in ended:
                    rank = left.pop(sentinel)
                    rank.join()
                    status = status or rank.exitcode
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
        return subprocess.CompletedProcess([script, *words], status, *_said(Path(said)))


def _places(processes: int) -> list[dict[str, str]]:
    """Returns each rank's launcher variables."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_to_meet_on())}
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    return [meeting | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _run_script(script: Path | str, words: list[str], environment: dict[str, str], folder: Path, said: str) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(said) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # Seed as in a new process: forked ranks would otherwise draw the same random samples, unlike ranks of a launcher.
    torch.seed()
    sys.argv = [str(script), *words]
    torch.set_num_threads(1)
    with ending_as_a_script():
        if isinstance(script, str):
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(script.resolve().parent))
            runpy.run_path(str(script), run_name="__main__")


@contextmanager
def ending_as_a_script() -> Iterator[None]:
    """Ends a forked process as Python ends a script: with the error hook, a status, and the functions at exit."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        # multiprocessing's processes skip these functions.
        atexit._run_exitfuncs()


def _said(folder: Path) -> tuple[str, str]:
    paths = (folder / name for name in ("stdout", "stderr"))
    out, err = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
    return out, err
