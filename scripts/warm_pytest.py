"""Runs pytest in copies of the tree repeatedly, without importing torch and transformers each time.

    with WarmPytest() as warm:
        done = warm.run(tree, ["-x", "tests/layout"], time_limit_s=60)

One interpreter imports the libraries of the package and its tests, but nothing of the tree. Each run is a process forked from
this interpreter, and imports the package and the tests of its tree.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

IMPORTED = (
    "accelerate",
    "torch.distributed.fsdp",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer_seq2seq",
    "hypothesis",
    "pytest",
    "typer.testing",
)


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a run. `status` is pytest's, or None if the run exceeded its time limit."""

    status: int | None
    said: str


class WarmPytest:
    """The interpreter from which runs are forked, for the time of the `with` block."""

    def __enter__(self) -> WarmPytest:
        self._interpreter = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._interpreter.stdin.close()
        self._interpreter.wait()
        self._interpreter.stdout.close()

    def run(self, tree: Path, arguments: Sequence[str], *, time_limit_s: float) -> Done:
        """Runs `python -m pytest` with these arguments in the folder, which is first in the search path for modules."""
        path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        with tempfile.TemporaryDirectory(prefix="said-") as folder:
            said = Path(folder) / "said"
            asked = {
                "tree": str(tree),
                "arguments": list(arguments),
                "environment": dict(os.environ) | {"PYTHONPATH": path},
                "said": str(said),
                "time_limit_s": time_limit_s,
            }
            self._interpreter.stdin.write(json.dumps(asked) + "\n")
            self._interpreter.stdin.flush()
            answer = self._interpreter.stdout.readline()
            if not answer:
                raise RuntimeError("the interpreter that runs of pytest are forked from has ended")
            return Done(status=json.loads(answer), said=said.read_text(errors="replace"))


def serve() -> None:
    """Forks a run for each line of the input, and prints its result."""
    own_folder = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder for folder in sys.path if folder != own_folder]
    for name in IMPORTED:
        # A different release may lack this module. Whoever needs it imports it.
        with suppress(ImportError):
            importlib.import_module(name)
    # Processes started by a run through multiprocessing would import this file as their main module.
    sys.modules["__main__"] = ModuleType("__main__")
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _end_with(_run, asked)
        status = _waited_for(pid, asked["time_limit_s"])
        os.write(1, f"{json.dumps(status)}\n".encode())
    # Otherwise nanobind would report its objects as leaks at the exit.
    gc.unfreeze()


def _waited_for(pid: int, time_limit_s: float) -> int | None:
    """Returns the exit status of a child; None if the child had to be killed."""
    descriptor = os.pidfd_open(pid)
    try:
        is_in_time, _, _ = select.select([descriptor], [], [], time_limit_s)
    finally:
        os.close(descriptor)
    if not is_in_time:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if is_in_time else None


def _end_with(target, *arguments: object) -> None:
    """Ends a forked process like an interpreter at its end, with the function's result as status."""
    status = 1
    try:
        status = int(target(*arguments) or 0)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Exit after any error: the copied loop of the parent process must not continue here.
        os._exit(status)


def _run(asked: dict) -> int:
    """Runs pytest in its own process."""
    said = os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, said), (2, said)):
        os.dup2(source, descriptor)
    _move_to(asked["tree"], asked["environment"])
    sys.argv = ["pytest", *asked["arguments"]]
    import pytest

    return int(pytest.main(asked["arguments"]))


def _move_to(folder: str, environment: dict[str, str]) -> None:
    """Sets the process's folder and environment, and the module search paths from the environment."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    named = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [*named, *(place for place in sys.path if place not in named)]


if __name__ == "__main__":
    serve()
