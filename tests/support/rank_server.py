"""The forkserver of ranks as a copy of this process: a new interpreter would need eight seconds for imports first."""

import atexit
import faulthandler
import io
import logging
import os
import select
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Sequence
from multiprocessing import resource_tracker, util

import ranks
import torch


def can_serve() -> bool:
    """Whether ranks may be copies: a process which has used devices must not be forked."""
    return sys.platform == "linux" and not torch.cuda.is_available()


def fork_server() -> None:
    """Copies this process, which must have no other active thread. The copy imports the preloaded modules with the first rank.

    If a copy is not possible, a new interpreter is started with the first ranks.
    """
    if not can_serve():
        return
    resource_tracker.ensure_running()
    spawn, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        ranks.start_forking()
    finally:
        util.spawnv_passfds = spawn


def _fork(path: str, words: Sequence[str], passed: Sequence[int]) -> int:
    """Replaces the start of a new interpreter, whose last argument is the server's code; returns the copy's process id."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    number = os.fork()
    if number:
        return number
    status = 1
    try:
        for file in passed:
            _close_other_end(file)
        _begin_anew()
        select.select(passed, [], [])
        exec(words[-1], {})
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _close_other_end(file: int) -> None:
    """Closes the copy's other end of a pipe, because the end of the original process must be noticed here.

    All other open files stay open: objects of the original process refer to their numbers.
    """
    pipe = os.fstat(file)
    for other in map(int, os.listdir("/proc/self/fd")):
        try:
            is_end = os.path.samestat(os.fstat(other), pipe)
        except OSError:
            # This is the listing's own descriptor.
            continue
        if is_end and other != file:
            os.close(other)


def _begin_anew() -> None:
    """Resets the copy to the state of a new interpreter: output to files 1 and 2, and no hook or handler of pytest."""
    atexit._clear()
    # Leftovers of the original process's objects, such as folders, are removed by the original.
    for left in list(weakref.finalize._registry):
        left.detach()
    weakref.finalize._registered_with_atexit = False
    faulthandler.disable()
    sys.stdout = sys.__stdout__ = _text_to(1)
    sys.stderr = sys.__stderr__ = _text_to(2)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.root.handlers.clear()
    for handler in filter(None, (reference() for reference in logging._handlerList)):
        # Keep handlers with their own file, or without a stream: they do not write to the terminal.
        is_of_a_file = isinstance(handler, logging.FileHandler) or getattr(handler, "stream", None) is None
        if isinstance(handler, logging.StreamHandler) and not is_of_a_file:
            handler.setStream(sys.stderr)
            # transformers' handler has the `flush` of its first stream.
            vars(handler).pop("flush", None)
    refuse_deprecated_calls()


def refuse_deprecated_calls() -> None:
    """Raises in ranks for the same warnings as in pytest's own process (`filterwarnings` in pyproject.toml)."""
    for category in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("error", category)
    for library in ("torch", "httpx"):
        warnings.filterwarnings("ignore", "", DeprecationWarning, library)
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
    # accelerate calls it to gather on an accelerator.
    warnings.filterwarnings("ignore", ".torch.distributed.all_gather_into_tensor. is deprecated", FutureWarning)


def _text_to(file: int) -> io.TextIOWrapper:
    bytes_to = io.BufferedWriter(io.FileIO(file, "w", closefd=False))
    return io.TextIOWrapper(bytes_to, encoding="utf-8", errors="backslashreplace", line_buffering=True)
