"""Runs pytest in copies of the tree, again and again, without importing torch and transformers each time.

    with WarmPytest() as warm:
        done = warm.run(tree, ["-x", "tests/layout"], time_limit_s=60)

One interpreter imports what the package and its tests need of others, and nothing of the tree. Each run is a process forked from
it, which imports the package and the tests of its tree, and so is the process that the run's own ranks are forked from.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
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
OF_FORKING_PROCESSES = "multiprocessing.forkserver"
MOST_BYTES = 1 << 20
"""Of what one process tells another: an environment is a few thousand."""

# Above those that a process opens by itself.
_FIRST_OWN_DESCRIPTOR = 200


@dataclass(frozen=True, kw_only=True)
class Done:
    """`status` is pytest's, or None where the time limit has ended it."""

    status: int | None
    said: str


class WarmPytest:
    """The interpreter that runs are forked from, as long as the `with` block lasts."""

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
        """`python -m pytest` with these arguments in the folder, which is the first that modules are looked for in."""
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
    """Forks a run for each line of the input, and says how it ended."""
    own_folder = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder for folder in sys.path if folder != own_folder]
    for name in IMPORTED:
        # Another release may have it elsewhere: what needs it imports it.
        with suppress(ImportError):
            importlib.import_module(name)
    # Processes that a run starts by multiprocessing would import this file as theirs.
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
    # At the end, nanobind would name what it cannot free as leaked.
    gc.unfreeze()


def _waited_for(pid: int, time_limit_s: float) -> int | None:
    """The exit status of a child; None if it had to be ended."""
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
    """Leaves a forked process as an interpreter that has come to its end, by the status that the function returns."""
    status = 1
    try:
        status = target(*arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(int(status or 0))


def _run(asked: dict) -> int:
    """A run of pytest, in a process of its own."""
    said = os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, said), (2, said)):
        os.dup2(source, descriptor)
    _move_to(asked["tree"], asked["environment"])
    _fork_later_what_forks_ranks()
    sys.argv = ["pytest", *asked["arguments"]]
    import pytest

    return int(pytest.main(asked["arguments"]))


def _move_to(folder: str, environment: dict[str, str]) -> None:
    """Gives the process a folder and an environment, and the places of modules that the environment names."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    named = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [*named, *(place for place in sys.path if place not in named)]


def _fork_later_what_forks_ranks() -> None:
    """The first interpreter that multiprocessing would start to fork processes from is a process that is forked now."""
    from multiprocessing import util

    start = util.spawnv_passfds
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    spare = os.fork()
    if spare == 0:
        near.close()
        _end_with(_be_told_what_to_run, far)
    far.close()
    is_free = True

    def start_or_tell(path, arguments: list, descriptors: Sequence[int]) -> int:
        nonlocal is_free
        if not (is_free and OF_FORKING_PROCESSES in arguments[-1]):
            return start(path, arguments, descriptors)
        is_free = False
        told = {"code": arguments[-1], "environment": dict(os.environ), "folder": os.getcwd()}
        with near:
            socket.send_fds(near, [json.dumps({**told, "descriptors": list(descriptors)}).encode()], list(descriptors))
        return spare

    util.spawnv_passfds = start_or_tell


def _be_told_what_to_run(far: socket.socket) -> int:
    """Waits for what `python -c` is to run, which holds descriptors by their numbers."""
    message, received, _, _ = socket.recv_fds(far, MOST_BYTES, 16)
    far.close()
    if not message:
        return 0
    told = json.loads(message)
    _move_to(told["folder"], told["environment"])
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_OWN_DESCRIPTOR) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(kept, told["descriptors"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["-c"]
    exec(told["code"], {"__name__": "__main__"})
    return 0


if __name__ == "__main__":
    serve()
