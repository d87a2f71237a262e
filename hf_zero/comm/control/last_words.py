"""An error that ends a rank: told to the ranks that miss it, to the launcher, and once to who reads the screen."""

import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...config import ConfigError
from ..groups.failures import CommunicationError
from .end_of_process import write_error_file
from .watch import Watch


class LastWords:
    """Python's `sys.excepthook` of a rank.

    Args:
        former: the hook that prints the traceback.
    """

    def __init__(self, former: Callable):
        self._former = former
        self._accelerators: list[weakref.ref[Any]] = []

    @classmethod
    def installed(cls) -> "LastWords":
        """The hook of this process, seated if it is not yet."""
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls(sys.excepthook)
        return sys.excepthook

    def follow(self, accelerator: Any) -> None:
        """From now on, the ranks of this Accelerator's `zero_engines` hear of an error that ends this process."""
        self._accelerators.append(weakref.ref(accelerator))

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        summary = "".join(traceback.format_exception_only(kind, error)).strip()
        reason = _reason(error)
        if not isinstance(error, CommunicationError):
            # Of a collective that failed, the ranks have told each other.
            for watch in self._watches():
                watch.say_last(summary.partition("\n")[0])
        losses = self._losses(error)
        said = losses or reason or "".join(traceback.format_exception(kind, error, trace))
        is_left = write_error_file(summary, said)
        if isinstance(error, ConfigError):
            # Where in hf_zero a setting is refused does not matter to who has set it.
            trace, error.__cause__, error.__suppress_context__ = _line_of_the_script(trace), None, True
        if reason is not None and _is_told_by_the_main_rank(error):
            if is_left and isinstance(error, ConfigError):
                # The launcher shows it once more by itself.
                return
            print(f"hf_zero: rank {_own_rank()} ends too: {reason.splitlines()[0]}", file=sys.stderr, flush=True)
            return
        if isinstance(error, CommunicationError):
            # What the backend said, of addresses, stands in the way of what is wrong.
            error.__cause__, error.__suppress_context__ = None, True
        # Python shows the error's own.
        self._former(kind, error.with_traceback(trace), trace)
        if losses is not None and losses not in [watch.ended for watch in self._watches()]:
            print(losses, file=sys.stderr, flush=True)

    def _losses(self, error: BaseException) -> str | None:
        """For an error of torch.distributed's own: the ranks that have gone."""
        is_torchs = isinstance(error, RuntimeError) and any(
            Path(frame.filename).name == "distributed_c10d.py" for frame in traceback.extract_tb(error.__traceback__)
        )
        if not is_torchs or isinstance(error, CommunicationError):
            return None
        for watch in self._watches():
            losses = watch.losses()
            if losses is not None and losses.startswith("hf_zero: "):
                return losses
            if losses is not None:
                return f"hf_zero: a collective that the script called by itself failed, for want of a rank: {losses}."
        return None

    def _watches(self) -> Iterator[Watch]:
        for reference in self._accelerators:
            accelerator = reference()
            for engine in accelerator.zero_engines if accelerator is not None else ():
                yield engine.transport.watch


def _line_of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """The innermost frame of what runs as `__main__`, alone; the whole where there is none."""
    found = None
    inner = trace
    while inner is not None:
        if inner.tb_frame.f_globals.get("__name__") == "__main__":
            found = TracebackType(None, inner.tb_frame, inner.tb_lasti, inner.tb_lineno)
        inner = inner.tb_next
    return found or trace


def _reason(error: BaseException) -> str | None:
    """The paragraph of an error that hf_zero raised."""
    text = str(error)
    return text if text.startswith("hf_zero") else None


def _is_told_by_the_main_rank(error: BaseException) -> bool:
    """Whether the main rank has the same error, and shows it with its traceback."""
    if _own_rank() == 0:
        return False
    if isinstance(error, ConfigError):
        return True
    return isinstance(error, CommunicationError) and bool(error.culprits) and 0 not in error.culprits


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
