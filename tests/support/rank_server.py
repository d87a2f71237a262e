"""The process that ranks are forked from, as a copy of this one: a new interpreter would import for eight seconds first."""

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
    """Whether ranks may be copies: a process that has asked for devices may not be copied and use them."""
    return sys.platform == "linux" and not torch.cuda.is_available()


def fork_server() -> None:
    """Copies this process, which has to have no other thread at work; what the copy preloads it imports with the first rank.

    Where a copy cannot serve, a new interpreter is started with the first ranks.
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
    """In the place of a new interpreter, whose last word is the code that serves; returns the copy's number."""
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
    """Of a pipe whose end, when the process that this one is a copy of ends, has to be seen here.

    All else that is open stays so: objects of that process know it by its number.
    """
    pipe = os.fstat(file)
    for other in map(int, os.listdir("/proc/self/fd")):
        try:
            is_end = os.path.samestat(os.fstat(other), pipe)
        except OSError:
            # That of the listing itself.
            continue
        if is_end and other != file:
            os.close(other)


def _begin_anew() -> None:
    """As a new interpreter: what is said goes to files 1 and 2, and no hook or handler of pytest's is left."""
    atexit._clear()
    # What that process's objects leave behind when they go, such as folders, is its own to put away.
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
        # One that writes to a file of its own, or to nothing yet, is none of the terminal's.
        is_of_a_file = isinstance(handler, logging.FileHandler) or getattr(handler, "stream", None) is None
        if isinstance(handler, logging.StreamHandler) and not is_of_a_file:
            handler.setStream(sys.stderr)
            # transformers' own has that of the stream that it began with.
            vars(handler).pop("flush", None)
    refuse_deprecated_calls()


def refuse_deprecated_calls() -> None:
    """Raises in ranks for the warnings that pytest's own process raises for (`filterwarnings` of pyproject.toml)."""
    for category in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("error", category)
    for library in ("torch", "httpx"):
        warnings.filterwarnings("ignore", "", DeprecationWarning, library)
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)


def _text_to(file: int) -> io.TextIOWrapper:
    bytes_to = io.BufferedWriter(io.FileIO(file, "w", closefd=False))
    return io.TextIOWrapper(bytes_to, encoding="utf-8", errors="backslashreplace", line_buffering=True)
