"""An error that ends a rank: told to the ranks that miss it, to the launcher, and once to who reads the screen."""

import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from accelerate import Accelerator

from ...comm.control.end_of_process import write_error_file
from ...comm.control.watch import Watch
from ...comm.groups.failures import CommunicationError
from ...config import ConfigError


class LastWords:
    """Python's `sys.excepthook` of a rank.

    Args:
        former: the hook that prints the traceback.
    """

    def __init__(self, former: Callable):
        self._former = former
        self._accelerators: list[weakref.ref[Accelerator]] = []

    @classmethod
    def installed(cls) -> "LastWords":
        """The hook of this process, seated if it is not yet."""
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls(sys.excepthook)
        return sys.excepthook

    def follow(self, accelerator: Accelerator) -> None:
        """From now on, the ranks of this Accelerator's engines hear of an error that ends this process."""
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
        write_error_file(summary, said)
        if reason is not None and _is_told_by_the_main_rank(error):
            print(f"hf_zero: rank {_own_rank()} ends too: {reason.splitlines()[0]}", file=sys.stderr, flush=True)
            return
        if isinstance(error, CommunicationError):
            # What the backend said, of addresses, stands in the way of what is wrong.
            error.__cause__, error.__suppress_context__ = None, True
        self._former(kind, error, trace)
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
