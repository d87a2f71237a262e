"""`hf_zero.launch`: trains a function on several ranks from a notebook cell, in fresh processes."""

import codecs
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import dill  # type: ignore[import-untyped]  # dill has no types. `datasets` requires it.
import psutil

from ..config import ConfigError
from ..config.checks import shown
from .launcher import PARENT_VARIABLE, end_with_parent, launch_of

# ---- In the notebook ----

_GRACE_S = 5.0
"""Time for torchrun and its workers to exit after SIGTERM. After it, the remaining processes are killed."""
_LOOK_S = 0.05


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_processes: int | None = None,
    zero: int | str | None = None,
    cpu: bool = False,
    mixed_precision: str | None = None,
) -> Any:
    """Calls `function(*args)` on each of several ranks of this machine, and returns rank 0's return value.

    The ranks are fresh processes, so CUDA may already be in use in this one. The function, and the notebook's globals used in
    the function, are pickled by value. Rank 0's output is shown immediately. An interrupt, or the end of this process, ends
    all ranks.

    Args:
        function: the function to call.
        args: its arguments.
        num_processes: by default one per accelerator, or two on a CPU.
        zero: a stage, a YAML file or settings, for each Accelerator and Trainer built in the function, like `--zero` of
            `hf-zero run`. With None, the function itself sets up hf_zero.
        cpu: train on the CPU even if the machine has accelerators.
        mixed_precision: `no`, `fp16` or `bf16`.

    Raises:
        ConfigError: a setting is not valid.
        RuntimeError: a rank has failed; the text names the rank and its error.
    """
    if not callable(function):
        raise ConfigError(f"hf_zero: launch got {shown(function)}; it takes a function: hf_zero.launch(train, ...).")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ConfigError(
            f"hf_zero: launch got args {shown(args)}; it takes a tuple: hf_zero.launch(train, (value,), ...)."
        )
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and ranks != "1":
        # Otherwise each rank would start ranks, which all train and write the same files.
        raise ConfigError(
            f"hf_zero: launch starts ranks, and this process is already rank {os.environ['RANK']} of {ranks}. Start the script "
            "with `python`, or call the function without launch."
        )
    with tempfile.TemporaryDirectory(prefix="hf_zero-launch-") as name:
        folder = Path(name)
        # Pickle the function by value, with its globals, because a notebook's functions are not in a file.
        _write(folder / "call", (function, tuple(args)))
        words = ["--zero", str(0 if zero is None else zero), "-m", __name__, name]
        started = launch_of(
            words,
            processes=num_processes,
            cpu=cpu,
            mixed_precision=mixed_precision,
            port=_free_port(),
            module="hf_zero.run" if zero is not None else __name__,
        )
        status = _run(started.command, started.environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        if status:
            raise RuntimeError(f"hf_zero: {_first_error(folder)}; the launcher exited with status {status}.")
        return _read(folder / "result")


class _Pickler(dill.Pickler):
    """Pickles modules by name. dill would store the contents of a module outside of site-packages."""

    def persistent_id(self, obj: object) -> str | None:
        return obj.__name__ if isinstance(obj, ModuleType) else None


class _Unpickler(dill.Unpickler):
    def persistent_load(self, name: str) -> ModuleType:
        return import_module(name)


def _write(path: Path, value: object) -> None:
    with path.open("wb") as file:
        # With `recurse`, dill stores only the globals used in a function.
        _Pickler(file, recurse=True).dump(value)


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        return _Unpickler(file).load()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Runs the launcher and shows its output. Ends all ranks when this call returns or raises."""
    own = {PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    text = codecs.getincrementaldecoder("utf-8")("replace")
    process: subprocess.Popen | None = None
    try:
        with _interrupts_wait():
            process = subprocess.Popen(
                command,
                env=os.environ | environment | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only this process, which then ends the ranks.
                start_new_session=True,
            )
        assert process.stdout is not None
        # Not line by line, because a progress bar writes no newline until full.
        while piece := os.read(process.stdout.fileno(), 65536):
            sys.stdout.write(text.decode(piece))
            sys.stdout.flush()
        return process.wait()
    finally:
        with _interrupts_wait():
            if process is not None:
                _end(process)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delays an interrupt until the block has ended.

    An interrupt inside of `Popen` would leave a launcher that the caller does not know. A second one, while the ranks of the
    first one end, would leave ranks.
    """
    former = signal.getsignal(signal.SIGINT)
    if not callable(former) or threading.current_thread() is not threading.main_thread():
        # Python calls handlers in the main thread only.
        yield
        return
    waiting: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if waiting:
            former(*waiting[0])


def _end(process: subprocess.Popen) -> None:
    """Ends the launcher and all processes started by it, and waits for them."""
    with process:
        if process.poll() is not None:
            return
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        # Ranks started after this list was made notice the launcher's end and exit.
        for rank in started:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        until = time.monotonic() + _GRACE_S
        while any(map(_is_alive, started)) and time.monotonic() < until:
            time.sleep(_LOOK_S)


def _is_alive(process: psutil.Process) -> bool:
    """Returns False for a zombie too: in a container whose first process does not reap, ranks stay zombies."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _first_error(folder: Path) -> str:
    errors = sorted(folder.glob("error *"), key=lambda path: path.stat().st_mtime)
    return (
        errors[0].read_text() if errors else "a rank of hf_zero.launch was killed, or its error is in the output above"
    )


# ---- In each rank ----


def main() -> None:
    """Calls the function stored in a folder by `launch`. The last command-line argument is the folder."""
    # Not `os.getppid()`: if the launcher was killed while this rank started, that is another process already.
    end_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    folder, rank = Path(sys.argv[-1]), os.environ.get("RANK", "0")
    if rank != "0":
        # Show only the output of rank 0. `launch` reports errors of the other ranks.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    function, args = _read(folder / "call")
    try:
        result = function(*args)
    except BaseException as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        (folder / f"error {rank}").write_text(f"rank {rank} of hf_zero.launch failed: {said}")
        raise
    if rank == "0":
        _write(folder / "result", result)


if __name__ == "__main__":
    main()
