"""An error that ends a rank: reported to the other ranks and the launcher, and printed once."""

import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..comm.waits import Watch
from ..config import ConfigError
from .arrivals import CommunicationError
from .rank_state import line_in, torch_call_in

# ---- Ends this process with a reason, even if its main thread hangs, and informs the launcher ----

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file that torchrun (and `accelerate launch`) shows under "Root Cause"."""


def write_error_file(summary: str, said: str) -> bool:
    """Writes an error for the launcher, unless the file already has one. Returns whether the file has an error now."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return False
    # The format of torch.distributed.elastic, which shows `py_callstack` of the two texts.
    extra = {"py_callstack": said, "timestamp": str(int(time.time()))}
    try:
        # Mode "x" keeps an existing error, and follows no link.
        with open(path, "x") as file:
            json.dump({"message": {"message": summary, "extraInfo": extra}}, file)
    except FileExistsError:
        return True
    except OSError as error:
        print(f"hf_zero: the error could not be written for the launcher: {error}", file=sys.stderr)
        return False
    return True


def end_process(said: str) -> None:
    """Prints the reason and ends the process with status 1."""
    # Do not raise an exception, because a thread inside a blocking call would not see one.
    write_error_file(said.partition("\n")[0], said)
    # Bypass Python's buffers, because the main thread may hold their locks.
    os.write(2, f"{said}\n".encode())
    os._exit(1)


# ---- An error that ends a rank: reported to the other ranks and to the launcher, and printed once ----


def lost_ranks(error: BaseException, watches: Iterable[Watch]) -> CommunicationError | None:
    """Returns an error with the names of the lost ranks, if `error` comes from torch.distributed itself; None otherwise."""
    if not isinstance(error, RuntimeError) or isinstance(error, CommunicationError):
        return None
    call = torch_call_in(error.__traceback__)
    if call is None:
        return None
    line = line_in(error.__traceback__)
    return next((found for watch in watches if (found := watch.explain_call(call, line, error)) is not None), None)


@contextmanager
def naming_lost_ranks(accelerator: Any) -> Iterator[None]:
    """Replaces torch.distributed's own error, which names an address, by an error with the names of the ended ranks.

    `ErrorHook` does not run if the script catches the error, in a process started by multiprocessing, or in a notebook.

    Args:
        accelerator: has the `zero_engines` of this rank.
    """
    try:
        yield
    except RuntimeError as error:
        found = lost_ranks(error, watches_of(accelerator))
        if found is None:
            raise
        raise found from error


def watches_of(accelerator: Any) -> list[Watch]:
    return [engine.transport.watch for engine in accelerator.zero_engines]


class ErrorHook:
    """A rank's `sys.excepthook`: informs the other ranks of the error, and prints the error once.

    Args:
        former: the hook that prints the traceback.
    """

    def __init__(self, former: Callable):
        self._former = former
        self._accelerators: list[weakref.ref[Any]] = []

    @classmethod
    def installed(cls) -> "ErrorHook":
        """Returns the hook of this process. Installs one if there is none."""
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls(sys.excepthook)
        return sys.excepthook

    def follow(self, accelerator: Any) -> None:
        """Informs the ranks of this Accelerator's `zero_engines` of a fatal error, from now on."""
        self._accelerators.append(weakref.ref(accelerator))

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        summary = "".join(traceback.format_exception_only(kind, error)).strip()
        reason = _reason(error)
        losses = lost_ranks(error, self._watches())
        if losses is None and not isinstance(error, CommunicationError):
            # If a collective failed, the ranks have already informed each other. Otherwise publish the reason before the
            # traceback is printed, because the others wait for this rank and may reach their time limit.
            for watch in self._watches():
                watch.leave_reason(summary.partition("\n")[0])
        said = str(losses or reason or "".join(traceback.format_exception(kind, error, trace)))
        is_left = write_error_file(summary, said)
        if isinstance(error, ConfigError):
            # For a wrong setting, the line inside hf_zero does not matter to the user, only the line of the script.
            trace, error.__cause__, error.__suppress_context__ = _line_of_the_script(trace), None, True
        if reason is not None and _is_told_by_the_main_rank(error):
            if is_left and isinstance(error, ConfigError):
                # The launcher shows the error again.
                return
            print(f"hf_zero: rank {_own_rank()} exits too: {reason.splitlines()[0]}", file=sys.stderr, flush=True)
            return
        if isinstance(error, CommunicationError):
            # The backend's error only names addresses, so leave the cause out.
            error.__cause__, error.__suppress_context__ = None, True
        # Python shows the error's own traceback.
        self._former(kind, error.with_traceback(trace), trace)
        if losses is not None and losses not in [watch.ended for watch in self._watches()]:
            # A late rank was already reported when the wait was ended.
            print(losses, file=sys.stderr, flush=True)

    def _watches(self) -> Iterator[Watch]:
        for reference in self._accelerators:
            accelerator = reference()
            if accelerator is not None:
                yield from watches_of(accelerator)


def _line_of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Keeps only the innermost frame of `__main__`; returns the whole traceback without such a frame."""
    found = None
    inner = trace
    while inner is not None:
        if inner.tb_frame.f_globals.get("__name__") == "__main__":
            found = TracebackType(None, inner.tb_frame, inner.tb_lasti, inner.tb_lineno)
        inner = inner.tb_next
    return found or trace


def _reason(error: BaseException) -> str | None:
    """Returns the text of an error raised by hf_zero."""
    text = str(error)
    return text if text.startswith("hf_zero") else None


def _is_told_by_the_main_rank(error: BaseException) -> bool:
    """Whether the main rank has the same error, and shows the error with its traceback."""
    if _own_rank() == 0:
        return False
    if isinstance(error, ConfigError):
        return True
    return isinstance(error, CommunicationError) and bool(error.culprits) and 0 not in error.culprits


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
